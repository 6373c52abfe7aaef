"""What the blocks of one forward cost, measured while it runs, every block of it recomputed.

Blocks that are built alike and called alike cost alike: one of each kind runs alone, in every way
(``costs.alone``), before the model's loop goes on. What lies between blocks is read off the graph.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..costs.alone import BlockCall, runs_of, values_in
from ..costs.between import Graph
from ..costs.build import build_of
from ..costs.cards import DEFAULT_CARD, card
from ..costs.ledger import tensors_in
from ..costs.records import NO_WORK, Run
from ..costs.step import BlockCosts, StepCosts, Way
from ..costs.step_time import time_for
from ..costs.treatments import COVERED, PLAIN
from ..messages.log import logger
from ..model.fsdp import are_sharded
from ..model.interception import original_call
from ..private.of_torch import memory_of, pytree
from ..recompute.undisturbed import undisturbed
from ..schedules.conditions import is_cache
from .recent import Recent
from .runs import StackRun, recomputable

# Kinds of call that are remembered; those that were not met for longest are forgotten.
MOST_KINDS = 256

# Bytes after the last block, for each one that the model returns: the loss, the difference that it
# is of, and their gradients. For each one that the head keeps there is its gradient.
OF_OUTPUT, OF_HEAD = 3, 2

Place = tuple[str, int]  # the path of a stack, and the number of a block in it
Runs = Mapping[str, Run]


@dataclass(frozen=True, slots=True)
class Learned:
    """A step of one shape: its costs, and which blocks these are, in execution order."""

    costs: StepCosts
    places: tuple[Place, ...]
    unmeasured: str = ""  # why blocks have no other way than to be recomputed


@dataclass(slots=True)
class _Called:
    """A block that was called. carried: bytes of what the block before it has handed to it."""

    place: Place
    runs: Runs
    carried: list[int]
    before: int
    trained: int


class KnownKinds:
    """The runs of blocks that are built and called alike."""

    def __init__(self) -> None:
        self._runs: Recent[Any, Runs] = Recent(MOST_KINDS)

    def of(
        self, run: StackRun, block: Module, args: tuple, kwargs: dict[str, Any], exact: bool
    ) -> Runs:
        """Those of a block that is about to be called. Raises what the block raises."""
        key = (build_of(block), _call_of(args, kwargs))
        known = self._runs.get(key)
        if known is None:
            known = _measured(run, block, args, kwargs, exact)
            self._runs.put(key, known)
        return known


class Learner:
    """Watches one forward of ``model``, which is called with ``arguments``."""

    def __init__(
        self,
        model: Module,
        arguments: Mapping[str, Any],
        kinds: KnownKinds,
        exact: bool,
        on_cpu: bool,
    ):
        self.model = model
        self.kinds = kinds
        self.exact = exact
        self.inputs_on_cpu = on_cpu
        self.unmeasured = ""
        there = [*model.parameters(), *model.buffers(), *tensors_in(dict(arguments))]
        self._graph = Graph(there)
        self._called: list[_Called] = []
        self._results: dict[int, int] = {}  # memory of what blocks returned, and its bytes
        self._count: Counter[Place] = Counter()
        self._in_blocks: set[int] = set()  # parameters
        # Of what wants a gradient and no block has made: its bytes, and how many blocks take it.
        self._shared: dict[int, tuple[int, int]] = {}

    def calls(self, run: StackRun, index: int, block: Module, args: tuple, kwargs: dict) -> None:
        """A block is about to be called by ``run``."""
        tensors = tensors_in((args, kwargs))
        before = self._graph.saved_before(tensors)
        carried = []
        wanting = {memory_of(tensor) for tensor in tensors if tensor.requires_grad}
        for memory, size in values_in(tensors).items():
            carried.append(self._results.get(memory, 0))
            if memory in wanting and memory not in self._results:
                self._shared[memory] = (size, self._shared.get(memory, (0, 0))[1] + 1)
            if memory not in self._graph.memory:
                self._graph.memory.add(memory)
                before += size
        self._results.clear()  # those of earlier blocks are in no further call new
        place = (run.stack.path, index if index >= 0 else len(run.spans))
        self._count[place] += 1
        trained = [weight for weight in block.parameters() if weight.requires_grad]
        fresh = [weight for weight in trained if id(weight) not in self._in_blocks]
        self._in_blocks.update(map(id, trained))
        self._called.append(
            _Called(
                place, self._runs(run, index, block, args, kwargs), carried, before, _bytes(fresh)
            )
        )

    def _runs(self, run: StackRun, index: int, block: Module, args: tuple, kwargs: dict) -> Runs:
        if any(map(is_cache, (*args, *kwargs.values()))):
            return {}
        if are_sharded([block]):
            self.unmeasured = "sharded blocks are not run alone, where other ranks would wait"
            return {}
        try:
            return self.kinds.of(run, block, args, kwargs, self.exact)
        except Exception as error:  # whatever a block does when it runs once more
            logger.debug("%s cannot run alone", type(block).__name__, exc_info=True)
            self.unmeasured = f"{type(block).__name__} cannot run alone: {type(error).__name__}"
            return {}

    def returned(self, result: Any) -> None:
        """The block has returned ``result``."""
        tensors = tensors_in(result)
        self._graph.made_by_block(tensors)
        self._results = values_in(tensors)
        self._graph.memory.update(self._results)

    def finish(self, output: Any) -> Learned:
        """The forward is over and has returned ``output``."""
        outputs = tensors_in(output)
        head = self._graph.saved_before(outputs)
        given = sum(values_in([t for t in outputs if t.requires_grad]).values())
        last = sum(self._results.values())
        others = [
            weight
            for weight in self.model.parameters()
            if weight.requires_grad and id(weight) not in self._in_blocks
        ]
        shared = sum(size for size, uses in self._shared.values() if uses > 1)
        waiting = self._graph.waiting_gradients()
        costs = StepCosts(
            tuple(map(self._costs, self._called, waiting)),
            head_peak=last + OF_HEAD * head + OF_OUTPUT * given,
            trained=_bytes(others) + shared,
        )
        return Learned(costs, tuple(called.place for called in self._called), self.unmeasured)

    def _costs(self, called: _Called, waiting: int) -> BlockCosts:
        taken = sum(called.carried)
        if COVERED not in called.runs or self._count[called.place] > 1:
            # Of a block that is called twice both calls run in one way.
            ways = [self._way(COVERED, called)] if called.runs else [Way(COVERED, taken, 0, 0, 0.0)]
        else:
            ways = [self._way(treatment, called) for treatment in called.runs]
        return BlockCosts(tuple(ways), called.before, called.trained, waiting)

    def _way(self, treatment: str, called: _Called) -> Way:
        run = called.runs[treatment]
        taken = sum(size for size, held in zip(called.carried, run.holds, strict=True) if held)
        back = 0
        if treatment != PLAIN and self.inputs_on_cpu:
            taken, back = 0, taken  # they come back for its backward
        return Way(
            treatment,
            kept=run.own + taken,
            forward_peak=run.forward_peak,
            backward_peak=run.backward_peak + back,
            seconds=max(0.0, _seconds(run) - _seconds(called.runs.get(PLAIN))),
        )


def _measured(
    run: StackRun, block: Module, args: tuple, kwargs: dict[str, Any], exact: bool
) -> Runs:
    wrappers = run.stack.wrappers
    call = BlockCall(
        block,
        original_call(block),
        lambda: recomputable(block, run.stack.blocks),
        args,
        kwargs,
    )
    states = run.stack.platform.random_states()
    with undisturbed([block], states), torch.compiler.set_stance("force_eager"):
        return runs_of(call, wrappers.alone, exact)


def _call_of(args: tuple, kwargs: dict[str, Any]) -> Any:
    """What two calls have in common that cost alike."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    told: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            told.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad))
        else:
            told.append(repr(leaf) if isinstance(leaf, (bool, int, str)) else type(leaf))
    return str(spec), tuple(told)


def _seconds(run: Run | None) -> float:
    """On a card like any other: only how ways compare matters."""
    if run is None:
        return 0.0
    return time_for(run.forward, run.backward, NO_WORK, 0, card(DEFAULT_CARD)).total


def _bytes(weights: Iterable[Tensor]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)


def interpolated(share: float, low: Learned, high: Learned) -> Learned | None:
    """A step whose sizes lie between those of two others; None where these are not alike."""
    if low.places != high.places:
        return None
    blocks = []
    for less, more in zip(low.costs.blocks, high.costs.blocks, strict=True):
        ways = {way.treatment: way for way in less.ways}
        if [way.treatment for way in more.ways] != list(ways):
            return None
        mixed = (_mixed(share, ways[way.treatment], way) for way in more.ways)
        blocks.append(
            replace(
                more,
                ways=tuple(mixed),
                before=_mean(share, less.before, more.before),
                waiting=_mean(share, less.waiting, more.waiting),
            )
        )
    head = _mean(share, low.costs.head_peak, high.costs.head_peak)
    return replace(high, costs=replace(high.costs, blocks=tuple(blocks), head_peak=head))


def _mixed(share: float, low: Way, high: Way) -> Way:
    return Way(
        high.treatment,
        _mean(share, low.kept, high.kept),
        _mean(share, low.forward_peak, high.forward_peak),
        _mean(share, low.backward_peak, high.backward_peak),
        low.seconds + share * (high.seconds - low.seconds),
    )


def _mean(share: float, low: int, high: int) -> int:
    return round(low + share * (high - low))
