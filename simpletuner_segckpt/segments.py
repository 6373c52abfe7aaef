"""The engine: consecutive blocks of a stack under one checkpoint call.

The loop of a model calls every block of a stack in turn. When those calls go through a
:class:`Forward`, it can answer them differently: asked for the first block of a segment (the
*leader*) it runs the whole segment and returns the segment's result; asked for the blocks
after it (the *followers*) it runs nothing, checks that nothing happened in between, and hands
the same result on. The loop, its index and the hooks of the blocks stay as they are.

Nothing is believed that was not seen. The first training forward for each shape of call runs
block by block and records what passes between the blocks (see ``links``); from the second on,
segments are formed wherever that record allows it.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

from torch.nn import Module
from torch.utils import _pytree as pytree

from .backends import Checkpoint
from .links import Arguments, Handed, Link, argument_name, hand_out, plain_tree, read
from .report import UNITS, Condition, Effect, StackEffect, Strategy, Unit
from .schedule import Schedule

# What is known of a boundary between two blocks: how to cross it, or why a segment cannot.
Boundary = Link | str


class SegmentBroken(RuntimeError):
    """The model's loop used the state inside a segment that had been proven unbroken.

    Raised during forward, before any gradient exists. Calls of the same shape run block by
    block from then on, so the same step can simply be tried again.
    """


class StackRun:
    """One stack during one training forward: every covered block checkpointed alone."""

    strategy: Strategy = "per-block"

    def __init__(
        self,
        path: str,
        schedule: Schedule,
        blocks: Sequence[Module],
        checkpoint: Checkpoint,
        reason: str = "",
    ):
        self.path = path
        self.schedule = schedule
        self.blocks = blocks
        self.checkpoint = checkpoint
        self.reason = reason
        self.units: list[Unit] = []
        self.segment_of = {block: s for s in schedule.segments for block in s}

    def step(self, index: int, args: tuple, kwargs: dict, adjacent: bool) -> Any:
        """Answer the loop's call of block ``index``.

        ``adjacent``: the call before this one was for block ``index - 1`` of this stack.
        """
        return self.run_alone(index, args, kwargs)

    def run_alone(self, index: int, args: tuple, kwargs: dict) -> Any:
        """Run one block: under a checkpoint call if it is covered, plainly if not."""
        covered = index in self.segment_of
        self.units.append(Unit(range(index, index + 1), covered))
        block = self.blocks[index]
        return self.checkpoint(block, *args, **kwargs) if covered else block(*args, **kwargs)

    def between(self, what: str) -> None:
        """Something else than the next block of this stack was called."""

    def finish(self) -> None:
        """The model's forward is over."""

    def abandon(self) -> None:
        """The model's forward raised: let go of every tensor."""

    def effect(self) -> StackEffect:
        return StackEffect(self.path, self.strategy, self.reason, tuple(self.units))


class RecordingRun(StackRun):
    """Runs block by block and records what passes between the blocks.

    ``shape`` is the shape of call that the record will hold for.
    """

    def __init__(
        self,
        path: str,
        schedule: Schedule,
        blocks: Sequence[Module],
        checkpoint: Checkpoint,
        shape: tuple,
    ):
        super().__init__(path, schedule, blocks, checkpoint, "first forward of this shape of call")
        self.shape = shape
        self.boundaries: list[Boundary] = [
            f"block {k + 1} was not called right after block {k}"
            for k in range(len(self.blocks) - 1)
        ]
        self._reads: dict[int, str] = {}
        self._previous: Arguments | None = None
        self._handed: dict[int, list[weakref.ref | None]] = {}

    def step(self, index: int, args: tuple, kwargs: dict, adjacent: bool) -> Any:
        if adjacent and self._previous is not None:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            self.boundaries[index - 1] = self._compare(index, self._previous, leaves, spec)
        else:
            read((args, kwargs), f"argument of block {index}")
        args, kwargs = plain_tree((args, kwargs))
        result = self.run_alone(index, args, kwargs)
        if index + 1 == len(self.blocks):
            return result
        self._previous = Arguments(args, kwargs)
        handed = hand_out(result, lambda operation: self._note_read(index, operation))
        self._handed[index] = [
            weakref.ref(leaf) if isinstance(leaf, Handed) else None
            for leaf in pytree.tree_leaves(handed)
        ]
        return handed

    def _compare(
        self, index: int, before: Arguments, leaves: list[Any], spec: pytree.TreeSpec
    ) -> Boundary:
        """What leads from block ``index - 1`` to the arguments of block ``index``."""
        if spec != before.spec:
            read(leaves, f"argument of block {index}")
            return f"block {index} is called with other arguments than block {index - 1}"
        returned = self._handed[index - 1]
        carried = []
        differs = None
        for i, leaf in enumerate(leaves):
            source = next((j for j, ref in enumerate(returned) if ref and ref() is leaf), None)
            if source is not None:
                carried.append((i, source))
            elif isinstance(leaf, Handed) or not before.same(i, leaf):
                read(leaf, f"argument of block {index}")
                differs = differs or argument_name(self.blocks[index], spec, i)
        if differs:
            return f"block {index} does not get the same `{differs}` as block {index - 1}"
        if not carried:
            return f"block {index} takes nothing that block {index - 1} returned"
        return Link(tuple(carried))

    def _note_read(self, index: int, operation: str) -> None:
        self._reads.setdefault(index, f"the model uses the output of block {index} ({operation})")

    def finish(self) -> None:
        self._previous = None
        for index, references in self._handed.items():
            if any(reference is not None and reference() is not None for reference in references):
                self.boundaries[index] = f"the model keeps the output of block {index}"
        for index, reason in self._reads.items():
            self.boundaries[index] = reason

    def abandon(self) -> None:
        self._previous = None


@dataclass(slots=True)
class _OpenSegment:
    """A segment that has run and whose later blocks the loop has yet to ask for."""

    blocks: range
    arguments: Arguments
    result: Any
    handed: Any
    handed_leaves: list[Any]
    due: int


class SegmentedRun(StackRun):
    """Runs each segment when its first block is asked for.

    ``on_broken`` is told, before :class:`SegmentBroken` is raised, why segments are wrong.
    """

    strategy: Strategy = "segmented"

    def __init__(
        self,
        path: str,
        schedule: Schedule,
        blocks: Sequence[Module],
        checkpoint: Checkpoint,
        boundaries: Sequence[Boundary],
        on_broken: Callable[[str, str], None],
    ):
        uncrossed = {k: b for k, b in enumerate(boundaries) if isinstance(b, str)}
        cut = schedule.cut(frozenset(uncrossed))
        lost = [k for s in schedule.segments for k in s[:-1] if k in uncrossed]
        super().__init__(path, cut, blocks, checkpoint, uncrossed[lost[0]] if lost else "")
        if all(len(segment) == 1 for segment in cut.segments):
            self.strategy = "per-block"
        self.boundaries = boundaries
        self.on_broken = on_broken
        self._open: _OpenSegment | None = None
        self._aliases: list[tuple[int, weakref.ref]] = []

    def step(self, index: int, args: tuple, kwargs: dict, adjacent: bool) -> Any:
        if self._open is not None:
            return self._follow(self._open, index, args, kwargs)
        segment = self.segment_of.get(index)
        if segment is None or len(segment) == 1 or index != segment.start:
            return self.run_alone(index, args, kwargs)
        return self._lead(segment, args, kwargs)

    def _lead(self, segment: range, args: tuple, kwargs: dict) -> Any:
        arguments = Arguments(args, kwargs)
        blocks = self.blocks[segment.start : segment.stop]
        # The schedule was cut wherever a boundary is no link.
        links = cast("Sequence[Link]", self.boundaries[segment.start : segment.stop - 1])
        segment_call = partial(run_segment, blocks, links, arguments.spec)
        result = self.checkpoint(segment_call, *arguments.leaves)
        self.units.append(Unit(segment, True))
        handed = hand_out(
            result,
            lambda operation: self._break(
                f"the loop uses the state between its blocks ({operation})", segment
            ),
        )
        leaves = pytree.tree_leaves(handed)
        self._aliases += [
            (segment.start, weakref.ref(leaf)) for leaf in leaves if isinstance(leaf, Handed)
        ]
        self._open = _OpenSegment(segment, arguments, result, handed, leaves, segment.start + 1)
        return handed

    def _follow(self, open_: _OpenSegment, index: int, args: tuple, kwargs: dict) -> Any:
        if index != open_.due:
            self._break(f"block {index} was called where block {open_.due} was due")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != open_.arguments.spec:
            self._break(f"block {index} is called with other arguments than block {index - 1}")
        sources = dict(cast("Link", self.boundaries[index - 1]).carried)
        for i, leaf in enumerate(leaves):
            if i in sources:
                unchanged = leaf is open_.handed_leaves[sources[i]]
            else:
                unchanged = open_.arguments.same(i, leaf)
            if not unchanged:
                name = argument_name(self.blocks[index], spec, i)
                self._break(f"block {index} does not get the `{name}` that block {index - 1} left")
        open_.due += 1
        if open_.due < open_.blocks.stop:
            return open_.handed
        self._open = None
        return open_.result

    def _break(self, reason: str, segment: range | None = None) -> NoReturn:
        if segment is None:
            segment = self._open.blocks if self._open else range(0)
        self._open = None
        self.on_broken(self.path, reason)
        where = f"blocks {segment.start} to {segment.stop - 1} of `{self.path}`"
        raise SegmentBroken(
            f"{where} ran as one segment, but {reason}. The forward was stopped before any "
            "gradient was computed; calls like this one run block by block from now on, so "
            "repeat the step."
        )

    def between(self, what: str) -> None:
        if self._open is not None:
            self._break(f"{what} ran before block {self._open.due}")

    def finish(self) -> None:
        if self._open is not None:
            self._break(f"the forward ended without block {self._open.due}")
        for start, reference in self._aliases:
            if reference() is not None:
                self._break("the model keeps the state between its blocks", self.segment_of[start])

    def abandon(self) -> None:
        self._open = None


def run_segment(
    blocks: Sequence[Module], links: Sequence[Link], spec: pytree.TreeSpec, *leaves: Any
) -> Any:
    """Run ``blocks`` one after the other, feeding each from the one before it.

    ``leaves`` and ``spec`` are the flattened arguments of the first block; ``links[k]`` leads
    from ``blocks[k]`` to ``blocks[k + 1]``. Returns what the last block returned.
    """
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    result = blocks[0](*args, **kwargs)
    for block, link in zip(blocks[1:], links, strict=True):
        leaves = link.feed(leaves, result)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        result = block(*args, **kwargs)
    return result


class UnitsRun(StackRun):
    """Modules of no stack, in the order in which they are asked for during one forward.

    ``schedule`` covers the units that were counted beforehand; should there be more, they
    follow the rule of ``interval`` and ``stride``.
    """

    def __init__(self, schedule: Schedule, checkpoint: Checkpoint, interval: int, stride: int):
        super().__init__(UNITS, schedule, [], checkpoint, "units are handed over one by one")
        self.interval = interval
        self.stride = stride

    def run_unit(self, unit: Module, args: tuple, kwargs: dict) -> Any:
        index = len(self.units)
        covered = index in self.segment_of
        if index >= self.schedule.blocks:
            covered = index % self.stride < self.interval
        self.units.append(Unit(range(index, index + 1), covered))
        return self.checkpoint(unit, *args, **kwargs) if covered else unit(*args, **kwargs)


class Forward:
    """One training forward of a model: sends each block call to the run of its stack."""

    def __init__(
        self, runs: Iterable[StackRun], units: UnitsRun, conditions: Sequence[Condition] = ()
    ):
        self.runs = tuple(runs)
        self.units = units
        self.conditions = tuple(conditions)
        self._places: dict[int, tuple[StackRun, int]] = {}
        for run in self.runs:
            for index, block in enumerate(run.blocks):
                self._places[id(block)] = (run, index)
                # A loop over the original list of a model whose blocks were compiled.
                self._places[id(getattr(block, "_orig_mod", block))] = (run, index)
        self._last: tuple[StackRun, int] | None = None

    def step(self, block: Module, args: tuple, kwargs: dict) -> Any:
        """Answer the loop's call of ``block``; a block of no stack is a unit."""
        place = self._places.get(id(block))
        last, self._last = self._last, place
        if last is not None and (place is None or place[0] is not last[0]):
            last[0].between(f"a {type(block).__name__} of another stack")
        if place is None:
            read((args, kwargs), type(block).__name__)
            args, kwargs = plain_tree((args, kwargs))
            return self.units.run_unit(block, args, kwargs)
        run, index = place
        return run.step(index, args, kwargs, adjacent=last == (run, index - 1))

    def finish(self) -> None:
        for run in self.runs:
            run.finish()

    def abandon(self) -> None:
        for run in self.runs:
            run.abandon()

    def effect(self) -> Effect:
        runs = (*self.runs, self.units) if self.units.units else self.runs
        return Effect(tuple(run.effect() for run in runs), self.conditions)
