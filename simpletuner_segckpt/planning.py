"""From settings and a family to the schedule of every stack: what would happen, and why.

No torch: ``validate`` uses it before a model exists, ``apply`` on the model itself.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .conditions import config_conditions
from .config_schema import CheckpointingConfig
from .family import Family, Stack
from .findings import Finding
from .report import UNITS, Condition, Report, StackReport, Strategy
from .schedule import Schedule, make_schedules
from .settings import Settings


def make_report(
    settings: Settings,
    family: Family | None,
    stacks: Mapping[str, int],
    left_out: Iterable[tuple[str, str]] = (),
) -> Report:
    """The report on a model whose stacks, in execution order, have this many blocks."""
    config = settings.checkpointing
    conditions = config_conditions(settings.trainer)
    if not config.enabled:
        switch = Condition("config", "gradient_checkpointing", "it is off", off=True)
        conditions.insert(0, switch)
    schedules = make_schedules(stacks, config.interval, config.stride, config.keep_last)
    reports = [
        _stack_report(path, schedule, config, conditions, family.stack_at(path) if family else None)
        for path, schedule in schedules.items()
    ]
    return Report(
        family.family if family else None,
        tuple(conditions),
        tuple(reports),
        tuple(left_out),
    )


def _stack_report(
    path: str,
    schedule: Schedule,
    config: CheckpointingConfig,
    conditions: Sequence[Condition],
    described: Stack | None,
) -> StackReport:
    feed_forward = described.feed_forward if described else ()
    none = Schedule(schedule.blocks, ())

    off = [condition for condition in conditions if condition.off]
    if off:
        return StackReport(path, "off", none, str(off[0]))

    def report(strategy: Strategy, schedule: Schedule, reason: str = "") -> StackReport:
        return StackReport(
            path,
            strategy,
            schedule,
            reason,
            feed_forward=feed_forward if config.feed_forward_only and schedule.segments else (),
            kept=_kept(path, schedule, config, described),
            inputs_on_cpu=config.inputs_on_cpu and bool(schedule.segments),
            offloaded=_offloaded(schedule, config, described),
        )

    if not schedule.segments:
        return report("off", schedule, "gradient_checkpointing_keep_last keeps all its blocks")
    if config.feed_forward_only and not feed_forward:
        what = "units have" if path == UNITS else "its blocks have"
        return report("off", none, f"{what} no feed-forward of their own")
    reasons = [str(condition) for condition in conditions if condition.concerns(path)]
    if described and described.per_block:
        reasons.append(described.per_block)
    if path == UNITS:
        reasons.append("units are handed over one by one")
    if config.feed_forward_only:
        reasons.insert(0, f"{config.backend} recomputes each feed-forward by itself")
    if config.interval == 1:
        reasons.append("gradient_checkpointing_interval is 1")
    elif all(len(segment) == 1 for segment in schedule.segments):
        reasons.append("no segment holds more than one block")
    if reasons:
        return report("per-block", schedule.per_block(), reasons[0])
    cut = f"segments are cut {described.cut}" if described and described.cut else ""
    return report("segmented", schedule, cut)


def _kept(
    path: str, schedule: Schedule, config: CheckpointingConfig, described: Stack | None
) -> tuple[str, ...]:
    """The operators whose outputs covered blocks keep; of units it is not known before they run."""
    if not schedule.segments or path == UNITS:
        return ()
    projections = described.projections if described else ()
    return tuple(kind for kind in config.keep if kind != "ffn" or projections)


def _offloaded(
    schedule: Schedule, config: CheckpointingConfig, described: Stack | None
) -> tuple[int, ...]:
    """Blocks whose attention saves to CPU memory: those of which attention is not recomputed."""
    if not (config.offload_attention and described and described.attention):
        return ()
    return tuple(range(schedule.blocks)) if config.feed_forward_only else schedule.gap


@dataclass(frozen=True, slots=True)
class _Need:
    """A key that asks for something of a part that blocks must have.

    part: the field of a family's stack that names it; called: what it is called in sentences.
    says: what the value of the key is. instead: what to write where no block has the part.
    otherwise: what happens in stacks that lack it, when others have it.
    """

    key: str
    part: str
    called: str
    says: str
    instead: str
    otherwise: str


def _needs(config: CheckpointingConfig) -> Iterator[_Need]:
    if config.feed_forward_only:
        yield _Need(
            "gradient_checkpointing_backend",
            "feed_forward",
            "feed-forward",
            f"is {config.backend}",
            f"write {config.backend.removesuffix('-ffn')}",
            "run normally",
        )
    if "ffn" in config.keep:
        yield _Need(
            "gradient_checkpointing_keep",
            "projections",
            "feed-forward",
            "names ffn",
            "write attention" if "attention" in config.keep else "leave it out",
            "keep nothing of it",
        )
    if config.offload_attention:
        yield _Need(
            "gradient_checkpointing_offload_attention",
            "attention",
            "attention",
            "is true",
            "write false",
            "offload nothing",
        )


def problems(
    settings: Settings, family: Family | None, name: str, report: Report
) -> Iterator[Finding]:
    """What the keys ask for and a model cannot do, or what has no effect on it.

    ``name`` is what the model is called in the sentences. An option that no stack can carry out
    is an error; one that some cannot is a warning.
    """
    config = settings.checkpointing
    if any(condition.off for condition in report.conditions):
        return
    described = family.stacks if family else ()
    stacks: Sequence[Stack] = described
    if report.stacks:  # in validate, the blocks of none may have been counted
        stacks = [s for s in described if any(s.describes(r.path) for r in report.stacks)]
    for need in _needs(config):
        lacking = [stack.path for stack in stacks if not getattr(stack, need.part)]
        having = len(stacks) - len(lacking)
        if not having:
            because = f"no {need.called} is known in the blocks of {name}"
            instead = need.instead
            if family is None:
                because = f"no family describes {name}"
                instead += ", or a family file (segckpt probe begins one)"
            message = f"{need.says}, but {because}; {instead}"
            yield settings.finding("unsupported-option", message, need.key)
        elif lacking:
            where = f"the blocks of {', '.join(lacking)} have no {need.called} of their own"
            message = f"{need.says}: {where} and {need.otherwise}"
            yield settings.finding("unsupported-option", message, need.key, "warning")
    attention = any(stack.attention for stack in stacks)
    offloading = any(stack.offloaded for stack in report.stacks)
    if config.offload_attention and attention and report.stacks and not offloading:
        message = (
            "has no effect: every block is recomputed as a whole, so its attention saves nothing; "
            "leave gaps (a stride above the interval, or keep_last), or write a backend that "
            "recomputes the feed-forwards only"
        )
        key = "gradient_checkpointing_offload_attention"
        yield settings.finding("no-effect", message, key, "warning")
