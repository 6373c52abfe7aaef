"""Watch one training step of a model: how its blocks are called, and what lies in between."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from ...costs.ledger import Ledger, rounded, tensors_in
from ...costs.records import Work
from ...messages.errors import WorkloadError
from ...private.of_torch import pytree
from ..workload import build as building
from ..workload.workload import Workload
from . import fake_tensors as fakes
from .cuda import CudaSemantics
from .lone_block import Hole


@dataclass(frozen=True)
class PlacedBlock:
    """A block in its stack, as the whole model has it."""

    stack: str
    index: int
    module: nn.Module


@dataclass
class Call:
    """How a block was called: its arguments, and the numbers of the values in and out."""

    place: PlacedBlock
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


class Recorder:
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

    def watch(self, place: PlacedBlock) -> list[Any]:
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


def record_step(model: Any, places: Sequence[PlacedBlock], work: Workload) -> Recorder:
    """One step of ``model`` without checkpointing."""
    recorder = Recorder()
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
