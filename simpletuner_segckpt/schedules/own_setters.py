"""What a class with setters of its own makes of the keys, as a family's ``[native]`` facts tell.

No torch: ``validate --native`` uses it before a model exists, ``apply`` on the model itself.
"""

from collections.abc import Iterator
from dataclasses import replace

from ..config.settings import Settings
from ..config_schema import CheckpointingConfig
from ..families.schema import Coverage, Family, Native
from ..messages.findings import Finding
from .conditions import Condition
from .report import UNITS, Report, StackReport
from .schedule import Schedule, make_schedule

# How a class carries out an interval above 1, where that is not the schedule of the config.
MEANINGS = {
    "per-block": "the class runs no segments: it recomputes the blocks that it covers one by one",
    "every-nth": "the class recomputes every n-th block, and no segments",
    "ignored": "the class ignores it: every block is recomputed",
    "broken": "the class breaks when checkpointing is on",
}


# Which blocks are covered block by block.
COVERAGES: dict[Coverage, str] = {
    "all": "every block, interval and stride ignored",
    "every-nth": "every n-th block, stride ignored",
    "windows": "every n-th block, or with a stride the blocks in its windows",
}


OWN_SCHEDULE = "a schedule of the class's own"


def native_report(config: CheckpointingConfig, family: Family | None, report: Report) -> Report:
    """``report`` with the schedules that the class itself makes of the keys.

    ``report`` is that of the engine for the same stacks. Where no facts are known, the keys are
    taken at their word.
    """
    if not config.enabled:
        return replace(report, stacks=())
    stacks: list[StackReport] = []
    first = 0
    for stack in report.stacks:
        stacks.append(_native_stack(stack, first, config, family, report.conditions))
        first += stack.blocks
    return replace(report, stacks=tuple(stacks), budget=None)


def _native_stack(
    stack: StackReport,
    first: int,
    config: CheckpointingConfig,
    family: Family | None,
    conditions: tuple[Condition, ...],
) -> StackReport:
    """One stack; ``first`` is how many blocks the stacks before it have."""
    native = family.native if family else None
    own = StackReport(stack.path, "native", Schedule(stack.blocks, ()), OWN_SCHEDULE)
    if native is None:
        whole = not config.feed_forward_only
        return replace(own, schedule=stack.schedule, reason="") if whole else own
    if native.segments == "every-nth" or stack.path == UNITS:
        return own
    because = next((str(c) for c in conditions if c.concerns(stack.path)), "")
    if _in_segments(native, config, stack.path) and not because:
        if native.counted_on:  # its segments run on from one stack into the next
            return own
        whole_block = make_schedule(stack.blocks, config.interval, config.stride)
        return replace(own, schedule=whole_block, reason="")
    coverage = _coverage(native, config, stack.path)
    if coverage is None:
        return own
    start = first if native.counted_on else 0
    covered = [b for b in range(stack.blocks) if _is_covered(start + b, coverage, config)]
    described = family.stack_at(stack.path) if family else None
    parts = described.feed_forward if described and config.feed_forward_only else ()
    return replace(
        own,
        schedule=Schedule(stack.blocks, tuple(range(b, b + 1) for b in covered)),
        reason=because if native.segments == "whole-block" else "no segments in this class",
        feed_forward=parts,
    )


def _in_segments(native: Native, config: CheckpointingConfig, path: str) -> bool:
    return (
        native.segments == "whole-block"
        and config.interval > 1
        and not config.feed_forward_only
        and path not in native.block_by_block
    )


def _coverage(native: Native, config: CheckpointingConfig, path: str) -> Coverage | None:
    """Which blocks of a stack are covered block by block; None where it is not known."""
    if native.segments == "ignored":
        return "all"
    if path in native.block_by_block:
        return native.block_by_block[path]
    if config.feed_forward_only:
        return native.feed_forward
    return "windows" if native.segments == "per-block" else native.fallback


def _is_covered(index: int, coverage: Coverage, config: CheckpointingConfig) -> bool:
    if coverage == "all" or config.interval == 1:  # a stride counts only with an interval above 1
        return True
    if coverage == "every-nth" or config.stride is None:
        return index % config.interval == 0
    return index % config.stride < config.interval


def native_problems(
    settings: Settings, family: Family | None, name: str, report: Report
) -> Iterator[Finding]:
    """What the keys ask of a class that cannot do it; ``name`` is what it is called in sentences.

    What breaks, gives wrong gradients or would quietly be something else is an error.
    """
    native = family.native if family else None
    config = settings.checkpointing
    if native is None or any(condition.off for condition in report.conditions):
        return
    if native.segments == "broken":
        message = f"is on, but {name} breaks when it is; write false"
        yield settings.finding("unsupported-option", message, "gradient_checkpointing")
    whole = config.backend.removesuffix("-ffn")
    if config.feed_forward_only and config.backend not in native.backends:
        message = (
            f"is {config.backend}, which {name} does not carry out; "
            f"write {whole if whole in native.backends else 'torch'}"
        )
        yield settings.finding("unsupported-option", message, "gradient_checkpointing_backend")
    elif config.backend not in ("torch", *native.backends):
        message = f"is {config.backend}, but {name} recomputes with torch's own function"
        key = "gradient_checkpointing_backend"
        yield settings.finding("no-effect", message, key, "warning")
    if config.offload_attention and not native.attention_offload:
        message = f"is true, which {name} does not carry out; write false"
        key = "gradient_checkpointing_offload_attention"
        yield settings.finding("unsupported-option", message, key)
    if native.fault and not config.feed_forward_only:
        yield from _faults(native, settings, name, report)


def _faults(native: Native, settings: Settings, name: str, report: Report) -> Iterator[Finding]:
    """That the class would go block by block, and must not."""
    forced = next(iter(report.conditions), None)
    if settings.checkpointing.interval == 1:
        message = f"is 1, which {name} must not be set to: {native.fault}; write 2 or more"
        yield settings.finding("unsupported-option", message, "gradient_checkpointing_interval")
    elif forced is not None:
        message = (
            f"makes {name} go block by block: {native.fault}; leave it out, or write an -ffn "
            "backend"
        )
        yield settings.finding("unsupported-option", message, forced.name)


def differences(config: CheckpointingConfig, native: Native) -> Iterator[str]:
    """What the class makes of the keys that were given, where it is not what they say."""
    interval = "gradient_checkpointing_interval"
    if config.interval > 1:
        if native.segments in MEANINGS:
            yield f"{interval}: {MEANINGS[native.segments]}"
        if native.segments == "per-block":
            yield f"{interval}: it covers {COVERAGES['windows']}"
        if native.fallback:
            yield f"{interval}: block by block, it covers {COVERAGES[native.fallback]}"
        if native.counted_on:
            yield f"{interval}: the blocks of one stack are counted on from those of the one before"
        for path, coverage in native.block_by_block.items():
            yield f"{interval}: {path} goes block by block, {COVERAGES[coverage]}"
        if config.feed_forward_only and native.feed_forward:
            yield f"{interval}: {config.backend} covers {COVERAGES[native.feed_forward]}"
    elif config.stride is not None and config.stride > 1:
        yield (
            "gradient_checkpointing_segment_stride: with an interval of 1 the class ignores it and "
            "recomputes every block"
        )
    if native.fault:
        yield f"{interval}: {native.fault}"
    yield from native.notes
