"""CPU memory for offloaded tensors: a few sizes of pinned buffers, pageable memory beyond."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..messages.log import Messages

KEY = "gradient_checkpointing_offload_pin_memory_max_buckets"

# After so many buffers what was asked for counts half: some fifty steps of a large model.
HALF_LIFE = 10_000


@dataclass(eq=False, slots=True)
class Buffer:
    """CPU memory of shape ``(bytes,)``; ``busy`` is the event of the last copy that used it."""

    memory: Tensor
    pinned: bool
    busy: Any = None


@dataclass(eq=False)
class BufferPool:
    """Hands out CPU buffers, and takes pinned ones back for later use.

    A buffer is only bytes, so one bucket serves all tensors of about its size (``bucket_size``).
    There are at most ``max_buckets`` of them, for the sizes that were asked for most of late,
    counted in bytes. A size that was asked for twice as much as the least of them takes its place:
    sizes that are asked for alike do not drive each other out. Other sizes are pageable.

    allocate: makes pinned memory of a number of bytes. Where it raises ``RuntimeError`` (the
    system limits locked memory), everything is pageable from then on.
    """

    max_buckets: int
    allocate: Callable[[int], Tensor]
    buckets: dict[int, list[Buffer]] = field(default_factory=dict)
    asked: Counter[int] = field(default_factory=Counter)  # bytes, by size of bucket
    pinned_bytes: int = 0  # of the buffers that are in use, and of those that wait to be
    messages: Messages = field(default_factory=Messages)
    _taken: int = 0

    def take(self, nbytes: int) -> Buffer:
        """A buffer of ``nbytes`` or more."""
        size = bucket_size(nbytes)
        self._count(size, nbytes)
        if self._has_bucket(size):
            free = self.buckets[size]
            if free:
                return free.pop()
            try:
                buffer = Buffer(self.allocate(size), True)
            except RuntimeError as error:
                self.close()
                self.messages.warn(
                    "not-pinned",
                    "no memory can be pinned, so all that is offloaded waits in pageable memory, "
                    f"which is slower: {error}; {KEY} of 0 pins none",
                )
            else:
                self.pinned_bytes += size
                return buffer
        return Buffer(torch.empty(nbytes, dtype=torch.uint8), False)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back; it is freed where its size has no bucket any more."""
        if not buffer.pinned:
            return
        free = self.buckets.get(buffer.memory.nbytes)
        if free is None:
            self.pinned_bytes -= buffer.memory.nbytes
        else:
            free.append(buffer)

    def close(self) -> None:
        """Free what is free, and pin nothing more."""
        self.max_buckets = 0
        for size in list(self.buckets):
            self._drop(size)

    def _count(self, size: int, nbytes: int) -> None:
        self._taken += 1
        if self._taken % HALF_LIFE == 0:
            self.asked = Counter({size: count // 2 for size, count in self.asked.items()})
        self.asked[size] += nbytes

    def _has_bucket(self, size: int) -> bool:
        """Whether there is a bucket for this size, or one can be made."""
        if self.max_buckets == 0:
            return False
        if size in self.buckets:
            return True
        if len(self.buckets) == self.max_buckets:
            self.messages.warn(
                "not-pinned",
                f"tensors of more than {self.max_buckets} sizes are offloaded; those that are "
                f"asked for least wait in pageable memory, which is slower ({KEY})",
            )
            least = min(self.buckets, key=self.asked.__getitem__)
            if self.asked[size] <= 2 * self.asked[least]:
                return False
            self._drop(least)
        self.buckets[size] = []
        return True

    def _drop(self, size: int) -> None:
        self.pinned_bytes -= size * len(self.buckets.pop(size))


def bucket_size(nbytes: int) -> int:
    """The next of the four sizes to a power of two: less than a quarter more than ``nbytes``."""
    step = 1 << max(0, nbytes.bit_length() - 3)
    return -(-nbytes // step) * step
