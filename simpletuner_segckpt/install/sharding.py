"""Segments as the units that FSDP2 shards and gathers.

A block that is sharded by itself is gathered once in forward and once in backward. Blocks that
run under one checkpoint call are needed together, so they can be gathered together: fewer, larger
all-gathers, at the price of a segment's weights being in memory at once.
"""

from typing import Any

from torch.nn import Module

from ..config.settings import ConfigSource, load_settings
from ..families.registry import FamilyRegistry
from ..families.schema import Family
from ..messages.errors import UnsupportedModel
from ..model.fsdp import are_sharded
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
    **options: Any,
) -> Module:
    """Shard ``model`` with torch's ``fully_shard``, each segment as one unit, and return it.

    The units are those of ``sharding_units``, and then ``model`` itself with all that is left.
    ``options`` are ``fully_shard``'s own (``mesh``, ``mp_policy``, ``reshard_after_forward``...)
    and hold for every unit. Call it on every rank, before or after ``apply``.

    Raises as ``sharding_units``.
    """
    from torch.distributed.fsdp import fully_shard

    for unit in sharding_units(model, schedule, registry=registry, family=family):
        fully_shard(unit if len(unit) > 1 else unit[0], **options)
    fully_shard(model, **options)
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

    Raises as ``apply``, and ``UnsupportedModel`` when the model has no stack or is sharded already.
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
    if are_sharded([model]):
        raise UnsupportedModel(f"{type(base).__name__} is sharded already; shard it once only")
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
