"""The engine: consecutive blocks of a stack under one checkpoint call.

The loop of a model calls every block of a stack in turn. When those calls go through a
:class:`Forward`, it can answer them differently: asked for the first block of a segment (the
*leader*) it runs the whole segment and returns the segment's result; asked for the blocks
after it (the *followers*) it runs nothing, checks that nothing happened in between, and hands
the same result on. The loop, its index and the hooks of the blocks stay as they are.

Nothing is believed that was not seen. The first training forward for each shape of call runs
block by block and is recorded (see ``recording``); from the second on,
segments are formed wherever that record allows it.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, cast

from torch.nn import Module
from torch.utils import _pytree as pytree

from .backends import plainly
from .cache import is_cache
from .errors import SegmentBroken
from .intercept import original_call
from .links import (
    Arguments,
    Handed,
    Link,
    argument_name,
    attributes,
    changed_attribute,
    first_matrix,
    hand_out,
    plain_tree,
    read,
    surroundings,
)
from .offload import Offload
from .parts import Runner, tallying
from .repeat import Repeatable
from .report import UNITS, Condition, Effect, Span, StackEffect, Strategy
from .schedule import Schedule
from .stacks import unwrapped

# What is known of a boundary between two blocks: how to cross it, or why a segment cannot.
Boundary = Link | str


@dataclass(frozen=True, slots=True)
class Stack:
    """The blocks of one stack, and how they run where they are covered and in the gaps."""

    path: str
    schedule: Schedule
    blocks: Sequence[Module]
    covered: Runner
    gap: Runner = plainly
    carried: Mapping[str, int] = field(default_factory=dict)
    """What the family says is carried: a parameter of a block, and the leaf that feeds it."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What the record of one forward allows: the schedule, cut where a boundary is no link.

    ``reason`` says why it was cut inside a segment, if it was.
    """

    schedule: Schedule
    boundaries: tuple[Boundary, ...]
    reason: str = ""

    @classmethod
    def of(cls, schedule: Schedule, boundaries: Sequence[Boundary]) -> "Proof":
        broken = {k: boundary for k, boundary in enumerate(boundaries) if isinstance(boundary, str)}
        inside = [k for segment in schedule.segments for k in segment[:-1] if k in broken]
        reason = broken[inside[0]] if inside else ""
        return cls(schedule.cut(frozenset(broken)), tuple(boundaries), reason)

    def links(self, segment: range) -> Sequence[Link]:
        """What leads from each block of ``segment`` to the next: the schedule was cut elsewhere."""
        return cast("Sequence[Link]", self.boundaries[segment.start : segment.stop - 1])


def repeatable(block: Module) -> Callable[..., Any]:
    """What runs ``block`` itself, the same in backward; a function of a model as it is."""
    call: Callable[..., Any] = original_call(block)
    return Repeatable([block], call) if isinstance(block, Module) else call


class StackRun:
    """One stack during one training forward: every covered block checkpointed alone."""

    strategy: Strategy = "per-block"

    def __init__(self, stack: Stack, reason: str = ""):
        self.stack = stack
        self.reason = reason
        self.spans: list[Span] = []
        self.cached = False  # whether blocks ran plainly for the sake of a KV cache
        self.segment_of = {block: s for s in stack.schedule.segments for block in s}
        if not self.segment_of:
            self.strategy = "off"

    def step(self, index: int, args: tuple, kwargs: dict) -> Any:
        """Answer the loop's call of block ``index``."""
        return self.run_alone(index, args, kwargs)

    def run_alone(self, index: int, args: tuple, kwargs: dict) -> Any:
        """Run one block: under a checkpoint call if it is covered, plainly if not."""
        covered = index in self.segment_of
        if covered and any(map(is_cache, (*args, *kwargs.values()))):
            covered, self.cached = False, True  # a recompute would fill it once more
        return self.run_block(index, self.stack.blocks[index], covered, args, kwargs)

    def run_block(self, index: int, block: Module, covered: bool, args: tuple, kwargs: dict) -> Any:
        call = repeatable(block) if covered else original_call(block)
        return self.run(range(index, index + 1), covered, call, args, kwargs)

    def run(
        self, blocks: range, covered: bool, call: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Run ``blocks``, which ``call`` calls, and note what happened."""
        with tallying() as tally:
            result = (self.stack.covered if covered else self.stack.gap)(call, *args, **kwargs)
        self.spans.append(Span(blocks, covered, tally))
        return result

    def between(self, what: str) -> None:
        """Something else than a block of this stack was called."""

    def finish(self) -> None:
        """The model's forward is over."""

    def abandon(self) -> None:
        """The model's forward raised: let go of every tensor."""

    def effect(self) -> StackEffect:
        return StackEffect(self.stack.path, self.strategy, self.reason, tuple(self.spans))


@dataclass(slots=True)
class _OpenSegment:
    """A segment that has run and whose later blocks the loop has yet to ask for."""

    blocks: range
    arguments: Arguments
    result: Any
    handed: Any
    handed_leaves: list[Any]
    surroundings: tuple
    attributes: dict[int, dict[str, Any]]
    weights: dict[int, tuple[Any, ...]]
    due: int


class SegmentedRun(StackRun):
    """Runs each segment when its first block is asked for.

    ``on_broken`` is told, before :class:`SegmentBroken` is raised, why segments are wrong.
    """

    def __init__(self, stack: Stack, proof: Proof, on_broken: Callable[[str], None]):
        super().__init__(stack, proof.reason)
        if any(len(segment) > 1 for segment in stack.schedule.segments):
            self.strategy = "segmented"
        self.proof = proof
        self.on_broken = on_broken
        self._open: _OpenSegment | None = None
        self._aliases: list[tuple[range, weakref.ref[Handed]]] = []

    def step(self, index: int, args: tuple, kwargs: dict) -> Any:
        if self._open is not None:
            return self._follow(self._open, index, args, kwargs)
        segment = self.segment_of.get(index)
        if segment is None or len(segment) == 1 or index != segment.start:
            return self.run_alone(index, args, kwargs)
        return self._lead(segment, args, kwargs)

    def _lead(self, segment: range, args: tuple, kwargs: dict) -> Any:
        arguments = Arguments(args, kwargs)
        around = surroundings()
        blocks = self.stack.blocks[segment.start : segment.stop]
        calls = [original_call(block) for block in blocks]
        links = self.proof.links(segment)
        segment_call = Repeatable(blocks, partial(run_segment, calls, links, arguments.spec))
        result = self.run(segment, True, segment_call, tuple(arguments.leaves), {})
        handed = hand_out(result, partial(self._break_at_read, segment))
        leaves = pytree.tree_leaves(handed)
        self._aliases += [(segment, weakref.ref(t)) for t in leaves if isinstance(t, Handed)]
        kept = {index: attributes(self.stack.blocks[index]) for index in segment[1:]}
        held = {index: first_matrix(self.stack.blocks[index]) for index in segment}
        self._open = _OpenSegment(
            segment,
            arguments,
            result,
            handed,
            leaves,
            around,
            attributes=kept,
            weights=held,
            due=segment.start + 1,
        )
        return handed

    def _follow(self, open_: _OpenSegment, index: int, args: tuple, kwargs: dict) -> Any:
        segment = open_.blocks
        if index != open_.due:
            self._break(segment, f"block {index} was called where block {open_.due} was due")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != open_.arguments.spec:
            self._break(segment, f"block {index} is called with other arguments")
        [link] = self.proof.links(range(index - 1, index + 1))
        sources = dict(link.carried)
        for i, leaf in enumerate(leaves):
            if i in sources:
                unchanged = leaf is open_.handed_leaves[sources[i]]
            else:
                unchanged = open_.arguments.same(i, leaf)
            if not unchanged:
                name = argument_name(self.stack.blocks[index], leaves, spec, i)
                self._break(
                    segment, f"block {index} does not get the `{name}` that was left for it"
                )
        now = attributes(self.stack.blocks[index])
        if changed := changed_attribute(open_.attributes[index], now):
            self._break(segment, f"the attribute `{changed}` of block {index} was set in between")
        pair = (index - 1, index)
        if any(first_matrix(self.stack.blocks[i]) != open_.weights[i] for i in pair):
            self._break(segment, f"weights are moved or written before block {index}")
        if surroundings() != open_.surroundings:
            self._break(segment, f"grad mode or autocast changes before block {index}")
        open_.due += 1
        if open_.due < segment.stop:
            return open_.handed
        self._open = None
        return open_.result

    def _break_at_read(self, segment: range, operation: str) -> NoReturn:
        self._break(segment, f"the loop uses the state between its blocks ({operation})")

    def _break(self, segment: range, reason: str) -> NoReturn:
        self._open = None
        self.on_broken(reason)
        where = f"blocks {segment.start} to {segment.stop - 1} of `{self.stack.path}`"
        raise SegmentBroken(
            f"{where} ran as one segment, but {reason}. The forward was stopped before its "
            "backward could use it; calls like this one run block by block from now on, so "
            "repeat the step."
        )

    def between(self, what: str) -> None:
        if self._open is not None:
            self._break(self._open.blocks, f"{what} ran before block {self._open.due}")

    def finish(self) -> None:
        if self._open is not None:
            self._break(self._open.blocks, f"the forward ended without block {self._open.due}")
        for segment, reference in self._aliases:
            if reference() is not None:
                self._break(segment, "the model keeps the state between its blocks")

    def abandon(self) -> None:
        self._open = None


def run_segment(
    calls: Sequence[Callable[..., Any]],
    links: Sequence[Link],
    spec: pytree.TreeSpec,
    *leaves: Any,
) -> Any:
    """Call the blocks of a segment one after the other, feeding each from the one before it.

    ``leaves`` and ``spec`` are the flattened arguments of the first block; ``links[k]`` leads
    from ``calls[k]`` to ``calls[k + 1]``. Returns what the last block returned.
    """
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    result = calls[0](*args, **kwargs)
    for call, link in zip(calls[1:], links, strict=True):
        leaves = link.feed(leaves, result)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        result = call(*args, **kwargs)
    return result


class UnitsRun(StackRun):
    """Modules of no stack, in the order in which they are asked for during one forward.

    The schedule covers the units that were counted beforehand; should there be more, they
    follow the rule of ``interval`` and ``stride``.
    """

    def __init__(self, schedule: Schedule, covered: Runner, interval: int, stride: int):
        super().__init__(Stack(UNITS, schedule, (), covered), "units are handed over one by one")
        self.strategy = "per-block" if interval else "off"
        self.interval = interval
        self.stride = stride

    def run_unit(self, unit: Module, args: tuple, kwargs: dict) -> Any:
        index = len(self.spans)
        covered = index in self.segment_of
        if index >= self.stack.schedule.blocks:
            covered = index % self.stride < self.interval
        return self.run_block(index, unit, covered, args, kwargs)


class Forward:
    """One training forward of a model: sends each block call to the run of its stack."""

    def __init__(
        self,
        runs: Iterable[StackRun],
        units: UnitsRun,
        conditions: Sequence[Condition] = (),
        inside_checkpoint: bool = False,
        offload: Offload | None = None,
    ):
        self.runs = tuple(runs)
        self.units = units
        self.conditions = tuple(conditions)
        self.inside_checkpoint = inside_checkpoint  # of somebody else, around the whole model
        self.offload = offload
        self._hands_out = any(type(run) is not StackRun for run in self.runs)
        self._places: dict[int, tuple[StackRun, int]] = {}
        for run in self.runs:
            for index, block in enumerate(run.stack.blocks):
                # Twice: the loop may go over the list as it was before its blocks were compiled.
                self._places[id(block)] = (run, index)
                self._places[id(unwrapped(block))] = (run, index)
        self.reached: list[StackRun] = []  # in execution order
        self._last: StackRun | None = None

    def step(self, block: Module, args: tuple, kwargs: dict) -> Any:
        """Answer the loop's call of ``block``; a block of no stack is a unit."""
        run, index = self._places.get(id(block), (self.units, -1))
        if self._last is not None and self._last is not run:
            self._last.between(f"a {type(block).__name__} of another stack")
        if self._last is not run and run not in self.reached:
            self.reached.append(run)
        self._last = run
        if self._hands_out and type(run) in (StackRun, UnitsRun):
            read((args, kwargs), f"argument of a {type(block).__name__}")
            args, kwargs = plain_tree((args, kwargs))
        if run is self.units:
            return self.units.run_unit(block, args, kwargs)
        return run.step(index, args, kwargs)

    def finish(self) -> None:
        """The model's forward is over. Raises ``SegmentBroken``, or as ``Offload.settle``."""
        try:
            for run in self.runs:
                run.finish()
        finally:
            if self.offload is not None:
                self.offload.settle()

    def abandon(self) -> None:
        """The model's forward raised: let go of every tensor."""
        if self.offload is not None:
            self.offload.let_go()
        for run in self.runs:
            run.abandon()

    def effect(self) -> Effect:
        """What ran, stack by stack in execution order."""
        runs = [*self.reached, *(run for run in self.runs if run not in self.reached)]
        return Effect(tuple(run.effect() for run in runs), self.conditions)
