"""Run blocks once more than the model does, and leave no trace of that."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import Module

from ..model.stacks import all_modules
from .random_states import RandomStates


@contextmanager
def undisturbed(blocks: Sequence[Module], states: RandomStates | None) -> Iterator[None]:
    """Within this ``blocks`` may run: their buffers, and random ``states``, are put back."""
    held = [(m, dict(m._buffers)) for m in all_modules(blocks) if m._buffers]
    buffers = [(b, b.clone()) for _, own in held for b in own.values() if b is not None]
    try:
        yield
    finally:
        if states is not None:
            states.put_back()
        for module, own in held:
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
