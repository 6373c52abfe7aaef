"""The states of all random generators that a block may draw from: torch's, Python's, NumPy's."""

import random
import sys
from typing import Any

import torch


class LibraryStates:
    """The states of Python's and NumPy's default generators at one time."""

    __slots__ = ("_numpy", "_python")

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = _numpy()
        self._numpy = numpy.random.get_state() if numpy is not None else ()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LibraryStates)
            and self._python == other._python
            and len(self._numpy) == len(other._numpy)
            and all(map(_numpy().array_equal, self._numpy, other._numpy))
        )

    __hash__ = None  # type: ignore[assignment]

    def put_back(self) -> None:
        random.setstate(self._python)
        if self._numpy:
            _numpy().random.set_state(self._numpy)


def _numpy() -> Any:
    """Without importing it, where nobody has."""
    return sys.modules.get("numpy")


class RandomStates:
    """The same, and those of torch: of the CPU and of the accelerator in use."""

    __slots__ = ("_accelerator", "_libraries", "_torch")

    def __init__(self) -> None:
        self._torch = [torch.get_rng_state()]
        self._accelerator = torch.get_device_module()
        if self._accelerator is not torch.cpu and self._accelerator.is_available():
            self._torch.append(self._accelerator.get_rng_state())
        self._libraries = LibraryStates()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomStates)
            and all(map(torch.equal, self._torch, other._torch))
            and self._libraries == other._libraries
        )

    __hash__ = None  # type: ignore[assignment]

    def put_back(self) -> None:
        torch.set_rng_state(self._torch[0])
        for state in self._torch[1:]:
            self._accelerator.set_rng_state(state)
        self._libraries.put_back()
