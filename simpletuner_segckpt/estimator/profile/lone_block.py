"""Run one block by itself, forward and backward, in one of the ways that the keys know."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from ...config_schema import CheckpointingConfig
from ...costs.ledger import Ledger, tensors_in
from ...costs.records import Run
from ...costs.treatments import COVERED, FFN, INPUTS, OFFLOAD
from ...families.schema import Stack
from ...model.interception import release
from ...offload.saved_tensors import MOST_LEAVING, SMALLEST, Offload
from ...private.of_torch import base_of, pytree
from ...recompute.backend import Backend, Recompute, plainly, with_submodules
from ...recompute.submodules import (
    CallWrapper,
    SubmoduleHook,
    SubmoduleKind,
    intercept_submodules,
    submodules_of,
)
from . import fake_tensors as fakes
from .cuda import CudaSemantics


@dataclass(frozen=True)
class Hole:
    """A tensor that a block was called with, without the tensor.

    value: position of its storage among the values that the block takes, or None for a tensor
    that is passed on as it is (``itself``: integers and masks, whose contents may matter).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    value: int | None
    itself: torch.Tensor | None = None

    def filled(self) -> torch.Tensor:
        """A new tensor like it. Its gradient goes nowhere, and so does not stay in memory."""
        if self.itself is not None:
            return self.itself
        if not self.gradient:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        start = torch.empty((), requires_grad=True)
        return _Entrance.apply(start, self.shape, self.stride, self.dtype)


class _Entrance(torch.autograd.Function):
    """Makes a tensor that wants a gradient, which it drops."""

    @staticmethod
    def forward(ctx: Any, start: Any, shape: Any, stride: Any, dtype: Any) -> Any:
        return torch.empty_strided(shape, stride, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None, None, None, None


class _Exit(torch.autograd.Function):
    """A scalar of some tensors, which keeps none of them and makes gradients of their shape."""

    @staticmethod
    def forward(ctx: Any, *results: Any) -> Any:
        ctx.shapes = [(result.shape, result.dtype) for result in results]
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return tuple(
            torch.empty(shape, dtype=dtype) if wanted else None
            for (shape, dtype), wanted in zip(ctx.shapes, ctx.needs_input_grad, strict=True)
        )


def run_alone(
    block: nn.Module,
    arguments: Any,
    stack: Stack | None,
    treatment: str,
    cuda: CudaSemantics,
    accumulates: bool = False,
) -> Run:
    """Run ``block`` with ``arguments``, a tree of ``Hole`` and whatever is not a tensor.

    accumulates: whether gradients are added to those that are there from a step before.
    """
    for parameter in block.parameters():
        there = accumulates and parameter.requires_grad
        parameter.grad = torch.empty_like(parameter) if there else None
    ledger = Ledger()
    holes = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Hole)]
    count = 1 + max((hole.value for hole in holes if hole.value is not None), default=-1)
    away = _Away()
    again = _Again(ledger)
    with ledger, cuda, _in_parts(block, stack, treatment), torch.enable_grad():
        filled = [hole.filled() for hole in holes]
        args, kwargs = _filled(arguments, filled)
        values = [_ref(tensor) for tensor in filled]
        before = ledger.level
        ledger.mark()
        result = _runner(treatment, away, again)(block, *args, **kwargs)
        forward_peak, forward = ledger.peak - before, ledger.work
        results = tensors_in(result)
        given = [_ref(tensor) for tensor in results]
        differentiable = [t for t in results if t.requires_grad]
        scalar = _Exit.apply(*differentiable) if differentiable else None
        away.finish()
        del args, kwargs, filled, result, results, differentiable
        cuda.forget()
        holds = [False] * count
        for hole, value in zip(holes, values, strict=True):
            if hole.value is not None and value() is not None:
                holds[hole.value] = True
        kept = ledger.level
        for storage in {s for s in (v() for v in (*values, *given)) if s is not None}:
            kept -= ledger.size_of(storage)
        held_results = tuple(storage() is not None for storage in given)
        start = ledger.level
        ledger.mark()
        if scalar is not None:
            fakes.backward([scalar])
        cuda.forget()
        run = Run(
            own=kept,
            holds=tuple(holds),
            results=held_results,
            forward_peak=forward_peak,
            recompute_peak=max(0, again.peak - start),
            backward_peak=ledger.peak - start,
            forward=forward,
            backward=ledger.work,
            moved=away.moved,
        )
    for parameter in block.parameters():
        parameter.grad = None
    return run


def _filled(arguments: Any, tensors: list[torch.Tensor]) -> Any:
    """``arguments`` with a tensor in the place of every hole."""
    remaining = iter(tensors)
    return pytree.tree_map(
        lambda leaf: next(remaining) if isinstance(leaf, Hole) else leaf, arguments
    )


def _ref(tensor: torch.Tensor) -> "ref[torch.UntypedStorage]":
    return ref(tensor.untyped_storage())


class _Again(nullcontext[None]):
    """Around a recompute: what of the peak belongs to it."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger
        self.peak = 0

    def __exit__(self, *error: Any) -> None:
        self.peak = max(self.peak, self.ledger.restart_peak())


def _runner(treatment: str, away: "_Away", again: _Again) -> CallWrapper:
    """What calls the block: the wrappers of the plugin itself."""
    name, *kept = treatment.removesuffix(OFFLOAD).removesuffix(INPUTS).split("+")
    parts: dict[SubmoduleKind, CallWrapper] = {}
    if treatment.endswith(OFFLOAD):
        parts["attention"] = partial(away.run, "attention")
    run = plainly
    if name == COVERED:
        contexts = (lambda: (nullcontext(), again),)
        run = Backend(CheckpointingConfig(), None).begin(contexts).whole(tuple(kept))
    elif name == FFN:
        parts["feed_forward"] = Recompute(offload=away if INPUTS in treatment else None)
    return partial(with_submodules, parts, run) if parts else run


@contextmanager
def _in_parts(block: nn.Module, stack: Stack | None, treatment: str) -> Iterator[None]:
    """Lead the calls of the parts that a treatment means through ``parts``."""
    paths: dict[SubmoduleKind, tuple[str, ...]] = {}
    if stack is not None and treatment.startswith(FFN):
        paths["feed_forward"] = stack.feed_forward
    elif stack is not None and "ffn" in treatment:
        paths["feed_forward"] = stack.projections
    if stack is not None and treatment.endswith(OFFLOAD):
        paths["attention"] = stack.attention
    for kind, names in paths.items():
        hook = SubmoduleHook(kind, _Nobody(), recomputed=False, blocks=[block])
        intercept_submodules(block, names, hook)
    try:
        yield
    finally:
        for names in paths.values():
            release(submodules_of(block, names))


class _Nobody:
    """The owner of parts that are never compiled."""

    def feed_forward(self, call: CallWrapper, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)


class _Gone:
    """A storage in CPU memory: one copy for all tensors in it, also when it comes back."""

    def __init__(self, size: int):
        self.size = size
        self.views = 0
        self.asked = 0
        self.back: torch.Tensor | None = None

    def fetch(self) -> torch.Tensor:
        if self.back is None:
            self.back = torch.empty(self.size, dtype=torch.uint8)
        back = self.back
        self.asked += 1
        if self.asked % self.views == 0:
            self.back = None
        return back


class _Away(Offload):
    """Moves what is saved to CPU memory: here it is gone until it is wanted.

    As in a real step, the last few that were moved are still there until the forward is over.
    """

    def __init__(self) -> None:
        self.moved = 0
        self._gone: WeakKeyDictionary[torch.UntypedStorage, _Gone] = WeakKeyDictionary()
        self._last: deque[torch.Tensor] = deque(maxlen=MOST_LEAVING)

    def run(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self._away, self._back):
            return function(*args, **kwargs)

    def finish(self) -> None:
        """The forward is over."""
        self._last.clear()

    def _away(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if isinstance(base_of(tensor), nn.Parameter) or storage.nbytes() < SMALLEST:
            return tensor
        if storage not in self._gone:
            self._gone[storage] = _Gone(storage.nbytes())
            self.moved += storage.nbytes()
            self._last.append(tensor.detach())
        gone = self._gone[storage]
        gone.views += 1
        return gone, tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset()

    def _back(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        gone, shape, stride, dtype, offset = packed
        return gone.fetch().view(dtype).as_strided(shape, stride, offset)
