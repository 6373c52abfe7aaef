"""From settings and a family to the schedule of every stack: what would happen, and why.

No torch: ``validate`` uses it before a model exists, ``apply`` on the model itself.
"""

from collections.abc import Iterable, Mapping, Sequence

from .conditions import config_conditions
from .config_schema import CheckpointingConfig
from .family import Family, Stack
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
        _stack_report(path, schedule, config, conditions, _described(family, path))
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
    def report(strategy: Strategy, schedule: Schedule, reason: str = "") -> StackReport:
        return StackReport(path, strategy, schedule, reason)

    off = [condition for condition in conditions if condition.off]
    if off:
        return report("off", Schedule(schedule.blocks, ()), str(off[0]))
    if not schedule.segments:
        return report("off", schedule, "gradient_checkpointing_keep_last keeps all its blocks")
    reasons = [str(condition) for condition in conditions if condition.concerns(path)]
    if described and described.per_block:
        reasons.append(described.per_block)
    if path == UNITS:
        reasons.append("units are handed over one by one")
    if config.interval == 1:
        reasons.append("gradient_checkpointing_interval is 1")
    elif all(len(segment) == 1 for segment in schedule.segments):
        reasons.append("no segment holds more than one block")
    if reasons:
        return report("per-block", schedule.per_block(), reasons[0])
    cut = f"segments are cut {described.cut}" if described and described.cut else ""
    return report("segmented", schedule, cut)


def _described(family: Family | None, path: str) -> Stack | None:
    """What the family says of the stack at ``path``."""
    stacks = family.stacks if family else ()
    return next((stack for stack in stacks if stack.describes(path)), None)
