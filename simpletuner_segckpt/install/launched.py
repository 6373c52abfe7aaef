"""The models of a training script that runs under a config, and what became of each."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakSet

from torch.nn import Module
from transformers import PreTrainedModel

from ..config.settings import Settings
from ..config_schema import CheckpointingConfig
from ..families.registry import FamilyRegistry, class_names, is_class
from ..messages.errors import ConfigError, UnsupportedModel
from ..messages.log import logger, warn
from ..schedules.history import History
from ..schedules.report import Report
from .apply import apply, installation_of, overall_history
from .own_setters import has_own_setters

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
    """The models of a run that were switched on or noticed, in that order.

    text_encoders: whether these have the config's schedule, too. asked_for: the dotted path of a
    class whose models have it. native: whether classes with setters for the keys carry them out.
    installed: is told the class of each model that has a schedule.
    """

    settings: Settings
    registry: FamilyRegistry
    text_encoders: bool = False
    asked_for: str = ""
    native: bool = False
    installed: Callable[[type], None] = lambda kind: None
    models: list[SwitchedOn] = field(default_factory=list)
    _known: WeakSet[Module] = field(default_factory=WeakSet)
    _applying: bool = False
    _asked_trains: bool = False

    def wants(self, kind: type) -> bool:
        """Whether models of this class are to have a schedule though nobody switches them on."""
        return self._is_asked(kind) or (
            not self._names.isdisjoint(base.__name__ for base in kind.__mro__)
            and self.registry.for_class(kind) is not None
        )

    def notice(self, model: Module) -> None:
        """``model`` begins to train. Raises ``Refused``."""
        logger.disabled = False  # a script's own logging may disable what it does not name
        self._asked_trains |= self._is_asked(type(model))
        if model not in self._known and not self._whole_of(model):
            if installation_of(model) is None:
                logger.info("%s is noticed in its first training forward", type(model).__name__)
            self.install(model)

    def is_served(self) -> bool:
        """Whether what the config is about has its schedule."""
        if self.asked_for and not self._asked_trains:
            return False
        return any(model.as_asked and model.report for model in self.models)

    def install(self, model: Module) -> None:
        """Give ``model`` its schedule, unless it has one. Raises ``Refused``."""
        if model in self._known:
            return
        if own := installation_of(model):
            history = overall_history(own)
            if any(history is not None and history is known.history for known in self.models):
                self._known.add(model)  # a deep copy
            else:
                self.note(model, own.report, history)
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
            native = self.native and has_own_setters(model)
            installation = apply(model, settings, registry=self.registry, native=native)
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
            self.installed(type(model))
        finally:
            self._applying = False

    def note(self, model: Module, report: Report, history: History | None) -> None:
        """``model`` has a schedule that the script itself applied, or applies now."""
        if not self._applying:
            self._known.add(model)
            name = type(model).__name__
            logger.info("%s has a schedule that the script itself applied, and keeps it", name)
            self.models.append(SwitchedOn(name, True, report, history))
            self.installed(type(model))

    def _is_text_encoder(self, model: Module) -> bool:
        """Whether it is a transformers model that no family is about."""
        return isinstance(model, PreTrainedModel) and not self.wants(type(model))

    def _is_asked(self, kind: type) -> bool:
        """Whether models of this class were asked for."""
        return bool(self.asked_for) and any(is_class(base, self.asked_for) for base in kind.__mro__)

    @cached_property
    def _names(self) -> set[str]:
        return class_names(self.registry)

    def _is_about(self, model: Module) -> bool:
        """Whether the config is about ``model``: it is what was asked for, or its family is the one
        that the config names."""
        if self.asked_for:
            return self._is_asked(type(model))
        name = self.settings.trainer.model_family
        found = self.registry.for_class(type(model), name)
        return found is not None and (not name or found.family in _families(self.registry, name))

    def _refuse_parts(self, model: Module) -> None:
        """Enabling a part of a model takes the part's checkpoint function out of its schedule."""
        if whole := self._whole_of(model):
            raise UnsupportedModel(
                f"{type(model).__name__} is a part of a {type(whole).__name__} that has a "
                "schedule already"
            )

    def _whole_of(self, model: Module) -> Module | None:
        """The model with a schedule that ``model`` is a part of."""
        for whole in self._known:
            if whole is not model and any(part is model for part in whole.modules()):
                return whole
        return None

    def shortfall(self) -> tuple[str, str] | None:
        """Why nothing that the config asks for took effect, if so: a rule, and the sentence."""
        config = self.settings.checkpointing
        if not config.enabled:
            return None
        if self.asked_for and not self._asked_trains:
            return "never-enabled", f"no training forward of a {self.asked_for} was seen"
        if not self.models:
            return (
                "never-enabled",
                "no model was switched on by its own enable_gradient_checkpointing() or "
                "gradient_checkpointing_enable(), and none of a class that a family names was seen "
                "to train, so there is no schedule; does the script want a switch such as "
                "--gradient_checkpointing? --model package.module:Class names another class",
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


def _families(registry: FamilyRegistry, name: str) -> set[str]:
    return {family.family for family in registry.named(name)}
