"""For backwards that ask twice for what they saved, which a recompute gives once.

diffusers' ring attention asks for its tensors once for each process and once more; torch's
checkpoint refuses the second time, so that with any other checkpointing no backward is to be had.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ..private.of_torch import current_backward
from .contexts import Pack, Unpack, within_innermost


class _Saved:
    """What a checkpoint call left in place of a tensor, and the tensor once it is recomputed."""

    __slots__ = ("backward", "left", "tensor")

    def __init__(self, left: Any):
        self.left = left
        self.backward: int | None = None
        self.tensor: Any = None


def _read_again(pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
    def save(tensor: Tensor) -> _Saved:
        return _Saved(pack(tensor))

    def read(saved: _Saved) -> Any:
        backward = current_backward()
        if backward is None or backward != saved.backward:
            saved.tensor, saved.backward = unpack(saved.left), backward
        return saved.tensor

    return save, read


class _ReadAgain(AbstractContextManager[None]):
    """Entered inside a checkpoint call: what it recomputes for one backward can be read again."""

    def __enter__(self) -> None:
        self._hooks = within_innermost(_read_again) or nullcontext()
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


def read_again() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What to enter around a forward, and around its recompute."""
    return _ReadAgain(), nullcontext()
