"""A training script under a config: whatever enables its checkpointing gets the schedule.

diffusers models are switched on by ``enable_gradient_checkpointing``, transformers models by
``activation_checkpointing_enable`` or its older name ``gradient_checkpointing_enable``. While
:func:`scheduled` lasts, these methods also install the schedule; nothing else in the process is
changed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any
from weakref import WeakSet

from diffusers import ModelMixin
from torch.nn import Module
from transformers import PreTrainedModel

from ..config.settings import Settings
from ..config_schema import CheckpointingConfig
from ..engine.entry import CheckpointEntry
from ..families.registry import FamilyRegistry
from ..messages.errors import ConfigError, UnsupportedModel
from ..messages.log import logger, warn
from ..schedules.history import History
from ..schedules.report import Report
from .apply import apply, installation_of, overall_history

# The methods by which scripts switch checkpointing on.
ENABLERS = (
    (ModelMixin, "enable_gradient_checkpointing"),
    (PreTrainedModel, "activation_checkpointing_enable"),
    (PreTrainedModel, "gradient_checkpointing_enable"),
)


LEFT = "it is left to its own library's checkpointing"


class Refused(ConfigError):
    """The model that the config is about cannot have the schedule."""


@dataclass(frozen=True)
class SwitchedOn:
    """One model that the script switched on, with its deep copies.

    history: of them all together; None where nothing is observed.
    as_asked: whether it was to have the config's schedule, and not every block by itself.
    refused: why it has no schedule.
    """

    name: str
    as_asked: bool = True
    report: Report | None = None
    history: History | None = None
    refused: str = ""

    @property
    def took_effect(self) -> bool:
        if self.history is None:  # a class with its own setters
            return self.report is not None and self.report.strategy == "native"
        return self.history.recomputed or self.history.compiled

    def lines(self) -> list[str]:
        if self.report is None:
            told = [f"no schedule: {self.refused}"]
        elif self.history is None:
            told = ["not observed: the class carries it out itself"]
        else:
            told = self.history.lines()
        return [f"{self.name}, {told[0]}", *(f"  {line}" for line in told[1:])]


@dataclass
class Launched:
    """The models of a run that were switched on, in that order."""

    settings: Settings
    registry: FamilyRegistry
    text_encoders: bool  # whether these have the config's schedule, too
    models: list[SwitchedOn] = field(default_factory=list)
    _known: WeakSet[Module] = field(default_factory=WeakSet)
    _applying: bool = False

    def install(self, model: Module) -> None:
        """Give ``model`` its schedule, unless it has one. Raises ``Refused``."""
        if model in self._known:
            return
        if own := installation_of(model):
            self.note(model, own.report, overall_history(own))
            return
        self._known.add(model)
        name, settings = type(model).__name__, self.settings
        as_asked = self.text_encoders or not self._is_text_encoder(model)
        if not as_asked:
            enabled = settings.checkpointing.enabled
            alone = CheckpointingConfig(enabled=enabled)
            settings = replace(settings, checkpointing=alone, findings=())
            if enabled:
                logger.info(
                    "%s is no diffusion model: every block of it is recomputed by itself "
                    "(--text-encoders gives it the schedule)",
                    name,
                )
        try:
            self._refuse_parts(model)
            self._applying = True
            installation = apply(model, settings, registry=self.registry)
        except UnsupportedModel as error:
            self.models.append(SwitchedOn(name, as_asked, refused=str(error)))
            logger.warning("%s; %s", error, LEFT)
        except ConfigError as error:
            self.models.append(SwitchedOn(name, as_asked, refused=str(error)))
            if self._is_about(model):
                raise Refused(error.findings) from None
            warn("no-schedule", f"{name}: {error}; {LEFT}")
        else:
            history = overall_history(installation)
            self.models.append(SwitchedOn(name, as_asked, installation.report, history))
        finally:
            self._applying = False

    def note(self, model: Module, report: Report, history: History | None) -> None:
        """``model`` has a schedule that the script itself applied, or applies now."""
        if not self._applying:
            self._known.add(model)
            name = type(model).__name__
            logger.info("%s has a schedule that the script itself applied, and keeps it", name)
            self.models.append(SwitchedOn(name, True, report, history))

    def _is_text_encoder(self, model: Module) -> bool:
        """Whether it is a transformers model that no family is about."""
        return isinstance(model, PreTrainedModel) and not self.registry.for_class(type(model))

    def _is_about(self, model: Module) -> bool:
        """Whether the config is about ``model``: its family is the one that the config names."""
        name = self.settings.trainer.model_family
        found = self.registry.for_class(type(model), name)
        return found is not None and (not name or found.family in _names(self.registry, name))

    def _refuse_parts(self, model: Module) -> None:
        """Enabling a part of a model takes the part's checkpoint function out of its schedule."""
        for whole in self._known:
            if whole is not model and any(part is model for part in whole.modules()):
                raise UnsupportedModel(
                    f"{type(model).__name__} is a part of a {type(whole).__name__} that has a "
                    "schedule already"
                )

    def shortfall(self) -> tuple[str, str] | None:
        """Why nothing that the config asks for took effect, if so: a rule, and the sentence."""
        config = self.settings.checkpointing
        if not config.enabled:
            return None
        if not self.models:
            return (
                "never-enabled",
                "no model was switched on by its own enable_gradient_checkpointing() or "
                "gradient_checkpointing_enable(), so there is no schedule; does the script want a "
                "switch such as --gradient_checkpointing? Models of other libraries need apply()",
            )
        asked = [model for model in self.models if model.as_asked]
        installed = [model for model in asked if model.report]
        if not asked and config == CheckpointingConfig():
            installed = self.models
        if not installed:
            return (
                "no-schedule",
                "no model has the schedule of the config"
                + ("" if asked else "; --text-encoders gives it to models of transformers"),
            )
        if any(model.took_effect for model in installed):
            return None
        if not any(model.history and model.history.trained for model in installed):
            return "never-trained", "no training forward ran with checkpointing switched on"
        return "nothing-recomputed", "nothing was recomputed in any training forward"


def _names(registry: FamilyRegistry, name: str) -> set[str]:
    return {family.family for family in registry.named(name)}


@contextmanager
def scheduled(
    settings: Settings, registry: FamilyRegistry, *, text_encoders: bool = False
) -> Iterator[Launched]:
    """Within this, every model whose checkpointing is enabled gets the schedule of ``settings``.

    diffusers models, and transformers models that a family describes, have the config's keys.
    Other transformers models, such as text encoders, recompute every block by itself, unless
    ``text_encoders``. A model that cannot have its schedule is left to its own library; when it is
    the one that the config is about, the call that enables it raises ``Refused``.
    """
    launched = Launched(settings, registry, text_encoders)
    before = {
        (owner, name): owner.__dict__[name] for owner, name in ENABLERS if name in owner.__dict__
    }
    try:
        for (owner, name), method in before.items():
            setattr(owner, name, _installing(method, launched))
        yield launched
    finally:
        for (owner, name), method in before.items():
            setattr(owner, name, method)


def _installing(enable: Callable[..., None], launched: Launched) -> Callable[..., None]:
    """``enable``, the method of a model, and the installation of its schedule after it."""

    @wraps(enable)
    def enable_and_install(model: Module, *args: Any, **kwargs: Any) -> None:
        enable(model, *args, **kwargs)
        logger.disabled = False  # a script's own logging may disable what it does not name
        entries = [
            given for given in (*args, *kwargs.values()) if isinstance(given, CheckpointEntry)
        ]
        if entries:  # apply() is at work
            launched.note(model, entries[0].report, entries[0].overall)
        else:
            launched.install(model)

    return enable_and_install
