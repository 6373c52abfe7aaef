"""What is planned for every stack of a model, and why.

Plain records without torch, shared by ``validate`` (before a model exists) and ``apply``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..config.settings import Settings
from ..config_schema import CheckpointingConfig, MemoryBudget
from ..config_schema.keys import KEEP
from ..families.schema import Family, Stack
from .conditions import Condition, config_conditions
from .schedule import Kept, Schedule, make_schedules

UNITS = "units"  # the path under which modules outside every stack are reported
MOST_BLOCKS = 10_000  # of a stack


# "unknown" is that of a model whose blocks nobody has counted.
Strategy = Literal["segmented", "per-block", "native", "off", "unknown"]


@dataclass(frozen=True, slots=True)
class StackReport:
    """How one stack is scheduled; ``reason`` says why it is not, or not wholly, segmented.

    feed_forward: attribute paths in a block of what is recomputed of covered blocks; empty when
        it is the whole block.
    inputs_on_cpu: whether what enters a checkpoint call waits for backward in CPU memory.
    offloaded: blocks whose attention saves to CPU memory.
    within_budget: whether a memory budget decides, for each shape of call, what of it is
        recomputed; ``schedule`` is then that of the first forward of each.
    """

    path: str
    strategy: Strategy
    schedule: Schedule
    reason: str = ""
    feed_forward: tuple[str, ...] = ()
    inputs_on_cpu: bool = False
    offloaded: tuple[int, ...] = ()
    within_budget: bool = False

    @property
    def blocks(self) -> int:
        return self.schedule.blocks

    @property
    def segments(self) -> tuple[range, ...]:
        return self.schedule.segments

    @property
    def covered(self) -> tuple[int, ...]:
        return self.schedule.covered

    @property
    def gap(self) -> tuple[int, ...]:
        return self.schedule.gap

    @property
    def kept(self) -> Kept:
        """Operators whose outputs at least one covered block keeps."""
        asked = {kind for block in self.covered for kind in self.schedule.kept_by(block)}
        return tuple(kind for kind in KEEP if kind in asked)

    def lines(self) -> list[str]:
        """For example ``blocks: 8 blocks, segmented: [0 1] 2 3 [4 5] 6 7`` and the counts."""
        because = f" ({self.reason})" if self.reason else ""
        if self.strategy == "off":
            out = [f"{self.path}: {self.blocks} blocks, none recomputed{because}"]
        else:
            out = [
                f"{self.path}: {self.blocks} blocks, {self.strategy}{because}",
                f"  {self.schedule}",
                f"  {self._counts()}, {len(self.gap)} run normally",
            ]
        if self.kept:
            kept = " and ".join(self.kept)
            out.append(f"  their outputs of {kept} stay in memory and are not recomputed")
        if self.inputs_on_cpu:
            out.append("  the inputs of each checkpoint call wait in CPU memory")
        if self.offloaded:
            blocks = "blocks " + " ".join(map(str, self.offloaded))
            if len(self.offloaded) == self.blocks:
                blocks = "all blocks"
            out.append(f"  what attention saves waits in CPU memory: {blocks}")
        return out

    def _counts(self) -> str:
        if self.feed_forward:
            names = ", ".join(self.feed_forward)
            return f"feed-forwards ({names}) of {len(self.covered)} blocks recomputed"
        return f"{len(self.covered)} recomputed in {len(self.segments)} checkpoint calls"


@dataclass(frozen=True, slots=True)
class Report:
    """What is installed on a model, or would be."""

    family: str | None
    conditions: tuple[Condition, ...] = ()
    stacks: tuple[StackReport, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()  # (path, reason)
    remarks: tuple[str, ...] = ()  # what a class with setters of its own makes of the keys
    budget: MemoryBudget | None = None

    @property
    def strategy(self) -> Strategy:
        """``native`` if any stack is, else ``segmented``, else ``per-block``, else ``off``."""
        if not self.stacks and not any(condition.off for condition in self.conditions):
            return "unknown"
        found = {stack.strategy for stack in self.stacks}
        order: tuple[Strategy, ...] = ("native", "segmented", "per-block")
        return next((strategy for strategy in order if strategy in found), "off")

    def without_accelerator(self) -> "Report":
        """The report where everything is in CPU memory anyway, so that nothing is moved there."""
        stacks = (replace(stack, inputs_on_cpu=False, offloaded=()) for stack in self.stacks)
        remarks = self.remarks
        if self.budget and self.budget.of_device:
            remarks += (f"there is no accelerator, so the budget of {self.budget} is of the RAM",)
        return replace(self, stacks=tuple(stacks), remarks=remarks)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        out = [f"family {self.family or 'unknown (probed)'}, strategy {self.strategy}"]
        if self.budget:
            out.append(
                f"budget: {self.budget}; what is recomputed is decided for each shape of call, the "
                "first of each recomputes everything"
            )
        out += [f"  because of {condition}" for condition in self.conditions]
        out += [line for stack in self.stacks for line in stack.lines()]
        out += [f"{path}: left out ({reason})" for path, reason in self.left_out]
        out += [f"remark: {remark}" for remark in self.remarks]
        return out


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
    off = any(condition.off for condition in conditions)
    return Report(
        family.family if family else None,
        tuple(conditions),
        tuple(reports),
        tuple(left_out),
        budget=None if off else config.budget,
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
            schedule.keeping(_kept(path, config, described)),
            reason,
            feed_forward=feed_forward if config.feed_forward_only and schedule.segments else (),
            inputs_on_cpu=config.inputs_on_cpu and bool(schedule.segments),
            offloaded=_offloaded(schedule, config, described),
            within_budget=config.budget is not None,
        )

    if config.budget:
        reason = f"within {config.budget} each shape of call gets a plan of its own"
        return report("per-block", Schedule.of_all(schedule.blocks), reason)
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


def _kept(path: str, config: CheckpointingConfig, described: Stack | None) -> Kept:
    """The operators whose outputs covered blocks keep; of units it is not known before they run."""
    if path == UNITS:
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
