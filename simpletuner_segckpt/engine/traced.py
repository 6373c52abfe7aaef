"""Segments in a forward that ``torch.compile`` traces as a whole.

A traced call keeps no books, so that nothing can be recorded in it. Its plan is made by the
compiler, once for each graph: from what an eager forward of the same shape of call has proven, or
else from what the family file says is carried. The trace holds it to that: each block of a segment
must be called with what the plan says, as one and the same object. What the loop holds in between
is no state but a tensor of NaN, so that whatever reads it is not wrong in silence; unread, it is in
no graph.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ..messages.errors import SegmentBroken
from ..model.interception import what_runs
from ..schedules.schedule import Schedule


class TracedStack(NamedTuple):
    """The plan of one stack, in what a compiler takes for constants.

    stops: for each block the end of the segment that begins with it, the block's own index in the
    midst of one, -1 in a gap. carried: parameter of a block and the leaf of the result that feeds
    it. parameters: of the blocks' forward.
    """

    path: str
    stops: tuple[int, ...]
    carried: tuple[tuple[str, int], ...] = ()
    parameters: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        path: str,
        schedule: Schedule,
        carried: dict[str, int] | None = None,
        parameters: Sequence[str] = (),
    ) -> "TracedStack":
        """The plan of a schedule; without ``carried`` every covered block runs by itself."""
        stops = [-1] * schedule.blocks
        for segment in schedule.segments if carried else schedule.per_block().segments:
            for block in segment:
                stops[block] = segment.stop if block == segment.start else block
        names = tuple(sorted(carried.items())) if carried else ()
        return cls(path, tuple(stops), names, tuple(parameters))


class OpenSegment:
    """A segment whose first block was called, and whose others are to come."""

    def __init__(
        self, plan: TracedStack, index: int, args: tuple, kwargs: dict[str, Any], result: Any
    ):
        self.plan = plan
        self.due = index + 1
        self.stop = plan.stops[index]
        self.given = by_name(plan, args, kwargs)
        self.result = result
        self.held = _held(result)

    def follow(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Answer the loop's call of a block that has run already. Raises ``SegmentBroken``."""
        given = by_name(self.plan, args, kwargs)
        expected = fed(self.plan, self.given, self.held)
        same = index == self.due and len(given) == len(expected)
        for name in given:
            same = same and name in expected and _is_same(given[name], expected[name])
        if not same:
            raise SegmentBroken(
                f"block {index} of `{self.plan.path}` is compiled in a segment, and is not called "
                "with what the block before it returned; compile the blocks one by one"
            )
        self.due = index + 1
        return self.result if self.due == self.stop else self.held


def given_in(arguments: dict[str, Any], training: bool) -> tuple[Any, ...] | None:
    """The shape of a call as ``call_shapes.call_shape`` has it; None where it holds a dict."""
    given: list[Any] = [training]
    for name in sorted(arguments):
        value = arguments[name]
        if isinstance(value, dict):
            return None
        if value is not None:
            given.append((name, value if isinstance(value, bool) else None))
    return tuple(given)


def parameters_of(blocks: Sequence[Module]) -> tuple[str, ...]:
    """The names of the parameters that all blocks of a stack have; empty where they differ."""
    found = {tuple(inspect.signature(what_runs(block)).parameters)[1:] for block in blocks}
    return found.pop() if len(found) == 1 else ()


def segment_call(plan: TracedStack, calls: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """What runs the blocks of a segment one after the other."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = by_name(plan, args, kwargs)
        result = calls[0](*args, **kwargs)
        for call in calls[1:]:
            following = fed(plan, given, result)
            positional = plan.parameters[: len(args)]
            result = call(
                *[following[name] for name in positional],
                **{name: following[name] for name in kwargs},
            )
        return result

    return run


def by_name(plan: TracedStack, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a block by the names of its parameters."""
    return dict(zip(plan.parameters, args, strict=False)) | kwargs


def fed(plan: TracedStack, given: dict[str, Any], result: Any) -> dict[str, Any]:
    """The arguments of the block after one with these, from what that one returned."""
    leaves = (result,) if isinstance(result, Tensor) else tuple(result)
    return given | {name: leaves[leaf] for name, leaf in plan.carried}


def _held(result: Any) -> Any:
    """What the loop holds in place of ``result`` between the blocks of a segment."""
    if isinstance(result, Tensor):
        return torch.full_like(result, float("nan"))
    return tuple(torch.full_like(leaf, float("nan")) for leaf in result)


def _is_same(given: Any, expected: Any) -> bool:
    """Whether an argument is what it was; containers leaf by leaf."""
    if isinstance(expected, (tuple, list)):
        return len(given) == len(expected) and all(
            _is_same(one, other) for one, other in zip(given, expected, strict=True)
        )
    if isinstance(expected, Tensor) or expected is None:
        return given is expected
    return not isinstance(given, Tensor) and bool(given == expected)
