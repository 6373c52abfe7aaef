"""The first training forward for a shape of call: block by block, everything between them seen.

What is recorded decides where segments may be formed (see ``links`` for what is looked at).
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..model.interception import original_call
from ..private.of_torch import pytree
from ..recompute.containers import containers, holding
from ..recompute.random_states import RandomStates
from ..recompute.undisturbed import undisturbed
from .block_state import attributes, changed_attribute, weights
from .call_shapes import CallShape
from .links import Arguments, Link, argument_name, is_opaque, place_of, signature_of
from .proof import Boundary, BoundStack, Proof
from .runs import StackRun
from .segmented import run_segment
from .streamed import MemoryWatch
from .surroundings import surroundings, within
from .watched import WatchedTensor, plain_arguments, report_use


@dataclass(slots=True)
class _Ran:
    """The block that ran last during a recording, and what it left behind."""

    index: int
    arguments: Arguments
    returned: list[weakref.ref[WatchedTensor] | None]
    surroundings: tuple
    random_states: RandomStates | None
    following: dict[str, Any]  # the attributes of the block after it
    weights: list[list[tuple[Any, ...]]]  # of the block, and of the one after it


class RecordingRun(StackRun):
    """Runs block by block and records what passes between the blocks.

    ``shape`` is the shape of call that the record will hold for, and ``hooks`` the boundaries at
    which hooks of others act. With ``replay``, segments are also run once on the recorded inputs
    and must give the recorded results: for models that nobody described, whose blocks may look at
    something else than their arguments.
    """

    def __init__(
        self,
        stack: BoundStack,
        shape: CallShape,
        replay: bool,
        hooks: Mapping[int, str],
        memory: MemoryWatch | None = None,
    ):
        super().__init__(stack, "first forward of this shape of call", memory)
        self.shape = shape
        self.drift = ""  # what was carried that the family file does not say
        self._replay = replay
        self._hooks = dict(hooks)
        self._inputs: dict[int, tuple[Arguments, tuple, RandomStates | None]] = {}
        self._results: dict[int, Any] = {}
        self._boundaries: dict[int, Boundary] = {}
        self._reads: dict[int, str] = {}
        self._looked = False
        self._signatures: dict[int, tuple] = {}
        self._watched: list[tuple[int, weakref.ref[WatchedTensor]]] = []
        self._last: _Ran | None = None

    def call_block(self, index: int, args: tuple, kwargs: dict) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if self._last is not None and index == self._last.index + 1:
            self._note(self._last.index, self._compare(self._last, leaves, spec))
        else:
            report_use((args, kwargs), f"argument of block {index}")
        with plain_arguments(args, kwargs) as (args, kwargs):
            return self._run(index, args, kwargs)

    def _run(self, index: int, args: tuple, kwargs: dict) -> Any:
        arguments = Arguments(args, kwargs)
        around = surroundings()
        if self._replay:
            self._inputs[index] = (
                arguments,
                around,
                self.stack.platform.random_states(),
            )
        result = self.run_alone(index, args, kwargs)
        if self._replay:
            self._results[index] = result
        self._signatures[index] = signature_of(result)
        watched = result
        if written := self._written(index, arguments, result):
            self._note(index - 1, written)
            self._note(index, written)
        elif index + 1 < len(self.stack.blocks):
            watched = self.stack.platform.hand_out(
                result, partial(self._note_read, index), self._note_look
            )
        returned = [
            weakref.ref(leaf) if isinstance(leaf, WatchedTensor) else None
            for leaf in pytree.tree_leaves(watched)
        ]
        self._watched += [(index, reference) for reference in returned if reference]
        if (kind := self.stack.platform.unwatchable(result)) and index + 1 < len(self.stack.blocks):
            self._note(index, f"block {index} returns a {kind}, which cannot be watched")
        pair = self.stack.blocks[index : index + 2]
        self._last = _Ran(
            index,
            arguments,
            returned,
            around,
            self.stack.platform.random_states(),
            following=attributes(pair[1]) if len(pair) > 1 else {},
            weights=[weights(block) for block in pair],
        )
        return watched

    def _written(self, index: int, arguments: Arguments, result: Any) -> str:
        """What block ``index`` did with a container that it was given; empty for nothing."""
        given = [contents.container for contents in arguments.contents]
        block = self.stack.blocks[index]
        if given and (key := arguments.written()) is not None:
            return f"block {index} writes to its `{argument_name(block, key)}`"
        returned = {id(container) for container in containers(result)}
        if any(id(container) in returned for container in given):
            return f"block {index} returns a container that it was given, which may be written to"
        return ""

    def _compare(self, last: _Ran, leaves: list[Any], spec: pytree.TreeSpec) -> Boundary:
        """What leads from the block that ran last to these arguments of the next one."""
        index = last.index + 1
        if spec != last.arguments.spec:
            report_use(leaves, f"argument of block {index}")
            return f"block {index} is called with other arguments than block {last.index}"
        carried = []
        anew = []
        differs = None
        for i, leaf in enumerate(leaves):
            sources = (j for j, ref in enumerate(last.returned) if ref and ref() is leaf)
            source = next(sources, None) if isinstance(leaf, WatchedTensor) else None
            if source is not None:
                carried.append((i, source))
            elif not isinstance(leaf, WatchedTensor) and last.arguments.same(i, leaf):
                pass
            elif last.arguments.may_equal(i, leaf) and torch.equal(last.arguments.leaves[i], leaf):
                anew.append((i, place_of(spec, leaves, i)))
            else:
                report_use(leaf, f"argument of block {index}")
                differs = differs or (i, leaf)
        block = self.stack.blocks[index]
        places = [place_of(spec, leaves, argument) for argument, _ in carried]
        if differs:
            name = argument_name(block, place_of(spec, leaves, differs[0])[0])
            if is_opaque(differs[1]):
                kind = type(differs[1]).__name__
                return f"the `{name}` of block {index}, of class {kind}, could be changed unseen"
            return f"block {index} does not get the same `{name}` as block {last.index}"
        if not carried:
            return f"block {index} takes nothing that block {last.index} returned"
        if surroundings() != last.surroundings:
            return f"grad mode or autocast changes before block {index}"
        changed = changed_attribute(last.following, attributes(self.stack.blocks[index]))
        if changed:
            return f"the attribute `{changed}` of block {index} is set before it runs"
        pair = self.stack.blocks[last.index : index + 1]
        if [weights(block) for block in pair] != last.weights:
            return f"weights are moved or written before block {index}"
        if self.stack.platform.random_states() != last.random_states:
            return f"random numbers are drawn before block {index}"
        names = [argument_name(block, key) for key, _ in places]
        link = Link(tuple(carried), tuple(places), tuple(names), tuple(anew))
        expected = self.stack.carried
        if expected and not link.by_name.items() <= expected.items():
            self.drift = self.drift or (
                f"{_named(link.by_name)} is carried to block {index}, where the family file "
                f"expects {_named(expected)}"
            )
        return link

    def _note(self, boundary: int, found: Boundary) -> None:
        """A loop may pass a boundary more than once; it is a link if it always was the same."""
        if not 0 <= boundary < len(self.stack.blocks) - 1:
            return
        known = self._boundaries.setdefault(boundary, found)
        if known != found and not isinstance(known, str):
            different = f"block {boundary + 1} is reached in different ways"
            self._boundaries[boundary] = found if isinstance(found, str) else different

    def _note_read(self, index: int, operation: str) -> None:
        self._reads.setdefault(index, f"the model uses the output of block {index} ({operation})")

    def _note_look(self) -> None:
        self._looked = True

    def between(self, what: str) -> None:
        self._last = None

    def finish(self) -> None:
        super().finish()
        for index, reference in self._watched:
            if reference() is not None:
                self._boundaries[index] = f"the model keeps the output of block {index}"
        self._boundaries |= self._reads
        for index in range(len(self.stack.blocks) - 1):
            own, following = self._signatures.get(index), self._signatures.get(index + 1)
            if self._looked and own != following:
                self._boundaries[index] = f"what block {index + 1} returns has another form"
        self._last = None

    def abandon(self) -> None:
        self._last = None
        self._inputs.clear()
        self._results.clear()

    def proof(self) -> Proof:
        """What the finished record allows."""
        known = self._boundaries | self._hooks
        boundaries = [
            known.get(k, f"block {k + 1} was not called right after block {k}")
            for k in range(len(self.stack.blocks) - 1)
        ]
        proof = Proof.of(self.stack.schedule, boundaries)
        for segment in proof.schedule.segments if self._replay else ():
            if len(segment) > 1 and (problem := self._try_out(segment, proof)):
                for k in segment[:-1]:
                    boundaries[k] = f"run together, blocks {segment[0]} to {segment[-1]} {problem}"
        self.abandon()
        return Proof.of(self.stack.schedule, boundaries)

    def _try_out(self, segment: range, proof: Proof) -> str:
        """What is wrong when ``segment`` runs from its recorded inputs; empty when nothing is."""
        arguments, around, states = self._inputs[segment[0]]
        blocks = self.stack.blocks[segment.start : segment.stop]
        links = proof.links(segment)
        try:
            with undisturbed(blocks, self.stack.platform.random_states()):
                if states is not None:
                    states.put_back()
                with within(around), holding(arguments.contents):
                    calls = [original_call(block) for block in blocks]
                    result = run_segment(calls, links, *arguments.args, **arguments.kwargs)
        except Exception as error:  # whatever a block does when it runs once more
            return f"raise {type(error).__name__}"
        leaves, recorded = map(pytree.tree_leaves, (result, self._results[segment[-1]]))
        same = len(leaves) == len(recorded) and all(
            torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b
            for a, b in zip(leaves, recorded, strict=True)
        )
        return "" if same else "give other values"


def _named(carried: Mapping[str, int]) -> str:
    return ", ".join(f"`{name}` (from {source})" for name, source in sorted(carried.items()))
