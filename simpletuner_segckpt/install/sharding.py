"""Segments as the units that FSDP2 shards and gathers.

A block that is sharded by itself is gathered once in forward and once in backward. Blocks that
run under one checkpoint call are needed together, so they can be gathered together: fewer, larger
all-gathers, at the price of a segment's weights being in memory at once.
"""

from collections.abc import Mapping
from typing import Any

from torch.nn import Module

from ..config.settings import ConfigSource, load_settings
from ..families.registry import FamilyRegistry
from ..families.schema import Family
from ..messages.errors import UnsupportedModel
from ..model.fsdp import sharded_around
from ..model.stacks import blocks_of
from ..model.wrappers import unwrap
from ..schedules.report import UNITS
from .apply import Installation
from .planned import planned_for


def fully_shard_segments(
    model: Module,
    schedule: Installation | ConfigSource,
    *,
    registry: FamilyRegistry | None = None,
    family: str | Family | None = None,
    last: Mapping[str, Any] | None = None,
    root: Mapping[str, Any] | None = None,
    forward_prefetch: int = 0,
    backward_prefetch: int = 0,
    **options: Any,
) -> Module:
    """Shard ``model`` with torch's ``fully_shard``, each segment as one unit, and return it.

    The units are those of ``sharding_units``, and then ``model`` itself, the root, with all that is
    left: what is sharded already, such as an embedding, stays a unit of its own. ``options`` are
    ``fully_shard``'s own (``mesh``, ``mp_policy``, ``reshard_after_forward``...) and hold for every
    unit; ``last`` and ``root`` are more of them, or others, for the last unit and for the root.
    ``forward_prefetch`` and ``backward_prefetch`` say how many units each unit gathers ahead, by
    ``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch``; 0 leaves that to
    torch. Call it on every rank, before or after ``apply``.

    Raises as ``sharding_units``, and ``ValueError`` when a number of units is negative.
    """
    from torch.distributed.fsdp import fully_shard

    for name, ahead in (("forward", forward_prefetch), ("backward", backward_prefetch)):
        if ahead < 0:
            raise ValueError(f"{name}_prefetch is {ahead}; write a number of units, 0 or more")
    units = sharding_units(model, schedule, registry=registry, family=family)
    for unit in units:
        special = (last or {}) if unit is units[-1] else {}
        fully_shard(unit if len(unit) > 1 else unit[0], **{**options, **special})
    fully_shard(model, **{**options, **(root or {})})
    firsts: list[Any] = [unit[0] for unit in units]  # the blocks of a unit share its lists
    for index, block in enumerate(firsts):
        if forward_prefetch:
            following = firsts[index + 1 : index + 1 + forward_prefetch]
            block.set_modules_to_forward_prefetch(following)
        if backward_prefetch:
            before = firsts[max(index - backward_prefetch, 0) : index]
            block.set_modules_to_backward_prefetch(before[::-1])
    return model


def sharding_units(
    model: Module,
    schedule: Installation | ConfigSource,
    *,
    registry: FamilyRegistry | None = None,
    family: str | Family | None = None,
) -> list[list[Module]]:
    """The blocks of every stack of ``model``: those of a segment together, others by themselves.

    ``schedule`` is what ``apply`` returned, or a config in any form that ``apply`` takes, with
    ``registry`` and ``family`` as there. What a forward has shown to be no segment is none here.

    Raises as ``apply``, and ``UnsupportedModel`` when the model has no stack, or when its blocks
    are sharded already, by themselves or with what is around them. Other modules, also those inside
    a block, may be.
    """
    base = unwrap(model)
    if isinstance(schedule, Installation):
        report, proofs = schedule.report, schedule.proofs
    else:
        report = planned_for(base, load_settings(schedule), registry, family)[1]
        proofs = {}
    stacks = [stack for stack in report.stacks if stack.path != UNITS]
    if not stacks:
        raise UnsupportedModel(f"{type(base).__name__} has no stack whose blocks could be units")
    for stack in stacks:
        if place := sharded_around(model, base, stack.path):
            raise UnsupportedModel(
                f"{type(base).__name__}: {place} is sharded already, and the blocks of "
                f"`{stack.path}` with it; shard them once only, units before the model"
            )
    units: list[list[Module]] = []
    for stack in stacks:
        blocks = blocks_of(base, stack.path)
        planned = proofs[stack.path].schedule if stack.path in proofs else stack.schedule
        segments = planned.segments if stack.strategy == "segmented" else ()
        start_of = {block: segment.start for segment in segments for block in segment}
        for index, block in enumerate(blocks):
            if start_of.get(index, index) < index:
                units[-1].append(block)
            else:
                units.append([block])
    return units
