"""The bytes that are alive, and the work that is done, operator by operator."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ..private.of_torch import TorchDispatchMode, pytree
from .records import Work

ROUND = 512  # bytes: CUDA's caching allocator hands out multiples of it


class Ledger(TorchDispatchMode):
    """Counts bytes of storages that operators make, until the last tensor in them is gone.

    level: bytes alive now, of those made while this was active. peak: the highest level since
    ``mark``. work: done since ``mark``. torch's own ``MemTracker`` cannot count models with frozen
    parameters, and takes ten times as long.

    exact: whether bytes are counted as they are, and not as CUDA's allocator rounds them.
    """

    def __init__(self, exact: bool = False) -> None:
        super().__init__()
        self._sized = int if exact else rounded
        self.level = 0
        self.peak = 0
        self.work = Work()
        self._away = False
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def mark(self) -> None:
        """Begin a new stretch."""
        self.peak = self.level
        self.work = Work()

    def restart_peak(self) -> int:
        """Begin a new peak at the level of now; the one before."""
        before, self.peak = self.peak, self.level
        return before

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Within this, nothing is counted: it happens in another memory."""
        self._away = True
        try:
            yield
        finally:
            self._away = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._away:
            return result
        made = tensors_in(result)
        taken = tensors_in((args, kwargs))
        given = {tensor.untyped_storage() for tensor in taken}
        new = [t for t in made if t.untyped_storage() not in given]
        for tensor in new:
            self.add(tensor)
        if new or func._schema.is_mutable:
            self._count(func, args, kwargs, result, taken, made)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` as long as it is alive."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = self._sized(storage.nbytes())
        self.level += size
        self.peak = max(self.peak, self.level)
        weakref.finalize(storage, self._gone, size).atexit = False

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """Bytes that a storage was counted with."""
        return self._sized(storage.nbytes()) if storage in self._known else 0

    def _gone(self, size: int) -> None:
        self.level -= size

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, taken: Any, made: Any) -> None:
        if func.namespace == "prim":
            return
        formula = flop_registry.get(func.overloadpacket)
        if formula is None:
            traffic = sum(map(_touched, taken)) + sum(map(_touched, made))
            self.work += Work(traffic=traffic, kernels=1)
            return
        flops = formula(*args, **kwargs, out_val=result)
        if "attention" in func.name():
            self.work += Work(attention=flops, kernels=1)
        else:
            self.work += Work(products=flops, kernels=1)


def rounded(size: int) -> int:
    """``size`` in bytes as the allocator rounds it."""
    return -(-size // ROUND) * ROUND


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _touched(tensor: torch.Tensor) -> int:
    """Bytes of memory behind ``tensor``; what is expanded is read once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()
