"""A forward that ``torch.compile`` traces as a whole: how it answers the loop's calls.

What a :class:`~.forward.Forward` is to an eager one, within what traced code may do: see
``traced``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from ..model.compiled import AS_A_WHOLE
from ..model.interception import original_call
from ..schedules.conditions import Condition
from .planner import ForwardPlanner
from .traced import OpenSegment, TracedStack, given_in, segment_call


class TracedForward:
    """The forward of one model that is being traced, or was last.

    blocks: of each stack; a traced call finds its place by identity.
    schedule: a text that names the schedule. Compiled code is held to the texts that its trace has
        read: for another schedule other code is made.
    recomputes: whether the schedule was to recompute in it.
    """

    def __init__(
        self, forwards: ForwardPlanner, blocks: Mapping[str, Sequence[Module]], schedule: str
    ):
        self.forwards = forwards
        self.backend = forwards.backend
        self.blocks = blocks
        self.schedule = schedule
        self.recomputes = False
        self._stacks: tuple[TracedStack, ...] = ()
        self._open_segment: OpenSegment | None = None

    def begin(self, arguments: dict[str, Any], training: bool) -> None:
        """A forward with gradients begins, called with ``arguments``."""
        self._stacks = self._plan(given_in(arguments, training), self.schedule)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _plan(self, given: tuple[Any, ...] | None, schedule: str) -> tuple[TracedStack, ...]:
        """How its blocks run; asked by the compiler itself, once for each graph.

        It also says what is lost, since a traced forward cannot. given: as ``given_in``. schedule:
        ``self.schedule``, an argument so that the code is held to it.
        """
        plan = self.forwards.plan_traced(self.blocks, given)
        if any(self._lost()):
            self.forwards.messages.warn("compiled", str(self.condition))
        return plan

    @property
    def condition(self) -> Condition:
        """That it was compiled, and what does not happen because of that."""
        reasons = [AS_A_WHOLE, *self._lost()]
        return Condition("model", "torch.compile", "; ".join(reasons))

    def _lost(self) -> Iterator[str]:
        """Why something that was planned does not happen in a model that is one graph."""
        yield from dict.fromkeys(self.forwards.lost_in_graph.values())
        if self.backend.moves:
            yield "nothing is moved to CPU memory"

    def call_block(self, block: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Answer the loop's call of ``block``; one of no stack runs by itself."""
        call = original_call(block)
        if self.forwards.config.feed_forward_only:
            return call(*args, **kwargs)
        for plan in self._stacks:
            for index, one in enumerate(self.blocks[plan.path]):
                if one is block:
                    return self._run(plan, index, call, args, kwargs)
        return self.backend.in_graph(call, *args, **kwargs)

    def _run(
        self, plan: TracedStack, index: int, call: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run a block of a stack, or the segment that it begins, or hand on what that returned."""
        if self._open_segment is not None:
            result = self._open_segment.follow(index, args, kwargs)
            if index + 1 == self._open_segment.stop:
                self._open_segment = None
            return result
        stop = plan.stops[index]
        if stop < 0:
            return call(*args, **kwargs)
        if stop == index + 1:
            return self.backend.in_graph(call, *args, **kwargs)
        calls = [original_call(member) for member in self.blocks[plan.path][index:stop]]
        result = self.backend.in_graph(segment_call(plan, calls), *args, **kwargs)
        self._open_segment = OpenSegment(plan, index, args, kwargs, result)
        return self._open_segment.held

    def end(self) -> None:
        """It is over, whether or not it raised: nothing of it is held."""
        self._stacks = ()
        self._open_segment = None
