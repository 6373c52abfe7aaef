"""Put a schedule on a model, and take it off again."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from inspect import signature
from weakref import WeakKeyDictionary

from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch._dynamo.eval_frame import OptimizedModule  # what accelerate itself looks for
from torch.nn import Module

from .accelerator import Accelerator
from .config_schema import CheckpointingConfig
from .door import Door
from .errors import ConfigError, UnknownFamily, UnsupportedModel
from .family import Family
from .findings import Finding
from .forwards import Forwards
from .gates import FUNCTION, Gates
from .hooks import refuse_hooks
from .intercept import DOOR
from .messages import logger, warn
from .native import Settled, heard, is_native, restore, settle
from .native_facts import native_problems
from .parts import Kind
from .planning import make_report, problems
from .registry import FamilyRegistry
from .report import UNITS, Condition, Effect, History, Report
from .segments import Proof
from .settings import ConfigSource, Settings, load_settings
from .stacks import (
    block_list,
    blocks_of,
    candidate_stacks,
    has_checkpointing_layers,
    matching,
    stacks_of,
    units_of,
)

# Models whose own setters were called, and what they changed.
_settled: WeakKeyDictionary[Module, Settled] = WeakKeyDictionary()


@dataclass(frozen=True)
class Installation:
    """A schedule on a model."""

    model: Module = field(repr=False)
    report: Report
    _owner: Door | Settled = field(repr=False)

    @property
    def effect(self) -> Effect | None:
        """What the last training forward really did; None before the first one.

        Forwards without gradients leave it as it is. Of a forward in a graph that was compiled as
        a whole it says just that, and of a class with its own setters (strategy ``native``)
        nothing is observed.
        """
        return self._owner.last_effect if isinstance(self._owner, Door) else None

    @property
    def history(self) -> History | None:
        """What all forwards did since; None for a class with its own setters."""
        return self._owner.history if isinstance(self._owner, Door) else None

    @property
    def proofs(self) -> dict[str, Proof]:
        """By stack path, what the latest recorded forward showed of the boundaries of blocks."""
        return self._owner.forwards.proofs if isinstance(self._owner, Door) else {}

    def remove(self) -> None:
        """Leave the model as it was before ``apply``. Does nothing when that has been done."""
        if self._owner is _door_of(self.model) or self._owner is _settled.get(self.model):
            remove(self.model)


def apply(
    model: Module,
    config: ConfigSource,
    *,
    registry: FamilyRegistry | None = None,
    family: str | Family | None = None,
) -> Installation:
    """Install the schedule that ``config`` asks for on ``model``, replacing an earlier one.

    ``config`` is a path, a mapping, an argparse namespace or a ``CheckpointingConfig``. The
    model may be wrapped by PEFT, accelerate or ``torch.compile``. Its family is found by
    its class unless ``family`` names one; a model that no family describes is probed.

    Raises ``ConfigError`` (bad or unsupported keys), ``UnknownFamily`` or ``UnsupportedModel``
    (no stack of blocks, or hooks on it that cannot work), and then leaves the model untouched.
    """
    settings = load_settings(config)
    if not isinstance(model, Module):
        raise TypeError(f"model is a {type(model).__name__}; pass an nn.Module")
    base = unwrap(model)
    described, report = planned_for(base, settings, registry, family)
    _refuse_shared(base, [stack.path for stack in report.stacks])
    findings = [*settings.findings, *_problems(base, settings, described, report)]
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise ConfigError(errors)
    for stack in report.stacks if not is_native(base) else ():
        if stack.path != UNITS:
            refuse_hooks(stack, blocks_of(base, stack.path))
    for finding in findings:
        logger.warning("%s", finding)
    if Accelerator.current() is None:
        report = report.without_moves()
    remove(base)
    owner: Door | Settled
    if is_native(base):
        owner = _settled[base] = settle(base, settings.checkpointing, described, report)
        report = owner.report
        for remark in report.remarks:
            warn("own-setters", remark)
    else:
        owner = _install(base, report, described, settings)
        if _is_one_graph(model):
            owner.say_compiled()
    logger.info("installed on %s: %s", type(base).__name__, report)
    return Installation(base, report, owner)


def planned_for(
    base: Module, settings: Settings, registry: FamilyRegistry | None, family: str | Family | None
) -> tuple[Family | None, Report]:
    """The family of an unwrapped model, and the schedule that ``apply`` would install.

    Raises ``UnknownFamily`` or ``UnsupportedModel``.
    """
    described = _find_family(base, settings, registry, family)
    stacks, left_out = _stacks_of(base, described)
    if not stacks:
        name = type(base).__name__
        if described and described.stacks:
            paths = ", ".join(stack.path for stack in described.stacks)
            raise UnsupportedModel(
                f"{name} has none of the stacks of the family {described.family}: {paths}"
            )
        raise UnsupportedModel(f"{name} has no nn.ModuleList of two or more blocks to schedule")
    planned = heard(settings, base) if is_native(base) else settings
    return described, make_report(planned, described, stacks, left_out)


def installation_of(model: Module) -> Installation | None:
    """The schedule that is on ``model``, however it is wrapped, or None."""
    base = unwrap(model)
    owner = _door_of(base) or _settled.get(base)
    return Installation(base, owner.report, owner) if owner else None


def remove(model: Module) -> None:
    """Take the schedule off ``model``, or off a copy of a model that had one.

    Checkpointing is switched on or off as it was before ``apply``.
    """
    base = unwrap(model)
    door = _door_of(base)
    if door is not None:
        door.detach(base)
    settled = _settled.pop(base, None)
    if settled is not None:
        restore(base, settled)


def unwrap(model: Module) -> Module:
    """The module whose forward runs, inside DDP, FSDP, ``torch.compile`` and PEFT wrappers.

    Where accelerate compiled the regions of a model, that is the copy that it made.
    """
    inner = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=True)
    if isinstance(inner, OptimizedModule):
        return unwrap(inner._orig_mod)
    return unwrap(inner.get_base_model()) if isinstance(inner, PeftModel) else inner


def _is_one_graph(model: Module) -> bool:
    """Whether ``model`` is compiled as a whole, under PEFT's and parallel wrappers."""
    inner = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=True)
    if isinstance(inner, OptimizedModule) or inner._compiled_call_impl is not None:
        return True
    return isinstance(inner, PeftModel) and _is_one_graph(inner.get_base_model())


def _find_family(
    base: Module, settings: Settings, registry: FamilyRegistry | None, family: str | Family | None
) -> Family | None:
    if isinstance(family, Family):
        return family
    known = FamilyRegistry.default() if registry is None else registry
    name, flavour = settings.trainer.model_family, settings.trainer.model_flavour
    if family is not None:
        return known.find(family, flavour)
    class_name = type(base).__name__
    found = known.for_class(type(base), name, flavour)
    try:
        named = known.find(name, flavour) if name else None
    except UnknownFamily as error:
        warn("other-family", f"model_family: {error}")
        named = None
    if found is None and named and all(block_list(base, s.path) for s in named.stacks):
        return named  # a trainer's own class, with the stacks of the family that it names
    if found is None and has_checkpointing_layers(base):
        logger.info("%s is made of layers of transformers, which are its stacks", class_name)
    elif found is None:
        warn("no-family", f"no family describes {class_name}; its stacks are found by probing")
    elif named and named.family != found.family:
        named_so = f"model_family is {name}, but {class_name} belongs to {found.family}"
        warn("other-family", f"{named_so}, which is used")
    return found


def _stacks_of(base: Module, family: Family | None) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Blocks per stack, and the lists of blocks that are left out, each with the reason."""
    candidates = candidate_stacks(base)
    if family is None:
        return candidates, []
    stacks = stacks_of(base, family.stacks)
    name = type(base).__name__
    left_out = [
        (stack.path, f"{name} has no such list of blocks")
        for stack in family.stacks
        if not stack.optional and "*" not in stack.path and not matching(base, stack.path)
    ]
    units = units_of(base, family.units, stacks)
    known = (*units, *stacks)
    described = {
        path: entry.reason
        for entry in family.left_out
        for path in matching(base, entry.path)
        if path not in stacks
    }
    other = {
        path: f"not described by the family {family.family}"
        for path in candidates
        if path not in (*stacks, *described) and not any(k.startswith(f"{path}.") for k in known)
    }
    left_out += (described | other).items()
    return stacks | ({UNITS: len(units)} if units else {}), left_out


def _problems(
    base: Module, settings: Settings, family: Family | None, report: Report
) -> list[Finding]:
    """What the keys ask for and the engine, or a class with setters of its own, cannot do."""
    if is_native(base):
        return list(native_problems(settings, family, type(base).__name__, report))
    config = settings.checkpointing
    found = list(problems(settings, family, type(base).__name__, report))
    moves = any(stack.inputs_on_cpu or stack.offloaded for stack in report.stacks)
    if moves and Accelerator.current() is None:
        key = "backend" if config.inputs_on_cpu else "offload_attention"
        message = "moves nothing: there is no accelerator, so everything is in CPU memory already"
        key = f"gradient_checkpointing_{key}"
        found.append(settings.finding("no-effect", message, key, "warning"))
    return found


def _install(base: Module, report: Report, family: Family | None, settings: Settings) -> Door:
    has_door = getattr(base, "_supports_gradient_checkpointing", False)
    conditions = family.conditions if family else ()
    forwards = Forwards(
        report.stacks,
        settings.checkpointing,
        [Condition("call", c.argument, c.reason, c.stacks) for c in conditions],
        _carried(report, family),
    )
    door = Door(
        report,
        forwards,
        list(signature(type(base).forward).parameters)[1:],
        Gates(base),
        gap_blocks=_gap_blocks(base, report),
        intercepts=bool(family and family.keyword_loop) or not has_door,
        parts=_parts(report, family, settings.checkpointing),
    )
    try:
        door.attach(base)
    except BaseException:
        door.detach(base)
        raise
    return door


def _gap_blocks(base: Module, report: Report) -> list[Module]:
    """The blocks of every stack that run normally."""
    found: list[Module] = []
    for stack in report.stacks:
        if stack.path != UNITS:
            blocks = blocks_of(base, stack.path)
            found += [blocks[index] for index in stack.gap]
    return found


def _refuse_shared(base: Module, stacks: Iterable[str]) -> None:
    """Raises ``UnsupportedModel`` when a part of the model has a schedule of another model."""
    own = _door_of(base)
    blocks = [block for path in stacks if path != UNITS for block in blocks_of(base, path)]
    doors = [getattr(module, FUNCTION, None) for module in base.modules()]
    doors += map(_door_of, base.modules())
    doors += [block.__dict__.get(DOOR) for block in blocks]
    if any(isinstance(door, Door) and door is not own for door in doors):
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
) -> dict[str, dict[Kind, tuple[str, ...]]]:
    """In each stack, the parts of blocks that the keys treat in a way of their own."""
    found: dict[str, dict[Kind, tuple[str, ...]]] = {}
    for planned in report.stacks:
        stack = family.stack_at(planned.path) if family else None
        kinds: dict[Kind, tuple[str, ...]] = {}
        if stack and "ffn" in config.keep:
            kinds["feed_forward"] = stack.projections
        elif stack and config.feed_forward_only:
            kinds["feed_forward"] = stack.feed_forward
        if stack and config.offload_attention:
            kinds["attention"] = stack.attention
        found[planned.path] = kinds
    return found


def _door_of(base: Module) -> Door | None:
    for hook in base._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Door):
            return owner
    return None
