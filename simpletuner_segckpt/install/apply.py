"""Put a schedule on a model, and take it off again."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import signature
from weakref import WeakKeyDictionary

from torch.nn import Module

from ..config.settings import ConfigSource, Settings, load_settings
from ..config_schema import CheckpointingConfig
from ..engine.entry import CheckpointEntry
from ..engine.patches import ModelPatches
from ..engine.planner import ForwardPlanner
from ..engine.platform import Platform
from ..engine.proof import Proof
from ..families.registry import FamilyRegistry
from ..families.schema import Family
from ..messages.errors import ConfigError, UnsupportedModel
from ..messages.findings import Finding
from ..messages.log import logger, warn
from ..model.flags import CheckpointFlags
from ..model.foreign_hooks import refuse_hooks
from ..model.interception import RECEIVER
from ..model.stacks import (
    blocks_of,
)
from ..model.wrappers import unwrap
from ..private.of_libraries import (
    CHECKPOINT_FUNCTION,
    SUPPORTS_CHECKPOINTING,
    takes_checkpoint_function,
)
from ..private.of_torch import hooks_on
from ..recompute.submodules import SubmoduleKind
from ..schedules.conditions import Condition
from ..schedules.effect import Effect
from ..schedules.history import History
from ..schedules.own_setters import native_problems
from ..schedules.problems import problems
from ..schedules.report import UNITS, Report
from .own_setters import (
    SetterState,
    call_setters,
    has_own_setters,
    not_taken,
    undo_setters,
)
from .planned import planned_for
from .undo import put_back, states_of

# Models whose own setters were called, and what they changed.
_setter_states: WeakKeyDictionary[Module, SetterState] = WeakKeyDictionary()


@dataclass(frozen=True)
class Installation:
    """A schedule on a model."""

    model: Module = field(repr=False)
    report: Report
    _owner: CheckpointEntry | SetterState = field(repr=False)

    @property
    def effect(self) -> Effect | None:
        """What the last training forward really did; None before the first one.

        Forwards without gradients leave it as it is. Of a forward in a graph that was compiled as
        a whole it says just that, and of a class with its own setters (strategy ``native``)
        nothing is observed.
        """
        return self._owner.last_effect if isinstance(self._owner, CheckpointEntry) else None

    @property
    def history(self) -> History | None:
        """What all forwards did since; None for a class with its own setters.

        A deep copy of the model counts for itself, from the copy on (``installation_of``).
        """
        return self._owner.observed.history if isinstance(self._owner, CheckpointEntry) else None

    @property
    def proofs(self) -> dict[str, Proof]:
        """By stack path, what the latest recorded forward showed of the boundaries of blocks."""
        return dict(self._owner.forwards.proofs) if isinstance(self._owner, CheckpointEntry) else {}

    @property
    def drifts(self) -> dict[str, str]:
        """By stack path, what blocks carried that the family file does not say."""
        return dict(self._owner.forwards.drifts) if isinstance(self._owner, CheckpointEntry) else {}

    def remove(self) -> None:
        """Leave the model as it was before ``apply``. Does nothing when that has been done."""
        if self._owner is entry_of(self.model) or self._owner is _setter_states.get(self.model):
            remove(self.model)


def apply(
    model: Module,
    config: ConfigSource,
    *,
    registry: FamilyRegistry | None = None,
    family: str | Family | None = None,
    native: bool = False,
) -> Installation:
    """Install the schedule that ``config`` asks for on ``model``, replacing an earlier one.

    ``config`` is a path, a mapping, an argparse namespace or a ``CheckpointingConfig``. The
    model may be wrapped by PEFT, accelerate or ``torch.compile``. Its family is found by
    its class unless ``family`` names one; a model that no family describes is probed.

    With ``native``, a class that brings ``set_gradient_checkpointing_*`` methods (SimpleTuner's do)
    carries the keys out itself, in its own way; otherwise these are not called.

    Raises ``ConfigError`` (bad or unsupported keys), ``UnknownFamily`` or ``UnsupportedModel``
    (no stack of blocks, hooks on it that cannot work, or ``native`` of a class without such
    methods). Whatever is raised, the model is then as
    it was before, with the earlier schedule if it had one.
    """
    return apply_on(Platform(), model, config, registry=registry, family=family, native=native)


def apply_on(
    platform: Platform,
    model: Module,
    config: ConfigSource,
    *,
    registry: FamilyRegistry | None = None,
    family: str | Family | None = None,
    native: bool = False,
) -> Installation:
    """``apply`` on another platform than the machine of this process."""
    settings = load_settings(config)
    if not isinstance(model, Module):
        raise TypeError(f"model is a {type(model).__name__}; pass an nn.Module")
    base = unwrap(model)
    if native and not has_own_setters(base):
        raise UnsupportedModel(
            f"{type(base).__name__} has no set_gradient_checkpointing_interval() or the like, "
            "which native=True is about; leave that out"
        )
    described, report = planned_for(base, settings, registry, family, native)
    _refuse_shared(base, [stack.path for stack in report.stacks])
    asked = _refused_by_setters if native else _problems
    findings = [*settings.findings, *asked(platform, base, settings, described, report)]
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise ConfigError(errors)
    for stack in report.stacks if not native else ():
        if stack.path != UNITS:
            refuse_hooks(stack, blocks_of(base, stack.path))
    for finding in findings:
        logger.warning("%s", finding)
    if platform.accelerator() is None:
        report = report.without_accelerator()
    earlier = _owner_of(base)
    with ExitStack() as undo:
        shared = earlier.models(base) if isinstance(earlier, CheckpointEntry) else {base}
        undo.callback(put_back, states_of(shared))
        undo.callback(_know, base, earlier)
        _take_off(base, earlier)
        owner: CheckpointEntry | SetterState
        if native:
            owner = _set(base, report, described, settings)
        else:
            owner = _put_on(platform, base, report, described, settings, undo)
        installation = Installation(base, owner.report, owner)
        logger.info("installed on %s: %s", type(base).__name__, owner.report)
        undo.pop_all()
    if isinstance(earlier, CheckpointEntry):
        earlier.let_go()
    return installation


def installation_of(model: Module) -> Installation | None:
    """The schedule that is on ``model``, however it is wrapped, or None."""
    base = unwrap(model)
    owner = _owner_of(base)
    return Installation(base, owner.report, owner) if owner else None


def overall_history(installation: Installation) -> History | None:
    """The history of the model and of its deep copies in this process together."""
    owner = installation._owner
    return owner.observed.overall if isinstance(owner, CheckpointEntry) else None


def remove(model: Module) -> None:
    """Take the schedule off ``model``, or off a copy of a model that had one.

    Checkpointing is switched on or off as it was before ``apply``.
    """
    base = unwrap(model)
    owner = _owner_of(base)
    _take_off(base, owner)
    if isinstance(owner, CheckpointEntry):
        owner.let_go()


def _owner_of(base: Module) -> CheckpointEntry | SetterState | None:
    return entry_of(base) or _setter_states.get(base)


def _take_off(base: Module, owner: CheckpointEntry | SetterState | None) -> None:
    """Leave ``base`` as it was before; what an entry holds for the process it holds still."""
    if isinstance(owner, CheckpointEntry):
        owner.step_aside(base)
    elif owner is not None:
        _know(base, None)
        undo_setters(base, owner)


def _put_on(
    platform: Platform,
    base: Module,
    report: Report,
    family: Family | None,
    settings: Settings,
    undo: ExitStack,
) -> CheckpointEntry:
    """Install a schedule on ``base``, whose modules the caller puts back if that fails."""
    entry = _entry_for(platform, base, report, family, settings)
    undo.callback(entry.let_go)
    entry.attach(base)
    return entry


def _set(base: Module, report: Report, family: Family | None, settings: Settings) -> SetterState:
    """Have the class of ``base`` carry out the keys itself."""
    settled = call_setters(base, settings.checkpointing, family, report)
    _know(base, settled)
    for remark in settled.report.remarks:
        warn("own-setters", remark)
    return settled


def _know(base: Module, owner: CheckpointEntry | SetterState | None) -> None:
    """Remember what setters changed; an entry is found on the model itself."""
    if isinstance(owner, SetterState):
        _setter_states[base] = owner
    else:
        _setter_states.pop(base, None)


def _problems(
    platform: Platform, base: Module, settings: Settings, family: Family | None, report: Report
) -> list[Finding]:
    """What the keys ask for and the engine cannot do."""
    config = settings.checkpointing
    found = list(problems(settings, family, type(base).__name__, report))
    moves = any(stack.inputs_on_cpu or stack.offloaded for stack in report.stacks)
    if moves and platform.accelerator() is None:
        key = "backend" if config.inputs_on_cpu else "offload_attention"
        message = "moves nothing: there is no accelerator, so everything is in CPU memory already"
        key = f"gradient_checkpointing_{key}"
        found.append(settings.finding("no-effect", message, key, "warning"))
    return found


def _refused_by_setters(
    platform: Platform, base: Module, settings: Settings, family: Family | None, report: Report
) -> list[Finding]:
    """What the keys ask for and the class of ``base`` does not carry out."""
    off = any(condition.off for condition in report.conditions)
    refused = () if off else not_taken(settings, base)
    return [*refused, *native_problems(settings, family, type(base).__name__, report)]


def _entry_for(
    platform: Platform, base: Module, report: Report, family: Family | None, settings: Settings
) -> CheckpointEntry:
    flags = CheckpointFlags(base)
    asks_function = (
        getattr(base, SUPPORTS_CHECKPOINTING, False)
        and not has_own_setters(base)  # their loops ask no function, or not for each block
        and flags.can_ask
        and takes_checkpoint_function(base)
    )
    conditions = family.conditions if family else ()
    described = ((s.path, family.stack_at(s.path)) for s in report.stacks) if family else ()
    functions = {path: stack.called_by for path, stack in described if stack and stack.called_by}
    forwards = ForwardPlanner(
        report.stacks,
        settings.checkpointing,
        [Condition("call", c.argument, c.reason, c.stacks) for c in conditions],
        _carried(report, family),
        platform,
    )
    patches = ModelPatches(
        forwards,
        flags,
        intercepts=bool(functions or (family and family.keyword_loop)) or not asks_function,
        functions=functions,
        units=family.units if family else (),
        parts=_parts(report, family, settings.checkpointing),
    )
    parameters = list(signature(type(base).forward).parameters)[1:]
    blocks = {s.path: blocks_of(base, s.path) for s in report.stacks if s.path != UNITS}
    return CheckpointEntry(report, forwards, patches, parameters, blocks)


def _refuse_shared(base: Module, stacks: Iterable[str]) -> None:
    """Raises ``UnsupportedModel`` when a part of the model has a schedule of another model."""
    own = entry_of(base)
    blocks = [block for path in stacks if path != UNITS for block in blocks_of(base, path)]
    entries = [getattr(module, CHECKPOINT_FUNCTION, None) for module in base.modules()]
    entries += map(entry_of, base.modules())
    entries += [block.__dict__.get(RECEIVER) for block in blocks]
    if any(isinstance(entry, CheckpointEntry) and entry is not own for entry in entries):
        raise UnsupportedModel(
            f"a part of {type(base).__name__} has a schedule already, as a model of its own or as "
            "part of another; remove() that one first"
        )


def _carried(report: Report, family: Family | None) -> dict[str, dict[str, int]] | None:
    """What the family says is carried in each stack of the report."""
    if family is None:
        return None
    found = ((planned.path, family.stack_at(planned.path)) for planned in report.stacks)
    return {path: stack.sources for path, stack in found if stack}


def _parts(
    report: Report, family: Family | None, config: CheckpointingConfig
) -> dict[str, dict[SubmoduleKind, tuple[str, ...]]]:
    """In each stack, the parts of blocks that the keys treat in a way of their own."""
    found: dict[str, dict[SubmoduleKind, tuple[str, ...]]] = {}
    for planned in report.stacks:
        stack = family.stack_at(planned.path) if family else None
        kinds: dict[SubmoduleKind, tuple[str, ...]] = {}
        if stack and "ffn" in config.may_keep:
            kinds["feed_forward"] = stack.projections
        elif stack and config.feed_forward_only:
            kinds["feed_forward"] = stack.feed_forward
        if stack and config.offload_attention:
            kinds["attention"] = stack.attention
        found[planned.path] = kinds
    return found


def entry_of(base: Module) -> CheckpointEntry | None:
    """What the loops of an unwrapped model go through, if it has a schedule."""
    for _, hook in hooks_on(base, "forward pre-hook"):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, CheckpointEntry):
            return owner
    return None
