"""What a block's operations depend on besides the block, its arguments and torch's random numbers.

Python's and NumPy's random numbers, and which attention kernel is chosen: contexts around a forward
(``sdpa_kernel``, diffusers' ``attention_backend``) may have been left when backward begins.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

from ..private.of_libraries import attention_backend, set_attention_backend
from .random_states import LibraryStates

_SDPA = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
_cuda: Any = torch.backends.cuda
_ENABLED = [getattr(_cuda, f"{kernel}_enabled") for kernel in _SDPA]

# Whether the first call of a module drew random numbers from Python or NumPy: to ask costs as
# much as a small block, so it is done once.
_draws: WeakKeyDictionary[Module, bool] = WeakKeyDictionary()


class Ambient:
    """What was around a call of ``modules`` when it began."""

    __slots__ = ("_backend", "_module", "_random", "_sdpa")

    def __init__(self, modules: Sequence[Module]):
        self._sdpa = _sdpa()
        self._backend = attention_backend()
        self._module = modules[0] if modules else None
        unknown = self._module is not None and _draws.get(self._module, True)
        self._random = LibraryStates() if unknown else None

    def call_ended(self) -> None:
        """The first call is over."""
        if self._random is not None and self._module is not None:
            drew = _draws[self._module] = self._random != LibraryStates()
            if not drew:
                self._random = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within this, all of that is as it was; after it, as it is now."""
        with ExitStack() as undo:
            if (now := _sdpa()) != self._sdpa:
                undo.callback(_set_sdpa, now)
                _set_sdpa(self._sdpa)
            if (backend := attention_backend()) is not self._backend:
                undo.callback(set_attention_backend, backend)
                set_attention_backend(self._backend)
            if self._random is not None:
                undo.callback(LibraryStates().put_back)
                self._random.put_back()
            yield


def _sdpa() -> tuple[bool, ...]:
    return tuple([enabled() for enabled in _ENABLED])


def _set_sdpa(enabled: tuple[bool, ...]) -> None:
    for kernel, value in zip(_SDPA, enabled, strict=True):
        getattr(_cuda, f"enable_{kernel}")(value)
