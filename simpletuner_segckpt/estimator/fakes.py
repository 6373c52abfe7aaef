"""Tensors without memory, and what else of torch is private and needed for them."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo.exc import UserError
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.autograd import graph

from ..errors import SegckptError, WorkloadError
from ..messages import quiet

# A mask with this many numbers keeps them, so that a model can ask for its lengths.
MOST_CONSTANTS = 1 << 16

_FAKES = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def without_memory(exact_lifetimes: bool = False) -> Iterator[None]:
    """Within this, every new tensor has a shape and a dtype, and no memory.

    They are tensors on the CPU: a build of torch without CUDA can differentiate no others.
    ``exact_lifetimes``: torch remembers the results of operators by their arguments, and so keeps
    storages alive that were arguments; without that it takes half as long again.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = not exact_lifetimes
    with (
        patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", MOST_CONSTANTS),
        patch.object(nn.Module, "_apply", _convert),
        quiet(_FAKES, logging.CRITICAL),  # it logs what is raised anyway
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
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        UserError,
    ) as error:
        raise WorkloadError(
            f"{name} cannot be estimated: what it does depends on the numbers in its tensors, of "
            f"which there are none here ({_first_line(error)})"
        ) from error
    except Exception as error:  # of the model, or of the library that adapts it
        raise WorkloadError(
            f"{name} does not take these settings: {type(error).__name__}: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no reason given")


def _convert(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
    """``Module._apply``, whose way to exchange parameters does not work for fake ones."""
    for child in module.children():
        _convert(child, function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                changed = function(parameter)
            module._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = buffer if buffer is None else function(buffer)
    return module


def backward(roots: Sequence[torch.Tensor]) -> None:
    """``torch.autograd.backward`` of scalars under the function modes that are active.

    The public one leaves them for the time of the backward, and so for what checkpoint calls
    recompute in it.
    """
    gradients = tuple(map(torch.ones_like, roots))
    graph._engine_run_backward(
        tuple(roots), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )
