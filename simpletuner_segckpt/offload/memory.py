"""How much memory there is, and how much is in use, where a model trains."""

import gc
import os
from typing import Protocol

import torch
from torch import Tensor

from ..private.of_torch import memory_of


class Memory(Protocol):
    """One kind of memory. Bytes.

    exact: whether sizes are what tensors have, not what an allocator rounds them to. complete:
    whether ``in_use`` counts what autograd alone holds. slow: whether asking it takes long.
    """

    exact: bool
    complete: bool
    slow: bool

    def total(self) -> int:
        """All that there is."""

    def in_use(self) -> int:
        """What tensors take now."""

    def peak(self) -> int | None:
        """The most that they took so far; None where nobody counts."""

    def failures(self) -> int:
        """How often there was not enough."""


class AcceleratorMemory:
    """That of the accelerator, whose allocator counts."""

    exact = False
    complete = True
    slow = False

    def total(self) -> int:
        """That of the current device."""
        return int(torch.accelerator.get_memory_info()[1])

    def in_use(self) -> int:
        """What its allocator has handed out."""
        return torch.accelerator.memory_allocated()

    def peak(self) -> int | None:
        """Since the trainer began to count; nothing is reset here."""
        return torch.accelerator.max_memory_allocated()

    def failures(self) -> int:
        """Out-of-memory errors that it has raised."""
        return int(torch.accelerator.memory_stats().get("num_ooms", 0))


class CpuMemory:
    """RAM. What autograd holds, and no Python object does, is not seen."""

    exact = True
    complete = False
    slow = True

    def total(self) -> int:
        """All of the machine's RAM."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def in_use(self) -> int:
        """The tensors that Python knows, and the gradients of those that have one."""
        sizes: dict[int, int] = {}
        for found in gc.get_objects():
            if issubclass(type(found), Tensor):
                _count(sizes, found)
                if found.is_leaf and found.requires_grad and found.grad is not None:
                    _count(sizes, found.grad)
        return sum(sizes.values())

    def peak(self) -> int | None:
        """Nobody counts."""
        return None

    def failures(self) -> int:
        """A process that has not enough is ended."""
        return 0


def _count(sizes: dict[int, int], tensor: Tensor) -> None:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a tensor without memory
        return
    if storage.device.type == "cpu":  # a compiler's fake tensors have none
        sizes[memory_of(tensor)] = storage.nbytes()
