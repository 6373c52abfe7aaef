"""One stack during one training forward, segment by segment.

Asked for the first block of a segment (the *leader*), a run calls the whole segment under one
checkpoint call and returns its result. Asked for the blocks after it (the *followers*), it runs
nothing, checks that nothing happened in between, and hands the same result on. The loop, its index
and the hooks of the blocks stay as they are.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..messages.errors import SegmentBroken
from ..model.interception import original_call
from ..private.of_torch import pytree
from ..recompute.containers import containers
from ..recompute.state import StatefulRecompute
from .block_state import attributes, changed_attribute, first_matrix
from .links import Arguments, Link, Snapshot, argument_name, place_of
from .proof import BoundStack, Proof
from .runs import StackRun
from .surroundings import surroundings
from .watched import WatchedTensor


@dataclass(slots=True)
class _OpenSegment:
    """A segment that has run and whose later blocks the loop has yet to ask for."""

    blocks: range
    arguments: Arguments
    result: Any
    watched: Any
    watched_leaves: list[Any]
    surroundings: tuple
    attributes: dict[int, dict[str, Any]]
    weights: dict[int, tuple[Any, ...]]
    due: int
    containers: list[int] | None  # those of its arguments, by identity, if blocks wrote to them


class SegmentedRun(StackRun):
    """Runs each segment when its first block is asked for.

    ``on_broken`` is told, before :class:`SegmentBroken` is raised, why segments are wrong.
    """

    def __init__(self, stack: BoundStack, proof: Proof, on_broken: Callable[[str], None]):
        super().__init__(stack, proof.reason)
        if any(len(segment) > 1 for segment in stack.schedule.segments):
            self.strategy = "segmented"
        self.proof = proof
        self.on_broken = on_broken
        self._open: _OpenSegment | None = None
        self._written = False  # whether blocks wrote to a container that they were given
        self._aliases: list[tuple[range, weakref.ref[WatchedTensor]]] = []
        # Arguments that the loop made anew, and whether they differ: nobody waits for that in here.
        self._made_anew: list[tuple[range, str, Tensor]] = []
        self._before: tuple[int, Snapshot] | None = None  # those of the block that ran last

    def call_block(self, index: int, args: tuple, kwargs: dict) -> Any:
        if self._open is not None:
            return self._follow(self._open, index, args, kwargs)
        args, kwargs = self._share(index, args, kwargs)
        segment = self.segment_of.get(index)
        if segment is None or len(segment) == 1 or index != segment.start:
            return self.run_alone(index, args, kwargs)
        return self._lead(segment, args, kwargs)

    def _share(self, index: int, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of a block, with those tensors of the block before that the loop made anew.

        So all blocks hold one for backward, whatever segments they are in.
        """
        boundaries = self.proof.boundaries
        last = self.segment_of.get(index, range(index, index + 1)).stop - 1
        links = [boundaries[k] for k in (index - 1, last) if 0 <= k < len(boundaries)]
        if not any(isinstance(link, Link) and link.anew for link in links):
            self._before = None
            return args, kwargs
        leaves, spec = pytree.tree_flatten((args, kwargs))
        link = boundaries[index - 1] if index else None
        if self._before is not None and self._before[0] == index - 1 and isinstance(link, Link):
            before = self._before[1]
            given = [leaves[i] for i, _ in link.anew]
            if all(map(before.may_equal, range(len(given)), given)):
                for (i, _), mine, other in zip(link.anew, before.leaves, given, strict=True):
                    self._check_later(index - 1, index, spec, leaves, i, (mine != other).any())
                args, kwargs = link.share(args, kwargs, before.leaves)
                leaves = pytree.tree_leaves((args, kwargs))
        following = boundaries[last] if last < len(boundaries) else None
        anew = following.anew if isinstance(following, Link) else ()
        self._before = (last, Snapshot([leaves[i] for i, _ in anew])) if anew else None
        return args, kwargs

    def _check_later(
        self, first: int, index: int, spec: Any, leaves: list[Any], leaf: int, unequal: Tensor
    ) -> None:
        name = argument_name(self.stack.blocks[index], place_of(spec, leaves, leaf)[0])
        said = f"`{name}` of block {index}"
        self._made_anew.append((range(first, index + 1), said, unequal))

    def _lead(self, segment: range, args: tuple, kwargs: dict) -> Any:
        arguments = Arguments(args, kwargs)
        around = surroundings()
        blocks = self.stack.blocks[segment.start : segment.stop]
        calls = [original_call(block) for block in blocks]
        links = self.proof.links(segment)
        function = partial(run_segment, calls, links)
        segment_call = StatefulRecompute(blocks, function, self.stack.blocks, self.place(segment))
        result = self.run(segment, True, segment_call, args, kwargs)
        containers_given = None
        if (key := arguments.written()) is not None:
            # Right as long as the loop goes on to pass these very containers.
            if not self._written:
                name = argument_name(blocks[0], key)
                self.on_broken(f"{_named(segment)} write to their `{name}`")
            self._written = True
            arguments = Arguments(args, kwargs)
            containers_given = _identities(args, kwargs)
        watched = self.stack.platform.hand_out(result, partial(self._break_at_read, segment))
        leaves = pytree.tree_leaves(watched)
        self._aliases += [(segment, weakref.ref(t)) for t in leaves if isinstance(t, WatchedTensor)]
        kept = {index: attributes(self.stack.blocks[index]) for index in segment[1:]}
        held = {index: first_matrix(self.stack.blocks[index]) for index in segment}
        self._open = _OpenSegment(
            segment,
            arguments,
            result,
            watched,
            leaves,
            around,
            attributes=kept,
            weights=held,
            due=segment.start + 1,
            containers=containers_given,
        )
        return watched

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
                unchanged = leaf is open_.watched_leaves[sources[i]]
            else:
                unchanged = open_.arguments.same(i, leaf)
            if not unchanged:
                if i not in sources and open_.arguments.may_equal(i, leaf):
                    unequal = (open_.arguments.leaves[i] != leaf).any()
                    self._check_later(segment.start, index, spec, leaves, i, unequal)
                    continue
                name = argument_name(self.stack.blocks[index], place_of(spec, leaves, i)[0])
                self._break(
                    segment, f"block {index} does not get the `{name}` that was left for it"
                )
        if open_.containers is not None and open_.containers != _identities(args, kwargs):
            self._break(segment, f"block {index} does not get what the blocks before it wrote to")
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
            return open_.watched
        self._open = None
        return open_.result

    def _break_at_read(self, segment: range, operation: str) -> NoReturn:
        self._break(segment, f"the loop uses the state between its blocks ({operation})")

    def _break(self, segment: range, reason: str) -> NoReturn:
        self._open = None
        self.on_broken(reason)
        where = f"{_named(segment)} of `{self.stack.path}`"
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
        self._before = None
        made_anew, self._made_anew = self._made_anew, []
        if made_anew and bool(torch.stack([unequal.cpu() for *_, unequal in made_anew]).any()):
            segment, name = next((s, name) for s, name, unequal in made_anew if unequal)
            self._break(segment, f"the {name} has other values than that of the block before")
        for segment, reference in self._aliases:
            if reference() is not None:
                self._break(segment, "the model keeps the state between its blocks")

    def abandon(self) -> None:
        self._open = self._before = None
        self._made_anew.clear()


def _named(segment: range) -> str:
    return f"blocks {segment.start} to {segment.stop - 1}"


def _identities(args: tuple, kwargs: dict[str, Any]) -> list[int]:
    return list(map(id, containers(*args, *kwargs.values())))


def run_segment(
    calls: Sequence[Callable[..., Any]], links: Sequence[Link], /, *args: Any, **kwargs: Any
) -> Any:
    """Call the blocks of a segment one after the other, feeding each from the one before it.

    ``args`` and ``kwargs`` are the arguments of the first block; ``links[k]`` leads from
    ``calls[k]`` to ``calls[k + 1]``. Returns what the last block returned.
    """
    result = calls[0](*args, **kwargs)
    for call, link in zip(calls[1:], links, strict=True):
        args, kwargs = link.feed(args, kwargs, result)
        result = call(*args, **kwargs)
    return result
