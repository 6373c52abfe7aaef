"""Buffers that a block writes, which a recompute is to find as its forward did.

Normalisations count in them, spectral norms iterate in them, codebooks move in them. A recompute
that started from what is there *then* would give other values, and write a second time. So small
buffers are copied when a call begins, and those that it wrote are put back for its repetition.

Only what a block writes itself, and keeps to itself. Where somebody streams weights through a
buffer, the repeated call has to read the very memory that the stream fills, and so have autograd
functions that keep it on their context. So buffers that a hook writes, and memory that other blocks
use as well, are left alone, as torch's own checkpointing leaves them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

from ..messages.log import Messages
from ..model.foreign_hooks import is_made_for_recompute
from ..model.stacks import all_modules
from ..private.of_torch import FORWARD_HOOKS, FORWARD_PRE_HOOKS, NormBase, version

# Elements of a buffer that is copied before each call, should the call write to it. Larger ones
# are weights (quantised, packed), which no forward writes.
COPIED = 2**20

_messages = Messages()

# What was found out of a buffer once, by module and name: whether it is written past its version
# (through `.data`, say), and whether other modules use its memory.
_written_unseen: WeakKeyDictionary[Module, dict[str, bool]] = WeakKeyDictionary()
_shared: WeakKeyDictionary[Module, dict[str, bool]] = WeakKeyDictionary()


@dataclass(slots=True)
class Buffer:
    """A buffer as it was when a call began. hooked: whether a hook wrote it during the call."""

    module: Module
    name: str
    tensor: torch.Tensor | None
    version: int
    copy: torch.Tensor | None
    hooked: bool = False

    @classmethod
    def of(cls, module: Module, name: str, tensor: torch.Tensor | None) -> "Buffer":
        small = tensor is not None and tensor.numel() <= COPIED
        copy = tensor.detach().clone() if small and tensor is not None else None
        return cls(module, name, tensor, version(tensor), copy)

    @property
    def place(self) -> tuple[int, int, int]:
        """Which tensor it is now, where its memory is, and how often that was written."""
        tensor = self.module._buffers.get(self.name)
        memory = tensor.data_ptr() if type(tensor) is torch.Tensor else 0
        return id(tensor), memory, version(tensor)

    def is_written(self, hooks: bool, blocks: Sequence[Module]) -> bool:
        """Whether the call wrote it, to be put back; ``blocks`` are all that may share its memory.

        hooks: whether others have hooks in the block, who may write past the version as well.
        """
        if self.hooked:
            return False
        if self.module._buffers.get(self.name) is not self.tensor:
            return True
        # The kernels of batch normalisation write their statistics past the version.
        if isinstance(self.module, NormBase):
            return True
        seen = version(self.tensor) != self.version
        return (seen or (not hooks and self._written_unseen())) and not self._shared(blocks)

    def _written_unseen(self) -> bool:
        """Compared once for each buffer, since on an accelerator that waits for it."""
        if type(self.tensor) is not torch.Tensor or self.copy is None or self.tensor.is_meta:
            return False
        known = _written_unseen.setdefault(self.module, {})
        if self.name not in known:
            known[self.name] = not torch.equal(self.tensor, self.copy)
        return known[self.name]

    def _shared(self, blocks: Sequence[Module]) -> bool:
        known = _shared.setdefault(self.module, {})
        if self.name not in known:
            others = (m for m in all_modules(blocks) if m is not self.module)
            mine = _memory(self.tensor)
            known[self.name] = mine != 0 and any(
                _memory(tensor) == mine for other in others for tensor in other._buffers.values()
            )
        return known[self.name]


def _memory(tensor: torch.Tensor | None) -> int:
    return tensor.untyped_storage().data_ptr() if type(tensor) is torch.Tensor else 0


def written_by(buffers: list[Buffer], hooks: bool, blocks: Sequence[Module]) -> list[Buffer]:
    """Those that the call wrote. Says of what cannot be put back that it will not be."""
    written = [buffer for buffer in buffers if buffer.is_written(hooks, blocks)]
    for buffer in written:
        if buffer.copy is None and buffer.tensor is not None:
            _messages.warn(
                "written-buffer",
                f"a {type(buffer.module).__name__} writes its buffer `{buffer.name}`, which is "
                "too large to be copied: its recompute starts from what was written",
            )
    return written


@contextmanager
def hooks_watched(hooked: Sequence[dict[str, Any]], buffers: list[Buffer]) -> Iterator[bool]:
    """Within this, what hooks of others write to ``buffers`` is seen; gives whether there are any.

    ``hooked`` are the attributes of the modules that have hooks.
    """
    tables = [state[kind] for state in hooked for kind in (FORWARD_PRE_HOOKS, FORWARD_HOOKS)]
    foreign = [
        (table, key, hook)
        for table in tables
        for key, hook in table.items()
        if buffers and not is_made_for_recompute(hook)
    ]
    put = [(table, key, hook, partial(_Watch(hook), buffers)) for table, key, hook in foreign]
    for table, key, _, watch in put:
        table[key] = watch
    try:
        yield bool(foreign)
    finally:
        for table, key, hook, watch in put:
            if table.get(key) is watch:  # it may have taken itself away
                table[key] = hook


class _Watch:
    """Calls a hook, and marks the buffers that it wrote."""

    def __init__(self, hook: Any):
        self.hook = hook

    def __call__(self, buffers: list[Buffer], *args: Any, **kwargs: Any) -> Any:
        before = [buffer.place for buffer in buffers]
        result = self.hook(*args, **kwargs)
        for buffer, place in zip(buffers, before, strict=True):
            if buffer.place != place:
                buffer.hooked = True
        return result
