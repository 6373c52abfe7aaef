"""CPU memory for offloaded tensors: a few sizes of pinned buffers, pageable memory beyond."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..messages.log import warn


@dataclass(eq=False, slots=True)
class Buffer:
    """CPU memory of shape ``(bytes,)``; ``busy`` is the event of the last copy that used it."""

    memory: Tensor
    pinned: bool
    busy: Any = None


@dataclass(eq=False)
class BufferPool:
    """Hands out CPU buffers, and takes pinned ones back for later use.

    A buffer is only bytes, so one bucket serves all shapes of equal size. There are at most
    ``max_buckets`` of them, for the sizes that were asked for most, counted in bytes; a size that
    overtakes the least of them takes its place. Other sizes are pageable.

    allocate: makes pinned memory of a number of bytes. Where it raises ``RuntimeError`` (the
    system limits locked memory), everything is pageable from then on.
    """

    max_buckets: int
    allocate: Callable[[int], Tensor]
    buckets: dict[int, list[Buffer]] = field(default_factory=dict)
    asked: Counter[int] = field(default_factory=Counter)

    def take(self, nbytes: int) -> Buffer:
        """A buffer of ``nbytes``."""
        self.asked[nbytes] += nbytes
        if self._has_bucket(nbytes):
            free = self.buckets[nbytes]
            if free:
                return free.pop()
            try:
                return Buffer(self.allocate(nbytes), True)
            except RuntimeError as error:
                self.close()
                warn("not-pinned", f"no pinned memory, offloading to pageable memory: {error}")
        return Buffer(torch.empty(nbytes, dtype=torch.uint8), False)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back; it is freed where its size has no bucket any more."""
        free = self.buckets.get(buffer.memory.nbytes)
        if buffer.pinned and free is not None:
            free.append(buffer)

    def close(self) -> None:
        """Free what is free, and pin nothing more."""
        self.max_buckets = 0
        self.buckets.clear()

    def _has_bucket(self, nbytes: int) -> bool:
        """Whether there is a bucket for this size, or one can be made."""
        if self.max_buckets == 0:
            return False
        if nbytes in self.buckets:
            return True
        if len(self.buckets) == self.max_buckets:
            least = min(self.buckets, key=self.asked.__getitem__)
            if self.asked[least] >= self.asked[nbytes]:
                return False
            del self.buckets[least]
        self.buckets[nbytes] = []
        return True
