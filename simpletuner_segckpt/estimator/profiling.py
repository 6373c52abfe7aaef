"""Measure a model that has no memory: one step of it, and each kind of its blocks alone.

The step is run without checkpointing on the model with most of its blocks taken out, since blocks
that are alike cost alike. It shows which values the blocks hand on, and what lies between and
around them. Then a block of each kind runs alone in every way that the keys know.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from ..errors import WorkloadError
from ..family import Family
from ..report import UNITS
from ..stacks import blocks_of, stacks_of, units_of
from . import building, composing, fakes, treatments
from .alone import Hole, run_alone
from .cuda import CudaSemantics
from .ledger import Ledger, rounded, tensors_in
from .records import Block, Glue, Kind, Profile, Work
from .values import KnownValues
from .workload import Workload, training_of


@dataclass(frozen=True)
class Place:
    """A block in its stack, as the whole model has it."""

    stack: str
    index: int
    module: nn.Module


@dataclass
class Call:
    """How a block was called: its arguments, and the numbers of the values in and out."""

    place: Place
    arguments: Any
    takes: tuple[int, ...]
    gives: tuple[int, ...] = ()
    gives_gradient: tuple[int, ...] = ()


@dataclass(frozen=True)
class Event:
    """A point of the step: the level of the ledger there, and what happened since the last one."""

    level: int
    peak: int
    work: Work


def profile(work: Workload) -> Profile:
    """Measure a workload: seconds, and no memory to speak of. Raises ``WorkloadError``."""
    experts = training_of(work.family).experts
    with fakes.without_memory(), KnownValues(experts), fakes.explained(work.family.title):
        model = building.build(work)
        whole = places_of(model, work.family)
        few = thinned(whole, work.family)
        _put(model, few)
        try:
            recorder = _recorded(model, few, work)
            thin = _one_after_another(recorder.calls)
        except Exception:
            if len(few) == len(whole):
                raise
            thin = False  # a loop that counts on all of its blocks being there
        if not thin and len(few) < len(whole):
            few = whole
            _put(model, whole)
            recorder = _recorded(model, whole, work)
        small = _measured(recorder, work)
        _put(model, whole)
        found = _extended(small, recorder.calls, whole) if len(few) < len(whole) else small
        counts = dict(Counter(place.stack for place in whole))
        return with_weights(replace(found, counts=counts), model, work)


def places_of(model: nn.Module, family: Family) -> list[Place]:
    """The blocks that a schedule is about: those of stacks, then units, each in its order."""
    stacks = stacks_of(model, family.stacks)
    places = [
        Place(path, index, block)
        for path in stacks
        for index, block in enumerate(blocks_of(model, path))
    ]
    units = units_of(model, family.units, stacks)
    return places + [Place(UNITS, i, model.get_submodule(u)) for i, u in enumerate(units)]


def thinned(places: Sequence[Place], family: Family) -> list[Place]:
    """Of every stack the first two blocks of each build, and the last block.

    All units, and all of a stack in which the loop does something between certain blocks.
    """
    whole = {UNITS, *(p.stack for p in places if getattr(family.stack_at(p.stack), "cut", ""))}
    seen: Counter[Any] = Counter()
    last = {place.stack: place.index for place in places}
    kept = []
    for place in places:
        build = place.stack, build_of(place.module)
        seen[build] += 1
        if seen[build] <= 2 or place.index == last[place.stack] or place.stack in whole:
            kept.append(place)
    return kept


def build_of(block: nn.Module) -> Any:
    """What two blocks have in common that are built alike: weights, and settings of modules."""
    weights = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters()
    )
    settings = tuple(
        (path, key, value)
        for path, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float)) and not key.endswith(("idx", "index", "layer_id"))
    )
    return type(block), weights, settings


def _put(model: nn.Module, places: Sequence[Place]) -> None:
    """Have the stacks of ``model`` hold these blocks."""
    stacks: dict[str, list[nn.Module]] = {}
    for place in places:
        if place.stack != UNITS:
            stacks.setdefault(place.stack, []).append(place.module)
    for path, blocks in stacks.items():
        held: Any = model.get_submodule(path)
        held._modules.clear()
        held.extend(blocks)


def _one_after_another(calls: Sequence[Call]) -> bool:
    """Whether each stack runs in order and on its own."""
    runs = [(call.place.stack, call.place.index) for call in calls]
    stacks = list(dict.fromkeys(stack for stack, _ in runs))
    return runs == sorted(set(runs), key=lambda run: (stacks.index(run[0]), run[1]))


class _Recorder:
    """Watches one step: how the blocks are called, and the ledger in between."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.calls: list[Call] = []
        self.sizes: dict[int, int] = {}
        self.entered: list[Event] = []
        self.left: list[Event] = []
        self.head: Event | None = None
        self.alive: frozenset[int] = frozenset()  # values, when the forward is over
        self.into: dict[int, Event] = {}  # block -> where its backward begins
        self.out_of: dict[int, Event] = {}  # block -> where it ends
        self.end: Event | None = None
        self._numbers: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self._count = 0
        self.made: set[int] = set()  # by blocks
        self.between: set[int] = set()  # blocks that take what was made since the one before
        self._open: list[int] = []

    def event(self) -> Event:
        found = Event(self.ledger.level, self.ledger.peak, self.ledger.work)
        self.ledger.mark()
        return found

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the value that ``tensor`` is, or is part of."""
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = self._count
            self.sizes[self._count] = rounded(storage.nbytes())
            self._count += 1
        return self._numbers[storage]

    def numbers(self) -> frozenset[int]:
        """The values that are alive."""
        return frozenset(self._numbers.values())

    def watch(self, place: Place) -> list[Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            values: dict[int, int] = {}
            at = len(self.calls)
            self._open.append(at)

            def hole(leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                if not leaf.is_floating_point() and not leaf.is_complex():
                    return Hole((), (), leaf.dtype, False, None, leaf)
                number = self.number(leaf)
                if leaf.requires_grad and number not in self.made:
                    self.made.add(number)
                    self.between.add(at)
                    leaf.register_hook(lambda gradient: self._passed(self.out_of, at))
                value = values.setdefault(number, len(values))
                shape, stride = tuple(leaf.shape), tuple(leaf.stride())
                return Hole(shape, stride, leaf.dtype, leaf.requires_grad, value)

            arguments = pytree.tree_map(hole, (args, kwargs))
            self.calls.append(Call(place, arguments, tuple(values)))
            self.entered.append(self.event())

        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            at = self._open.pop()
            tensors = tensors_in(result)
            self.calls[at].gives = tuple(self.number(t) for t in tensors)
            self.made |= set(self.calls[at].gives)
            self.calls[at].gives_gradient = tuple(
                rounded(t.numel() * t.element_size()) * t.requires_grad for t in tensors
            )
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._passed(self.into, at))
            self.left.append(self.event())

        return [
            place.module.register_forward_pre_hook(enter, with_kwargs=True),
            place.module.register_forward_hook(leave, with_kwargs=True),
        ]

    def _passed(self, events: dict[int, Event], at: int) -> None:
        """A gradient is complete; the last one of a block is where its backward begins, or ends."""
        event = self.event()
        before = events.get(at)
        if before:
            event = Event(event.level, max(before.peak, event.peak), before.work + event.work)
        events[at] = event


def _recorded(model: Any, places: Sequence[Place], work: Workload) -> _Recorder:
    """One step of ``model`` without checkpointing."""
    recorder = _Recorder()
    inputs = building.inputs(work)
    cuda = CudaSemantics.of(work)
    with ExitStack() as hooks, recorder.ledger, cuda:
        for place in places:
            for handle in recorder.watch(place):
                hooks.callback(handle.remove)
        loss = loss_of(model(**inputs))
        del inputs
        cuda.forget()
        recorder.head = recorder.event()
        recorder.alive = recorder.numbers()
        fakes.backward([loss])
        recorder.end = recorder.event()
    for parameter in model.parameters():
        parameter.grad = None
    return recorder


def loss_of(output: Any) -> torch.Tensor:
    """A trainer's loss: the mean square of what is left of the target."""
    tensors = [t for t in tensors_in(output) if t.requires_grad]
    if not tensors:
        raise WorkloadError("nothing of the model is trained: its output needs no gradient")
    losses = [functional.mse_loss(t.float(), torch.zeros_like(t).float()) for t in tensors]
    return torch.stack(losses).sum()


def _measured(recorder: _Recorder, work: Workload) -> Profile:
    """The profile of the model that the recorder watched."""
    kinds: list[Kind] = []
    known: dict[Any, int] = {}
    blocks = []
    cuda = CudaSemantics.of(work)
    for call in recorder.calls:
        leaves, spec = pytree.tree_flatten(call.arguments)
        called = [replace(x, itself=None) if isinstance(x, Hole) else repr(x) for x in leaves]
        key = build_of(call.place.module), str(spec), tuple(called), call.place.stack
        if key not in known:
            known[key] = len(kinds)
            kinds.append(_kind(call, recorder.sizes, work, cuda))
        place = call.place
        blocks.append(Block(place.stack, place.index, known[key], call.takes, call.gives))
    bare = tuple(Glue() for _ in range(len(blocks) + 1))
    held = {
        value
        for block in blocks
        for value, held in (
            *zip(block.takes, kinds[block.kind].run(treatments.PLAIN).holds, strict=True),
            *zip(block.gives, kinds[block.kind].run(treatments.PLAIN).results, strict=True),
        )
        if held
    }
    between = recorder.alive - held
    found = Profile(
        tuple(kinds), {}, tuple(blocks), bare, weights=0, trained=0, states=0, between=between
    )
    return replace(found, glue=_glue(found, recorder))


def _kind(call: Call, sizes: dict[int, int], work: Workload, cuda: CudaSemantics) -> Kind:
    stack = work.family.stack_at(call.place.stack)
    block = call.place.module
    holes = [x for x in pytree.tree_leaves(call.arguments) if isinstance(x, Hole)]
    has_ffn = stack is not None and stack.feed_forward
    has_projections = stack is not None and stack.projections
    has_attention = stack is not None and stack.attention
    runs = {}
    for treatment in treatments.ALL:
        if treatment.startswith(treatments.FFN) and not has_ffn:
            continue
        if treatment.endswith("+ffn") and not has_projections:
            continue
        if treatment.endswith(treatments.OFFLOAD) and not has_attention:
            continue
        runs[treatment] = run_alone(block, call.arguments, stack, treatment, cuda, work.accumulates)
    return Kind(
        takes=tuple(sizes[value] for value in call.takes),
        takes_gradient=tuple(
            any(hole.gradient for hole in holes if hole.value == position)
            for position in range(len(call.takes))
        ),
        gives=tuple(sizes[value] for value in call.gives),
        gives_gradient=call.gives_gradient,
        trained=trained_bytes([block]),
        runs=runs,
    )


def _glue(found: Profile, recorder: _Recorder) -> tuple[Glue, ...]:
    """What the step had beside its blocks: the difference to what the blocks add up to."""
    assert recorder.head is not None
    assert recorder.end is not None
    levels, _ = composing.levels(found)
    glue: list[Glue] = []
    extra = 0
    count = len(found.blocks)
    for at in range(count + 1):
        event = recorder.entered[at] if at < count else recorder.head
        kept = event.level - levels[at] - extra
        extra += kept
        begin = recorder.left[at - 1].level if at else 0
        above = recorder.head if at == count else recorder.out_of.get(at)
        below = recorder.into.get(at - 1) if at else recorder.end
        if above is None or below is None or (at < count and at not in recorder.between):
            above = below = Event(0, 0, Work())
        glue.append(
            Glue(
                kept=kept,
                forward_peak=event.peak - begin,
                backward_peak=max(0, below.peak - above.level),
                forward=event.work,
                backward=below.work,
            )
        )
    for at, freed in enumerate(_freed(replace(found, glue=tuple(glue)), recorder)):
        glue[at] = replace(glue[at], freed=freed)
    return tuple(glue)


def _freed(found: Profile, recorder: _Recorder) -> list[int]:
    """By how much the backward of the glue lowers the level, from the levels between blocks.

    Where no gradient comes by, all that is left goes at the end.
    """
    _, begun = composing.levels(found)
    left = sum(part.kept for part in found.glue)
    freed = [0] * len(found.glue)
    gradients = shared = done = 0
    of_all = composing.shared_gradients(found)
    for at in reversed(range(len(found.blocks))):
        event = recorder.into.get(at)
        if event is not None:
            there = event.level - composing.gradient_of(found, at) - gradients - shared
            freed[at + 1] = begun[at] - done - there
            done += freed[at + 1]
            gradients += found.kinds[found.blocks[at].kind].trained
            shared = of_all
    freed[0] = left - done
    return freed


def _extended(small: Profile, calls: Sequence[Call], whole: Sequence[Place]) -> Profile:
    """The profile of the whole model from that of a few of its blocks."""
    at_of = {id(call.place.module): at for at, call in enumerate(calls)}
    stacks = list(dict.fromkeys(call.place.stack for call in calls))
    ran = [place for place in whole if place.stack in stacks]
    order = sorted(ran, key=lambda place: (stacks.index(place.stack), place.index))
    uses = Counter(value for call in calls for value in set(call.takes))
    alike: dict[Any, int] = {}
    for at, call in enumerate(calls):  # the second of its build stands for those left out
        build = call.place.stack, build_of(call.place.module)
        if build not in alike or calls[alike[build]].place.index == 0:
            alike[build] = at
    fresh = 1 + max(v for call in calls for v in (*call.takes, *call.gives))
    current: dict[int, int] = {}
    blocks: list[Block] = []
    glue: list[Glue] = []
    between: set[int] = set()
    for place in order:
        at = at_of.get(id(place.module), -1)
        own = at >= 0
        if not own:
            at = alike[place.stack, build_of(place.module)]
        call = calls[at]
        before = calls[at - 1] if at else None
        takes = []
        for value in call.takes:
            if before and value in before.gives and blocks:
                gives = blocks[-1].gives
                takes.append(gives[min(before.gives.index(value), len(gives) - 1)])
            elif value in current:
                takes.append(current[value])
            elif own or uses[value] > 1:
                takes.append(value)
            else:
                takes.append(fresh)
                fresh += 1
        gives_: list[int] = []
        for at_, value in enumerate(call.gives):
            if value in call.takes:
                gives_.append(takes[call.takes.index(value)])
            elif value in call.gives[:at_]:  # two views of one tensor
                gives_.append(gives_[call.gives.index(value)])
            else:
                gives_.append(fresh)
                fresh += 1
            current[value] = gives_[-1]
        originals = (*call.takes, *call.gives)
        new = (*takes, *gives_)
        between |= {n for o, n in zip(originals, new, strict=True) if o in small.between}
        blocks.append(
            Block(place.stack, place.index, small.blocks[at].kind, tuple(takes), tuple(gives_))
        )
        glue.append(small.glue[at])
    return replace(
        small,
        blocks=tuple(blocks),
        glue=(*glue, small.glue[-1]),
        between=frozenset(between),
    )


def with_weights(found: Profile, model: nn.Module, work: Workload) -> Profile:
    """``found`` with what is in memory during the whole step of ``model``."""
    weights = linear = 0
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owner = model.get_submodule(path.rpartition(".")[0])
        frozen_linear = not tensor.requires_grad and isinstance(owner, nn.Linear)
        size = rounded(tensor.numel() * tensor.element_size())
        if frozen_linear and work.weights_on_cpu:
            continue
        if frozen_linear and tensor.dim() == 2:
            linear += size
            size = int(size * min(1, work.base_bytes / tensor.element_size()))
        weights += size
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trained = trained_bytes([model])
    return replace(
        found,
        weights=weights + (trained if work.ema else 0),
        linear=linear,
        trained=trained,
        states=int(numbers * work.optimizer_bytes),
        stepping=trained * work.stepping,
        accumulates=work.accumulates,
    )


def trained_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of the gradients of all parameters that are trained."""
    return sum(
        rounded(p.numel() * p.element_size())
        for module in modules
        for p in module.parameters()
        if p.requires_grad
    )
