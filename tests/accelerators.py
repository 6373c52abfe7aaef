"""An accelerator that tests can have: its memory is the CPU's, but its streams are real queues.

Nothing that is put on a side stream happens before somebody waits for it, so a forgotten wait
shows as wrong values: fresh device memory is full of NaNs.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from simpletuner_segckpt.offload.device import Accelerator

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
    """``after`` says of other streams up to where this one has been told to wait for them."""

    def __init__(self):
        self.queue: deque[Callable[[], None]] = deque()
        self.added = self.done = 0
        self.after: dict[Stream, int] = {self: 0}

    def add(self, work: Callable[[], None]) -> None:
        with _lock:
            self.added += 1
            self.queue.append(work)

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.after[event.stream] = max(self.after.get(event.stream, 0), event.number)
        self.add(event.reach)

    def is_after(self, stream: "Stream", number: int) -> bool:
        return stream is self or self.after.get(stream, 0) >= number


class MainStream(Stream):
    """Where the model runs: everything at once, so a wait for another stream is one, too.

    Each event stands for the work that was done before it.
    """

    def record_event(self) -> Event:
        self.added += 1
        self.done += 1
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.after[event.stream] = max(self.after.get(event.stream, 0), event.number)
        event.reach()


class FakeAccelerator(Accelerator):
    """``pinnable`` is how many bytes can be pinned before the system refuses.

    Every copy is checked: that it comes after the work that made what it reads, and after the last
    copy that used the same CPU memory.
    """

    def __init__(self, pinnable: float = float("inf")):
        super().__init__("cpu")
        self.main = MainStream()
        self.streams: list[Stream] = []
        self.pinnable = pinnable
        self.pinned_sizes: list[int] = []
        self.own_memory: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.pinned_memory: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.stored = self.restored = 0  # copies
        self.in_use = 0  # calls of `use`
        self.freed_early = 0  # sources that were freed before their copy ran
        self._main_seen: dict[Stream, int] = {}  # by stream, when it copied out last
        # By memory: the stream of the last copy that wrote or read it, and its number there.
        self._written: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[Stream, int]]
        self._written = weakref.WeakKeyDictionary()
        self._read: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[Stream, int]]
        self._read = weakref.WeakKeyDictionary()

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
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.pinned_memory.add(memory.untyped_storage())
        return memory

    def empty(self, nbytes, device, stream):
        memory = torch.full((nbytes,), 255, dtype=torch.uint8)
        self.own_memory.add(memory.untyped_storage())
        return memory

    def copy(self, target, source, stream):
        back = target.untyped_storage() in self.own_memory
        on_cpu = (source if back else target).untyped_storage()
        assert on_cpu in self.pinned_memory, "a copy of pageable memory that nobody waits for"
        self._start(target, source, stream)

    def copy_and_wait(self, target, source, stream):
        self._start(target, source, stream)
        stream.record_event().reach()

    def use(self, tensor, stream):
        assert stream is self.main
        assert self.main.is_after(*self._written[tensor.untyped_storage()])
        self.in_use += 1

    def _start(self, target, source, stream):
        back = target.untyped_storage() in self.own_memory
        self.restored += back
        self.stored += not back
        if not back:
            assert stream.after.get(self.main, 0) > self._main_seen.get(stream, 0)
            self._main_seen[stream] = stream.after[self.main]
        written, read = self._written, self._read
        for memory, earlier in ((source, written), (target, written), (target, read)):
            assert stream.is_after(*earlier.get(memory.untyped_storage(), (stream, 0)))
        alive = weakref.ref(source.untyped_storage())

        def work():
            storage = alive()
            if storage is None:
                self.freed_early += 1
            else:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                target.copy_(whole[: target.numel()])  # a buffer may be larger

        stream.add(work)
        written[target.untyped_storage()] = read[source.untyped_storage()] = stream, stream.added


def no_copy_is_late(accelerator: FakeAccelerator) -> bool:
    """Whether every copy was made from memory that was still there."""
    for stream in accelerator.streams:
        stream.record_event().reach()
    return not accelerator.freed_early
