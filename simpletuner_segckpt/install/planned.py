"""The family of a model, its stacks, and the schedule that they would get."""

from torch.nn import Module

from ..config.settings import Settings
from ..families.registry import FamilyRegistry
from ..families.schema import Family
from ..messages.errors import UnknownFamily, UnsupportedModel
from ..messages.log import logger, warn
from ..model.stacks import (
    blocks_of,
    candidate_stacks,
    has_checkpointing_layers,
    holds_one_twice,
    matching,
    stacks_of,
    units_of,
)
from ..schedules.report import UNITS, Report, make_report
from .own_setters import without_unknown_keys

# Why a list of blocks is no stack: a call of a block does not say which of its places is meant.
REPEATED = "holds one block more than once, so its blocks cannot be told apart"


def planned_for(
    base: Module,
    settings: Settings,
    registry: FamilyRegistry | None,
    family: str | Family | None,
    native: bool = False,
) -> tuple[Family | None, Report]:
    """The family of an unwrapped model, and the schedule that ``apply`` would install.

    native: its class carries the keys out itself.

    Raises ``UnknownFamily`` or ``UnsupportedModel``.
    """
    described = _find_family(base, settings, registry, family)
    stacks, left_out = _stacks_of(base, described)
    if not stacks:
        name = type(base).__name__
        repeated = [path for path, reason in left_out if reason == REPEATED]
        if repeated:
            raise UnsupportedModel(f"{name} has no stack to schedule: `{repeated[0]}` {REPEATED}")
        if described and described.stacks:
            paths = ", ".join(stack.path for stack in described.stacks)
            raise UnsupportedModel(
                f"{name} has none of the stacks of the family {described.family}: {paths}"
            )
        raise UnsupportedModel(f"{name} has no nn.ModuleList of two or more blocks to schedule")
    planned = without_unknown_keys(settings) if native else settings
    return described, make_report(planned, described, stacks, left_out)


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
    if found is None and named and all(blocks_of(base, s.path) for s in named.stacks):
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
    stacks = candidates if family is None else stacks_of(base, family.stacks)
    repeated = [(path, REPEATED) for path in candidates | stacks if holds_one_twice(base, path)]
    stacks = {path: count for path, count in stacks.items() if (path, REPEATED) not in repeated}
    if family is None:
        return stacks, repeated
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
    described = dict(repeated) | described
    other = {
        path: f"not described by the family {family.family}"
        for path in candidates
        if path not in (*stacks, *described) and not any(k.startswith(f"{path}.") for k in known)
    }
    left_out += (described | other).items()
    return stacks | ({UNITS: len(units)} if units else {}), left_out
