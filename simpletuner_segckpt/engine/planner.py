"""How the blocks of a training forward run, and what each forward shows for those that follow."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.nn import Module

from ..config_schema import CheckpointingConfig
from ..messages.log import Messages
from ..model.compiled import NO_BUDGET, NO_SEGMENTS, NOT_SHOWN, SEGMENTS_IN_GRAPHS
from ..model.foreign_hooks import (
    hook_boundaries,
    hook_everywhere,
    may_be_fed,
    refuse_hooks,
    swap_managers,
)
from ..model.fsdp import are_sharded, recompute_fault
from ..model.stacks import blocks_of
from ..model.wrappers import is_compiled, recomputes_itself
from ..private.of_libraries import has_ring_attention
from ..private.of_torch import inside_checkpoint
from ..recompute.backend import Backend, BlockWrappers
from ..recompute.contexts import Contexts
from ..recompute.reread import read_again
from ..schedules.conditions import CALL_CONDITIONS, NOT_RECOMPUTED, Condition, call_conditions
from ..schedules.effect import shortfalls
from ..schedules.report import UNITS, StackReport
from ..schedules.schedule import Schedule, make_schedules
from .budgeted import Budgeted
from .budgeted_forward import BudgetedForward, WithinBudget
from .call_shapes import CallShape, ProofTable, call_shape, with_hooks
from .forward import Forward
from .platform import Platform
from .proof import BoundStack, Proof
from .recording import RecordingRun
from .runs import StackRun, UnitsRun
from .segmented import SegmentedRun
from .streamed import SHARED, MemoryWatch
from .traced import TracedStack, parameters_of


class ForwardPlanner:
    """Decides, before each training forward of one model, how its blocks run.

    conditions: arguments of the forward that force per-block.
    carried: what the family says is carried in each stack; None when no family describes it.
    """

    def __init__(
        self,
        stacks: Sequence[StackReport],
        config: CheckpointingConfig,
        conditions: Sequence[Condition] = (),
        carried: Mapping[str, Mapping[str, int]] | None = None,
        platform: Platform | None = None,
    ):
        self.stacks = tuple(stack for stack in stacks if stack.path != UNITS)
        counted = (stack.schedule for stack in stacks if stack.path == UNITS)
        self.units = next(counted, Schedule(0, ()))
        self.config = config
        self.messages = Messages()
        self.platform = platform or Platform()
        self.backend = Backend(config, self.platform.accelerator())
        budget = config.budget if config.enabled else None
        self.budgeted = Budgeted(budget, self.platform.memory(), self.messages) if budget else None
        named = {condition.name for condition in conditions}
        general = (c for c in CALL_CONDITIONS if c.name not in named)
        self.conditions = (*conditions, *general)
        self.named = frozenset(condition.name for condition in self.conditions)
        self.described = carried is not None
        self.carried = dict(carried or {})
        self._ran: set[str] = set()  # paths of the stacks that have run
        self._own_memory: set[str] = set()  # of those that were seen to share none
        self._streamed: set[str] = set()  # and of those that share it
        self.trying_out = False  # whether segments are, which asks no block to be recomputed
        # By stack path: what was shown, and what of it last.
        self.proof_tables = self._nothing_proven()
        self.proofs: dict[str, Proof] = {}
        self.lost_in_graph: dict[str, str] = {}  # by stack path, why a traced one has no segments
        self.drifts: dict[str, str] = {}  # by stack path, where its family file was wrong

    def plan(self, module: Module, arguments: Mapping[str, Any]) -> Forward:
        """How the blocks of a training forward with these arguments run."""
        conditions = call_conditions(self.conditions, arguments, module)
        inside = inside_checkpoint()
        if inside:
            reason = "the whole model runs inside another checkpoint call"
            conditions.append(Condition("call", "torch.utils.checkpoint", reason))
        conditions += swap_managers(module, [stack.path for stack in self.stacks])
        shape = call_shape(arguments, module.training, self.named)
        if fault := recompute_fault(module):
            self.messages.warn("sharded", fault)
        around: tuple[Contexts, ...] = (read_again,) if has_ring_attention(module) else ()
        planned, unit_schedule = self.stacks, self.units
        within = None
        if self.budgeted is not None:
            within = WithinBudget(self.budgeted, module, arguments, self.config.inputs_on_cpu)
            around = (*around, within.around)
            planned = tuple(within.planned(stack) for stack in planned)
            unit_schedule = within.plan.schedule(UNITS, self.units.blocks)
        wrappers = self.backend.begin(around)
        runs = [self._run(module, s, wrappers, conditions, shape) for s in planned]
        # Units have no feed-forward of their own.
        interval = 0 if self.config.feed_forward_only else self.config.interval
        units = UnitsRun(
            unit_schedule,
            wrappers,
            self.platform,
            interval,
            self.config.stride or self.config.interval,
            self.config.keep,
        )
        if within is None:
            return Forward(runs, units, conditions, inside, wrappers.offload)
        return BudgetedForward(runs, units, conditions, inside, wrappers.offload, within)

    def _run(
        self,
        module: Module,
        planned: StackReport,
        wrappers: BlockWrappers,
        conditions: Sequence[Condition],
        shape: CallShape,
    ) -> StackRun:
        blocks = blocks_of(module, planned.path)
        carried = self.carried.get(planned.path, {})
        stack = BoundStack(
            planned.path,
            planned.schedule,
            blocks,
            wrappers,
            self.platform,
            carried,
            planned.segments if planned.strategy == "segmented" else (),
        )
        found = [str(c) for c in conditions if c.concerns(planned.path)]
        if len(blocks) != planned.blocks:
            changed = (
                f"it has {len(blocks)} blocks now and had {planned.blocks} when the schedule was "
                "installed; call apply() again"
            )
            self.messages.warn("blocks-changed", f"{planned.path}: {changed}")
            found.append(changed)
        if itself := [k for k, block in enumerate(blocks) if recomputes_itself(block)]:
            which = f"blocks {' '.join(map(str, itself))}"
            reason = f"{which} recompute themselves: FSDP's activation checkpointing wraps them"
            message = f"{planned.path}: {reason}, and the schedule leaves them out"
            self.messages.warn("left-to-others", message)
            return StackRun(replace(stack, schedule=stack.schedule.without(itself)), reason)
        if planned.path in self._streamed:
            whole = stack.recomputed_whole()
            if stack.recomputes_parts or stack.schedule != whole.schedule:
                self.messages.warn(
                    "streamed",
                    f"{planned.path}: every block is recomputed as a whole, by itself: {SHARED}",
                )
            return StackRun(whole, SHARED)
        refuse_hooks(planned, blocks)
        probed = not carried
        hooks: dict[int, str] = {}
        if planned.strategy == "segmented" and not found:
            # Segments of what nobody described are tried out: a hook would act once more.
            hooks = hook_boundaries(planned.path, blocks, alone=probed)
            everywhere = hook_everywhere()
            found += [str(everywhere)] if everywhere else _against_segments(planned.schedule, hooks)
        if found and planned.strategy == "segmented":
            self._say_per_block(planned.path, found[0])
        reason = found[0] if found else planned.reason
        memory = None
        if planned.path not in self._own_memory:
            memory = MemoryWatch(blocks, partial(self._judge, planned.path))
            swapped = any(c.where == "model" and c.concerns(planned.path) for c in conditions)
            if swapped or may_be_fed(blocks):
                reason = f"{reason}; the first forward recomputes all"
                return StackRun(stack.recomputed_whole(), reason, memory)
        if found or planned.strategy != "segmented":
            return StackRun(stack, reason, memory)
        shape = with_hooks(shape, hooks)
        proven = self.proof_tables[planned.path]
        proof = proven.get(shape)
        if proof is None:
            if probed and len(proven) and are_sharded(blocks):
                # Other ranks may know this shape of call already, and would not try it out: each
                # would wait for the other's all-gathers.
                reason = "a new shape of call cannot be tried out in segments on sharded blocks"
                self._say_per_block(planned.path, f"{reason}; a family file needs no trying")
                return StackRun(stack, reason)
            return RecordingRun(stack, shape, replay=probed, hooks=hooks, memory=memory)
        if proof.reason and _has_segments(proof.schedule):
            self.messages.warn(
                "block-by-block",
                f"segments of {planned.path} end early: {proof.reason}; it runs {proof.schedule}",
            )
        elif proof.reason:
            self._say_per_block(planned.path, proof.reason)
        stack = replace(stack, schedule=proof.schedule)
        return SegmentedRun(stack, proof, partial(self._distrust, shape, planned))

    def plan_traced(
        self, blocks: Mapping[str, Sequence[Module]], given: tuple[Any, ...] | None
    ) -> tuple[TracedStack, ...]:
        """How the blocks of a forward run that is being traced; ``given`` is its shape of call.

        None stands for one that holds a dict, of which nothing is known.
        """
        self.lost_in_graph = {}
        return tuple(self._traced(stack, blocks[stack.path], given) for stack in self.stacks)

    def _traced(
        self, planned: StackReport, blocks: Sequence[Module], given: tuple[Any, ...] | None
    ) -> TracedStack:
        alone = TracedStack.of(planned.path, planned.schedule)
        if self.budgeted is not None:
            self.lost_in_graph[planned.path] = NO_BUDGET
            return alone
        if planned.strategy != "segmented" or not _has_segments(planned.schedule):
            return alone
        schedule, carried, why = self._known_of(planned, blocks, given)
        if why:
            self.lost_in_graph[planned.path] = why
            return alone
        return TracedStack.of(planned.path, schedule, carried, parameters_of(blocks))

    def _known_of(
        self, planned: StackReport, blocks: Sequence[Module], given: tuple[Any, ...] | None
    ) -> tuple[Schedule, dict[str, int], str]:
        """The schedule of a stack for a graph, what is carried, and why it cannot be segmented."""
        nothing: tuple[Schedule, dict[str, int]] = planned.schedule, {}
        if not SEGMENTS_IN_GRAPHS:
            return *nothing, NO_SEGMENTS
        if given is None:
            return *nothing, "an argument of this forward is a dict, which may be anything"
        names = {name for name, value in given[1:] if value is not False}
        forced = (c for c in self.conditions if c.name in names and c.concerns(planned.path))
        if condition := next(forced, None):
            return *nothing, str(condition)
        hooks = hook_boundaries(planned.path, blocks, alone=True)
        if hooks or hook_everywhere():
            return *nothing, next(iter(hooks.values()), "there is a hook on all modules")
        proof = self.proof_tables[planned.path].get(CallShape(given))
        if proof is None:
            carried = dict(self.carried.get(planned.path, {}))
            return planned.schedule, carried, "" if carried else NOT_SHOWN
        links = [link for s in proof.schedule.segments for link in proof.links(s)]
        same = all(link.by_name == links[0].by_name and not link.anew for link in links)
        if not links or not same:
            return *nothing, proof.reason or NOT_SHOWN
        return proof.schedule, links[0].by_name, ""

    def _judge(self, path: str, shared: bool) -> None:
        """A forward is over in which the memory of a stack's blocks was watched."""
        (self._streamed if shared else self._own_memory).add(path)

    def learn(self, forward: Forward) -> None:
        """What this forward showed for those that follow."""
        planned = {stack.path: stack for stack in self.stacks}
        for run in forward.runs:
            if run.cached and NOT_RECOMPUTED not in run.reason:
                self.messages.warn("no-cache", f"{run.stack.path}: {NOT_RECOMPUTED}")
            if run not in forward.reached:
                self.messages.warn(
                    "not-reached",
                    f"{run.stack.path} was not reached: this forward did not run its blocks, or "
                    "not through the checkpoint function, so the schedule recomputes nothing of it",
                )
            elif isinstance(run, RecordingRun):
                self._learn_from(run)
            plan = planned[run.stack.path]
            parts = run.stack.recomputes_parts
            self._say_shortfalls(plan if parts else replace(plan, feed_forward=()), run)
        counts = {stack.path: stack.blocks for stack in self.stacks}
        units = len(forward.units.spans)
        if units and units != self.units.blocks and not self.config.feed_forward_only:
            # Modules that run more than once count each time.
            self.units = self._schedules(counts | {UNITS: units})[UNITS]
        attentions = tuple(kind for kind in self.config.keep if kind != "ffn")
        if not self.stacks and attentions:
            only_units = StackReport(UNITS, "per-block", self.units.keeping(attentions))
            self._say_shortfalls(only_units, forward.units)
        reached = [planned[r.stack.path] for r in forward.reached if r is not forward.units]
        if not self.described and not self._ran.issuperset(stack.path for stack in reached):
            self._in_order(reached)

    def _learn_from(self, run: RecordingRun) -> None:
        path = run.stack.path
        if run.drift:
            # The next forward records it once more, as a stack that no file describes.
            run.abandon()
            self.drifts[path] = run.drift
            self.carried[path] = {}
            self.proof_tables[path] = ProofTable(described=False)
            self.messages.warn("drifted", f"{path}: {run.drift}; what is seen is what counts")
            return
        self.trying_out = True
        try:
            self._remember(run.shape, path, run.proof())
        finally:
            self.trying_out = False

    def _in_order(self, reached: Sequence[StackReport]) -> None:
        """Schedule again: stacks ran that had not run before.

        What keep_last keeps goes by execution order, which nobody described, and lists that only
        looked like stacks must not use it up.
        """
        before = [s for s in self.stacks if s.path in self._ran and s not in reached]
        ran = (*before, *reached)
        self._ran = {stack.path for stack in ran}
        schedules = self._schedules({stack.path: stack.blocks for stack in ran})
        scheduled = []
        for stack in ran:
            again = replace(stack.schedule, segments=schedules[stack.path].segments)
            scheduled.append(replace(stack, schedule=again))
        if scheduled != list(ran):
            self.proof_tables = self._nothing_proven()
            self.proofs = {}
        self.stacks = (*scheduled, *(s for s in self.stacks if s.path not in self._ran))

    def _schedules(self, counts: Mapping[str, int]) -> dict[str, Schedule]:
        config = self.config
        return make_schedules(counts, config.interval, config.stride, config.keep_last)

    def _nothing_proven(self) -> dict[str, ProofTable]:
        return {s.path: ProofTable(bool(self.carried.get(s.path))) for s in self.stacks}

    def _remember(self, shape: CallShape, path: str, proof: Proof) -> None:
        self.proof_tables[path].put(shape, proof)
        self.proofs[path] = proof

    def _distrust(self, shape: CallShape, planned: StackReport, reason: str) -> None:
        """Segments were wrong for this shape of call: no more of them."""
        boundaries = [reason] * (planned.blocks - 1)
        self._remember(shape, planned.path, Proof.of(planned.schedule, boundaries))

    def _say_shortfalls(self, planned: StackReport, run: StackRun) -> None:
        compiled = [index for index, block in enumerate(run.stack.blocks) if is_compiled(block)]
        moves = self.backend.moves
        for shortfall in shortfalls(planned, run.effect(), compiled=compiled, moves=moves):
            self.messages.warn("nothing-inside", f"{run.stack.path}: {shortfall}")

    def _say_per_block(self, path: str, reason: str) -> None:
        self.messages.warn("block-by-block", f"{path} runs block by block: {reason}")


def _against_segments(schedule: Schedule, hooks: Mapping[int, str]) -> list[str]:
    """Why hooks at these boundaries leave no segment of several blocks, if they do that."""
    inside = [hooks[k] for segment in schedule.segments for k in segment[:-1] if k in hooks]
    return [] if _has_segments(schedule.cut(frozenset(hooks))) else inside[:1]


def _has_segments(schedule: Schedule) -> bool:
    return any(len(segment) > 1 for segment in schedule.segments)
