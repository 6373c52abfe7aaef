"""Tensors that autograd saves, in CPU memory between forward and backward.

What torch and others have, and why this is here: ``torch.autograd.graph.save_on_cpu`` copies each
saved tensor by itself (three copies for three views of one), into fresh memory, waits for it on
the compute stream, and cannot fetch ahead. The offloading of torchtune and of TRL overlaps its
copies, but it is made for one context around a whole model on CUDA and expects its tensors back
in the reverse order, which checkpoint calls and gradient accumulation do not keep.

What is moved is a *storage*: views of it share one copy and come back with their own strides and
offsets. Copies run on side streams, out of and into buffers of a :class:`BufferPool`.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..private.of_torch import base_of
from ..schedules.tally import tally
from .buffers import Buffer, BufferPool
from .device import Accelerator

# Bytes below which a copy is not worth its launch; the value that torchtune and TRL use.
SMALLEST = 1024


# Storages that may be on their way out at once. Each is kept on the device until its copy is
# done, so this bounds what offloading itself holds there.
MOST_LEAVING = 4


@dataclass(eq=False)
class HostMemory:
    """The CPU memory of one model, and the streams that carry tensors there and back."""

    accelerator: Accelerator
    pool: BufferPool
    lock: threading.RLock = field(default_factory=threading.RLock)
    _streams: dict[tuple[torch.device, str], Any] = field(default_factory=dict)

    def stream(self, device: torch.device, way: str) -> Any:
        """The stream for copies ``out`` of a device or back ``in``."""
        if (device, way) not in self._streams:
            self._streams[device, way] = self.accelerator.stream(device)
        return self._streams[device, way]

    def copy(self, target: Tensor, source: Tensor, buffer: Buffer, stream: Any) -> None:
        """Copy into or out of ``buffer``, after the last copy that used it."""
        if buffer.busy is not None:
            stream.wait_event(buffer.busy)
        if buffer.pinned:
            self.accelerator.copy(target, source, stream)
        else:
            self.accelerator.copy_and_wait(target, source, stream)
        buffer.busy = stream.record_event()

    def movable(self, tensor: Tensor) -> bool:
        """Whether a saved tensor is worth moving: whatever is no part of a parameter.

        Under autocast that includes the cast of a weight, which is a tensor of its own.
        """
        return (
            self.accelerator.holds(tensor)
            and tensor.layout is torch.strided
            and not isinstance(base_of(tensor), torch.nn.Parameter)
            and not (tensor.is_conj() or tensor.is_neg())  # marks that a storage does not have
            and tensor.untyped_storage().nbytes() >= SMALLEST
        )


class Stored:
    """One storage in CPU memory. Its buffer goes back to the pool when nothing needs it.

    ``views`` counts the tensors that were saved of it. Once back on the device it stays there
    until each of them was asked for, as it would have without being moved.
    """

    def __init__(self, host: HostMemory, source: Tensor):
        self.host = host
        self.device = source.device
        self.views = 0
        self.nbytes = source.nbytes
        self.buffer: Buffer = host.pool.take(source.nbytes)
        self._on_device: Tensor | None = None
        self._handed_out = 0
        out = host.stream(self.device, "out")
        out.wait_event(host.accelerator.current_stream(self.device).record_event())
        host.copy(self.memory, source, self.buffer, out)
        weakref.finalize(self, host.pool.give, self.buffer).atexit = False

    @property
    def memory(self) -> Tensor:
        """What of the buffer, which may be larger, holds the storage."""
        return self.buffer.memory[: self.nbytes]

    def wait(self) -> None:
        """Have the stream of the model wait for the copy that was started last."""
        self.host.accelerator.current_stream(self.device).wait_event(self.buffer.busy)

    def fetch(self) -> None:
        """Start bringing the storage back, if that has not been done."""
        if self._on_device is not None:
            return
        back = self.host.stream(self.device, "in")
        memory = self.host.accelerator.empty(self.nbytes, self.device, back)
        self.host.copy(memory, self.memory, self.buffer, back)
        self._on_device = memory

    def storage(self) -> torch.UntypedStorage:
        """The storage on its device again, for use on the current stream by one of its views."""
        self.fetch()
        assert self._on_device is not None
        memory = self._on_device
        self.wait()
        self.host.accelerator.use(memory, self.host.accelerator.current_stream(self.device))
        self._handed_out += 1
        if self._handed_out % self.views == 0:
            self._on_device = None
        return memory.untyped_storage()


@dataclass(frozen=True, slots=True)
class View:
    """What stands in the graph for a saved tensor; ``group`` is the call that saved it."""

    stored: Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    group: int

    def tensor(self) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.stored.device)
        return empty.set_(self.stored.storage(), self.offset, self.size, self.stride)


class Offload:
    """What one forward has in CPU memory, group by group: one for each call that is offloaded.

    order: which group follows which in backward, learned from one step for the next ones; None
        where nothing is to be fetched ahead.
    """

    def __init__(self, host: HostMemory, order: dict[int, int] | None = None):
        self.host = host
        self.order = order
        self.cpu_bytes = 0  # of all that was moved
        self._groups: list[weakref.WeakSet[Stored]] = []
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, Stored]]
        self._known = weakref.WeakKeyDictionary()
        self._leaving: deque[tuple[Tensor, int, Stored]] = deque()
        self._written: torch.Size | None = None
        self._in_use: int | None = None

    def run(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; what its operations save for backward goes to CPU memory.

        ``what`` that is, ``attention`` or ``inputs``, is for the tally.
        """
        group = len(self._groups)
        self._groups.append(weakref.WeakSet())

        def pack(tensor: Tensor) -> Tensor | View:
            if not self.host.movable(tensor):
                return tensor
            counting = tally()
            if counting is not None:
                counting.offloaded[what] += 1
            return self._store(tensor, group)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            return function(*args, **kwargs)

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory that the model holds, also for what is not in use now."""
        return self.host.pool.pinned_bytes

    def finish(self) -> None:
        """The forward is over: the device need not hold anything for copies that are under way.

        Raises ``RuntimeError``, as autograd does, when a tensor was written in place meanwhile.
        """
        written = self.let_go() or self._written
        if written is not None:
            raise RuntimeError(
                f"a tensor of shape {tuple(written)} that backward needs was written in place "
                "while it was on its way to CPU memory"
            )

    def let_go(self, most: int = 0) -> torch.Size | None:
        """Let all but ``most`` of the storages go that are on their way.

        The stream of the model waits for their copies, so that memory which is freed here and
        used again there is not overwritten early. (``record_stream`` would be right too, but
        leaves it to the timing of the two streams when the memory can be used again.) Returns
        the shape of a tensor that was written in place while it was on its way.
        """
        written = None
        while len(self._leaving) > most:
            source, version, stored = self._leaving.popleft()
            stored.wait()
            if source._version != version:
                written = source.shape
        return written

    def _store(self, tensor: Tensor, group: int) -> View:
        with self.host.lock, torch.no_grad():
            storage = tensor.untyped_storage()
            version, stored = self._known.get(storage, (-1, None))
            if stored is None or version != tensor._version:
                source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                stored = Stored(self.host, source)
                self.cpu_bytes += stored.buffer.memory.nbytes
                self._known[storage] = tensor._version, stored
                self._leaving.append((tensor.detach(), tensor._version, stored))
                self._written = self.let_go(MOST_LEAVING) or self._written
            stored.views += 1
            self._groups[group].add(stored)
            offset = int(tensor.storage_offset())
            return View(stored, tensor.dtype, tensor.size(), tensor.stride(), offset, group)

    def _unpack(self, packed: Tensor | View) -> Tensor:
        if not isinstance(packed, View):
            return packed
        with self.host.lock, torch.no_grad():
            if self.order is not None and packed.group != self._in_use:
                self._fetch_ahead(self.order, packed.group)
            return packed.tensor()

    def _fetch_ahead(self, order: dict[int, int], group: int) -> None:
        """Start bringing back this group, and the one that backward will want after it."""
        if self._in_use is not None:
            order[self._in_use] = group
        self._in_use = group
        following = order.get(group, group)
        for wanted in (group, following) if following < len(self._groups) else (group,):
            for stored in self._groups[wanted]:
                try:
                    stored.fetch()
                except torch.OutOfMemoryError:
                    return  # what is needed now is asked for in any case
