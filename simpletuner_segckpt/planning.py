"""From settings and a family to the schedule of every stack: what would happen, and why.

No torch: ``validate`` uses it before a model exists, ``apply`` on the model itself.
"""

from collections.abc import Iterable, Mapping, Sequence

from .conditions import config_conditions
from .config_schema import CheckpointingConfig
from .family import Family
from .report import Condition, Report, StackReport, Strategy, overall_strategy
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
        switch = Condition("config", "gradient_checkpointing", "is off", off=True)
        conditions.insert(0, switch)
    schedules = make_schedules(stacks, config.interval, config.stride, config.keep_last)
    fixed = {stack.path: stack.per_block for stack in family.stacks} if family else {}
    reports = [
        _stack_report(path, schedule, config, conditions, fixed.get(path, ""))
        for path, schedule in schedules.items()
    ]
    return Report(
        family.family if family else None,
        overall_strategy(reports),
        tuple(conditions),
        tuple(reports),
        tuple(left_out),
    )


def _stack_report(
    path: str,
    schedule: Schedule,
    config: CheckpointingConfig,
    conditions: Sequence[Condition],
    per_block: str,
) -> StackReport:
    def report(strategy: Strategy, schedule: Schedule, reason: str = "") -> StackReport:
        return StackReport(path, strategy, schedule, reason)

    off = [condition for condition in conditions if condition.off]
    if off:
        return report("off", Schedule(schedule.blocks, ()), str(off[0]))
    reasons = [str(c) for c in conditions if c.concerns(path)] + ([per_block] if per_block else [])
    if not reasons and config.interval == 1:
        reasons = ["gradient_checkpointing_interval is 1"]
    if reasons:
        return report("per-block", schedule.per_block(), reasons[0])
    return report("segmented", schedule)


def unsupported_options(config: CheckpointingConfig) -> dict[str, str]:
    """Keys that ask for something this version cannot carry out, each with the reason."""
    if not config.enabled:
        return {}
    problems = {}
    if config.backend != "torch":
        problems["gradient_checkpointing_backend"] = (
            f"is {config.backend}, which this version cannot carry out; write torch"
        )
    if config.offload_attention:
        problems["gradient_checkpointing_offload_attention"] = (
            "cannot be carried out by this version; write false"
        )
    if config.keep:
        problems["gradient_checkpointing_keep"] = (
            "cannot be carried out by this version; leave it out"
        )
    return problems
