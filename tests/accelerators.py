"""An accelerator that tests can have: its memory is the CPU's, but its streams are real queues.

Nothing that is put on a side stream happens before somebody waits for it, so a forgotten wait
shows as wrong values: fresh device memory is full of NaNs.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from simpletuner_segckpt.accelerator import Accelerator

_lock = threading.RLock()  # one device, whatever thread talks to it


class Event:
    def __init__(self, stream: "Stream"):
        self.stream = stream
        self.number = stream.added

    def reach(self) -> None:
        """Run the stream up to here."""
        with _lock:
            while self.stream.done < self.number:
                self.stream.done += 1
                self.stream.queue.popleft()()


class Stream:
    def __init__(self):
        self.queue: deque[Callable[[], None]] = deque()
        self.added = self.done = 0

    def add(self, work: Callable[[], None]) -> None:
        with _lock:
            self.added += 1
            self.queue.append(work)

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.add(event.reach)


class MainStream(Stream):
    """Where the model runs: everything at once, so a wait for another stream is one, too."""

    def wait_event(self, event: Event) -> None:
        event.reach()


class FakeAccelerator(Accelerator):
    """``pinnable`` is how many bytes can be pinned before the system refuses."""

    def __init__(self, pinnable: float = float("inf")):
        super().__init__("cpu")
        self.main = MainStream()
        self.streams: list[Stream] = []
        self.pinnable = pinnable
        self.pinned_sizes: list[int] = []
        self.own_memory: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.stored = self.restored = 0  # copies
        self.in_use = 0  # calls of `use`
        self.freed_early = 0  # sources that were freed before their copy ran

    def stream(self, device):
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self, device):
        return self.main

    def pinned(self, nbytes):
        if nbytes > self.pinnable:
            raise RuntimeError("cannot lock so much memory")
        self.pinnable -= nbytes
        self.pinned_sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty(self, nbytes, device, stream):
        memory = torch.full((nbytes,), 255, dtype=torch.uint8)
        self.own_memory.add(memory.untyped_storage())
        return memory

    def copy(self, target, source, stream, wait):
        back = target.untyped_storage() in self.own_memory
        self.restored += back
        self.stored += not back
        source_alive = weakref.ref(source.untyped_storage())

        def work():
            alive = source_alive()
            if alive is None:
                self.freed_early += 1
            else:
                target.copy_(torch.empty(0, dtype=torch.uint8).set_(alive))

        stream.add(work)
        if wait:
            stream.record_event().reach()

    def use(self, tensor, stream):
        assert stream is self.main
        self.in_use += 1


def no_copy_is_late(accelerator: FakeAccelerator) -> bool:
    """Whether every copy was made from memory that was still there."""
    for stream in accelerator.streams:
        stream.record_event().reach()
    return not accelerator.freed_early
