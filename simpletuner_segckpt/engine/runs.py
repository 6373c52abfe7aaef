"""One stack during one training forward, block by block: what every other run builds on."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module

from ..messages.errors import SegmentBroken
from ..model.fsdp import may_be_sharded
from ..model.interception import original_call
from ..recompute.backend import BlockWrappers
from ..recompute.gathered import GatheredRecompute
from ..recompute.mismatch import Place
from ..recompute.state import StatefulRecompute
from ..recompute.submodules import CallWrapper
from ..schedules.conditions import is_cache
from ..schedules.effect import Span, StackEffect
from ..schedules.report import UNITS, Strategy
from ..schedules.schedule import Kept, Schedule
from ..schedules.tally import tallying
from .platform import Platform
from .proof import BoundStack
from .streamed import SHARED, MemoryWatch


def recomputable(
    block: Module, siblings: Sequence[Module] = (), place: Place | None = None
) -> Callable[..., Any]:
    """What runs ``block`` itself, the same in backward; a function of a model as it is."""
    call: Callable[..., Any] = original_call(block)
    if not isinstance(block, Module):
        return call
    return StatefulRecompute([block], call, siblings, place)


class StackRun:
    """One stack during one training forward: every covered block checkpointed alone.

    memory: watches that of the blocks, in forwards before which nothing is known of it.
    """

    strategy: Strategy = "per-block"

    def __init__(self, stack: BoundStack, reason: str = "", memory: MemoryWatch | None = None):
        self.stack = stack
        self.reason = reason
        self.memory = memory
        self.spans: list[Span] = []
        self.cached = False  # whether blocks ran plainly for the sake of a KV cache
        self.segment_of = {block: s for s in stack.schedule.segments for block in s}
        if not self.segment_of:
            self.strategy = "off"

    def call_block(self, index: int, args: tuple, kwargs: dict) -> Any:
        """Answer the loop's call of block ``index``."""
        return self.run_alone(index, args, kwargs)

    def run_alone(self, index: int, args: tuple, kwargs: dict) -> Any:
        """Run one block: under a checkpoint call if it is covered, plainly if not."""
        covered = index in self.segment_of
        if self.memory is not None:
            self.memory.look(*range(max(0, index - 1), index + 1))
            if self.memory.shared:
                self.stack, covered = self.stack.recomputed_whole(), True
            elif not covered or self.stack.recomputes_parts:
                self.memory.ran_plainly(index)
        if covered and any(map(is_cache, (*args, *kwargs.values()))):
            covered, self.cached = False, True  # a recompute would fill it once more
        return self.run_block(index, self.stack.blocks[index], covered, args, kwargs)

    def run_block(self, index: int, block: Module, covered: bool, args: tuple, kwargs: dict) -> Any:
        blocks = range(index, index + 1)
        call = original_call(block)
        if covered:
            call = recomputable(block, self.stack.blocks, self.place(blocks))
        return self.run(blocks, covered, call, args, kwargs)

    def wrapper(self, block: int, covered: bool) -> CallWrapper:
        """How ``block`` runs, or the segment that begins with it."""
        return self.stack.wrapper(block, covered)

    def place(self, blocks: range) -> Place:
        return Place(self.stack.path, blocks, self.stack.schedule)

    def run(
        self, blocks: range, covered: bool, call: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Run ``blocks``, which ``call`` calls, and note what happened."""
        if covered and may_be_sharded():
            call = self._gathered(blocks, call)
        with tallying() as tally:
            result = self.wrapper(blocks.start, covered)(call, *args, **kwargs)
        self.spans.append(Span(blocks, covered, tally))
        return result

    def _gathered(self, blocks: range, call: Callable[..., Any]) -> GatheredRecompute:
        """Have FSDP2 gather a planned segment as a whole when the last of its blocks is recomputed.

        Whether it runs as a segment or not: other ranks may do the other.
        """
        own = self.stack.blocks
        planned = next((s for s in self.stack.together if s.stop == blocks.stop), range(0))
        first = own[planned.start : planned.stop] if len(planned) > 1 else ()
        return GatheredRecompute(call, own[blocks.start : blocks.stop], first)

    def between(self, what: str) -> None:
        """Something else than a block of this stack was called."""

    def finish(self) -> None:
        """The model's forward is over. Raises ``SegmentBroken``."""
        lost = self.memory.finish() if self.memory is not None else ()
        if lost:
            raise SegmentBroken(
                f"blocks {' '.join(map(str, lost))} of `{self.stack.path}` were not recomputed as "
                f"a whole, but {SHARED}, so what their backward needs is overwritten. The forward "
                "was stopped before that; all blocks are recomputed from now on: repeat the step."
            )

    def abandon(self) -> None:
        """The model's forward raised: let go of every tensor."""

    def effect(self) -> StackEffect:
        blocks = range(len(self.stack.blocks))
        came = {block for span in self.spans for block in span.blocks}
        missing = tuple(block for block in blocks if block not in came)
        if missing and not came:
            reason = "none of its blocks was called"
            return StackEffect(self.stack.path, "not reached", reason, (), missing)
        return StackEffect(self.stack.path, self.strategy, self.reason, tuple(self.spans), missing)


class UnitsRun(StackRun):
    """Modules of no stack, in the order in which they are asked for during one forward.

    The schedule covers the units that were counted beforehand; should there be more, they
    follow the rule of ``interval`` and ``stride``. kept: the operators whose outputs stay.
    """

    def __init__(
        self,
        schedule: Schedule,
        wrappers: BlockWrappers,
        platform: Platform,
        interval: int,
        stride: int,
        kept: Kept,
    ):
        super().__init__(
            BoundStack(UNITS, schedule, (), wrappers, platform), "units are handed over one by one"
        )
        self.strategy = "per-block" if interval else "off"
        self.interval = interval
        self.stride = stride
        self.kept = kept

    def wrapper(self, block: int, covered: bool) -> CallWrapper:
        wrappers, schedule = self.stack.wrappers, self.stack.schedule
        kept = schedule.kept_by(block) if block < len(schedule.kept) else self.kept
        return wrappers.covered(kept) if covered else wrappers.gap

    def run_unit(self, unit: Module, args: tuple, kwargs: dict) -> Any:
        index = len(self.spans)
        covered = index in self.segment_of
        if index >= self.stack.schedule.blocks:
            covered = index % self.stride < self.interval
        return self.run_block(index, unit, covered, args, kwargs)
