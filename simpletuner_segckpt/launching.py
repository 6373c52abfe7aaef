"""A training script under a config: whatever enables its checkpointing gets the schedule.

diffusers models are switched on by ``enable_gradient_checkpointing``, transformers models by
``activation_checkpointing_enable`` or its older name ``gradient_checkpointing_enable``. While
:func:`scheduled` lasts, these methods also install the schedule; nothing else in the process is
changed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakSet

from diffusers import ModelMixin
from torch.nn import Module
from transformers import PreTrainedModel

from .config_schema import CheckpointingConfig
from .errors import UnsupportedModel
from .install import apply, remove
from .messages import logger
from .registry import FamilyRegistry
from .report import History, Report
from .settings import Settings

DOORS = (
    (ModelMixin, "enable_gradient_checkpointing"),
    (PreTrainedModel, "activation_checkpointing_enable"),
    (PreTrainedModel, "gradient_checkpointing_enable"),
)


@dataclass(frozen=True)
class Scheduled:
    """One model that the script switched on. ``history`` is None where nothing is observed.

    refused: why it has no schedule and is left to its own library's checkpointing.
    """

    name: str
    report: Report | None = None
    history: History | None = None
    refused: str = ""


@dataclass
class Launched:
    """The models of a run that were switched on, in that order."""

    settings: Settings
    registry: FamilyRegistry
    text_encoders: bool  # whether these have the config's schedule, too
    models: list[Scheduled] = field(default_factory=list)
    _known: WeakSet[Module] = field(default_factory=WeakSet)

    def install(self, model: Module) -> None:
        """Give ``model`` its schedule, if it has none yet. Raises ``ConfigError``."""
        if model in self._known:
            return
        self._known.add(model)
        name = type(model).__name__
        config: Settings | CheckpointingConfig = self.settings
        if self._is_text_encoder(model) and not self.text_encoders:
            config = CheckpointingConfig(enabled=self.settings.checkpointing.enabled)
            logger.info(
                "%s is no diffusion model: every block of it is recomputed by itself "
                "(--text-encoders gives it the schedule)",
                name,
            )
        try:
            installation = apply(model, config, registry=self.registry)
        except UnsupportedModel as error:
            self.models.append(Scheduled(name, refused=str(error)))
            logger.warning("%s; it is left to its own library's checkpointing", error)
            return
        self.models.append(Scheduled(name, installation.report, installation.history))

    def _is_text_encoder(self, model: Module) -> bool:
        """Whether it is a transformers model that no family is about."""
        return isinstance(model, PreTrainedModel) and not self.registry.for_class(type(model))

    def remove(self) -> None:
        """Take the schedules off again where the models are still there."""
        for model in list(self._known):
            remove(model)

    def shortfall(self) -> tuple[str, str] | None:
        """Why nothing that the config asks for took effect, and the rule of it, if nothing did."""
        if not self.settings.checkpointing.enabled:
            return None
        if not self.models:
            return (
                "never-enabled",
                "the script never enabled gradient checkpointing, so nothing was recomputed; does "
                "it want a switch of its own, such as --gradient_checkpointing?",
            )
        installed = [model for model in self.models if model.report]
        if not installed:
            return "no-schedule", "no model of the script could be given the schedule"
        if any(_took_effect(model) for model in installed):
            return None
        if not any(model.history and model.history.trained for model in installed):
            return "never-trained", "no training forward ran with checkpointing switched on"
        return "nothing-recomputed", "nothing was recomputed in any training forward"

    def lines(self) -> list[str]:
        """What ran, model by model."""
        out = []
        for model in self.models:
            strategy = model.report.strategy if model.report else "no schedule"
            told = [model.refused or "not observed: the class carries it out itself"]
            if model.history:
                told = model.history.lines()
            out.append(f"{model.name}, {strategy}: {told[0]}")
            out += [f"  {line}" for line in told[1:]]
        return out


def _took_effect(model: Scheduled) -> bool:
    if model.history is None:  # a class with its own setters
        return model.report is not None and model.report.strategy == "native"
    return model.history.recomputed or model.history.compiled


@contextmanager
def scheduled(
    settings: Settings, registry: FamilyRegistry, *, text_encoders: bool = False
) -> Iterator[Launched]:
    """Within this, every model whose checkpointing is enabled gets the schedule of ``settings``.

    diffusers models, and transformers models that a family describes, have the config's keys.
    Other transformers models, such as text encoders, recompute every block by itself, unless
    ``text_encoders``. Where ``apply`` raises ``ConfigError``, so does the call that enables.
    """
    launched = Launched(settings, registry, text_encoders)
    before = {
        (owner, name): owner.__dict__[name] for owner, name in DOORS if name in owner.__dict__
    }
    try:
        for (owner, name), method in before.items():
            setattr(owner, name, _installing(method, launched))
        yield launched
    finally:
        for (owner, name), method in before.items():
            setattr(owner, name, method)
        launched.remove()


def _installing(enable: Callable[..., None], launched: Launched) -> Callable[..., None]:
    """``enable``, the method of a model, and the installation of its schedule after it."""

    @wraps(enable)
    def enable_and_install(model: Module, *args: Any, **kwargs: Any) -> None:
        enable(model, *args, **kwargs)
        launched.install(model)

    return enable_and_install
