"""Keys that change nothing: what is planned is the same without them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..config.settings import Settings
from ..config_schema import PREFIX, CheckpointingConfig
from ..families.schema import Family
from ..messages.findings import Finding
from .report import MOST_BLOCKS, UNITS, Report, make_report

# What these do shows in no plan: they are about the tensors that it has in CPU memory.
_OF_OFFLOADING = ("pin_memory_max_buckets", "prefetch")


def assumed(settings: Settings, family: Family | None, report: Report) -> Report:
    """``report`` with the stacks of the family of which nobody knows the number of blocks.

    They are taken to be long enough for whatever the keys ask for.
    """
    missing = [
        stack.path
        for stack in (family.stacks if family else ())
        if not stack.optional and not any(stack.describes(known.path) for known in report.stacks)
    ]
    config = settings.checkpointing
    stride = config.stride or config.interval
    # The last block would be covered but for keep_last, and there are several segments.
    enough = min((config.keep_last // stride + 3) * stride + 1, MOST_BLOCKS)
    blocks = {stack.path: stack.blocks for stack in report.stacks} | dict.fromkeys(missing, enough)
    return make_report(settings, family, blocks)


def without_effect(settings: Settings, family: Family | None, planned: Report) -> Iterator[Finding]:
    """A warning for each key without which the plan would be the same, and why."""
    config = settings.checkpointing
    if not config.enabled:
        return  # said of the file already
    blocks = {stack.path: stack.blocks for stack in planned.stacks}
    for name, field in CheckpointingConfig.model_fields.items():
        value = getattr(config, name)
        if value == field.default or (name == "stride" and value == config.interval):
            continue
        if name in _OF_OFFLOADING:
            idle = not any(stack.inputs_on_cpu or stack.offloaded for stack in planned.stacks)
        elif name == "keep" and any(s.path == UNITS and s.covered for s in planned.stacks):
            idle = False  # what units keep is not known before they run
        else:
            fewer = config.model_copy(update={name: field.default})
            other = make_report(replace(settings, checkpointing=fewer), family, blocks)
            idle = _outcome(other) == _outcome(planned)
        if idle:
            message = f"has no effect: {_because(name, config, planned)}"
            yield settings.finding("no-effect", message, field.alias or name, "warning")


def _outcome(report: Report) -> list[tuple[Any, ...]]:
    return [
        (s.segments, s.feed_forward, s.kept, s.inputs_on_cpu, s.offloaded, s.within_budget)
        for s in report.stacks
    ]


def _because(name: str, config: CheckpointingConfig, planned: Report) -> str:
    off = next((condition for condition in planned.conditions if condition.off), None)
    if off is not None:
        return str(off)
    covered = [stack for stack in planned.stacks if stack.covered]
    if name in _OF_OFFLOADING:
        return "nothing of what is planned waits in CPU memory"
    if not covered:
        return f"no block is recomputed, since {PREFIX}_keep_last keeps all that could be"
    if name == "interval":
        return (
            f"the same blocks are recomputed either way, one by one ({covered[0].reason}); only a "
            f"{PREFIX}_segment_stride above it leaves blocks out"
        )
    if name == "stride":
        return f"no block that could be recomputed stands beyond the first {config.interval}"
    if name == "keep_last":
        return f"the last {config.keep_last} blocks run normally in any case"
    return (
        "every block is recomputed as a whole, so its attention saves nothing; leave gaps (a "
        "stride above the interval, or keep_last), or write a backend that recomputes the "
        "feed-forwards only"
    )
