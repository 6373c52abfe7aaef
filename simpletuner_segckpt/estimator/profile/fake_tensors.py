"""A model without memory: tensors that have a shape and a dtype, and nothing in them.

What of torch is private for that stands in ``private.of_fake_tensors``.
"""

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...messages.errors import SegckptError, WorkloadError
from ...messages.log import quiet
from ...private import of_fake_tensors
from ...private.of_fake_tensors import FakeTensorMode, backward

__all__ = ["backward", "explained", "without_memory"]

# A mask with this many numbers keeps them, so that a model can ask for its lengths.
MOST_CONSTANTS = 1 << 16

# Some of what follows is set for the whole process, so one thread at a time does it.
_lock = threading.RLock()


@contextmanager
def without_memory(exact_lifetimes: bool = False) -> Iterator[None]:
    """Within this and in this thread, every new tensor has a shape and a dtype, and no memory.

    They are tensors on the CPU: a build of torch without CUDA can differentiate no others.
    ``exact_lifetimes``: torch remembers the results of operators by their arguments, and so keeps
    storages alive that were arguments; without that it takes half as long again.

    Other threads find their tensors and modules as ever; a second one that enters waits. What
    remains for the whole process: Python's garbage collector is off, and fake tensors of others
    (of ``torch.compile``, say) keep the numbers of somewhat larger constants.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = not exact_lifetimes
    with (
        _lock,
        of_fake_tensors.constants_up_to(MOST_CONSTANTS),
        of_fake_tensors.parameters_replaced(),
        quiet(logging.getLogger(of_fake_tensors.LOGGER), logging.CRITICAL),  # what is raised anyway
        _no_garbage_collection(),
        mode,
    ):
        yield


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """torch 2.13 crashes when cycles of fake tensors are collected while one is being made."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Say as a ``WorkloadError`` why the step of the model called ``name`` cannot be run."""
    try:
        yield
    except SegckptError:
        raise
    except of_fake_tensors.NUMBERS_WANTED as error:
        raise WorkloadError(
            f"{name} cannot be estimated: what it does depends on the numbers in its tensors, of "
            f"which there are none here ({_first_line(error)})"
        ) from error
    except ImportError as error:
        raise WorkloadError(f"{name} cannot be built: {error}") from error
    except Exception as error:  # of the model, or of the library that adapts it
        raise WorkloadError(
            f"{name} does not take these settings: {type(error).__name__}: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no reason given")
