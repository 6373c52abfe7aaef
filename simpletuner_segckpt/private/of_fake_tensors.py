"""Tensors without memory: what of torch they need that is private."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import UserError
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import graph

__all__ = ["FakeTensor", "FakeTensorMode", "unset_fake_temporarily"]

LOGGER = "torch._subclasses.fake_tensor"

# What a model raises that asks a fake tensor for its numbers.
NUMBERS_WANTED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    UserError,
)

Apply = Callable[..., nn.Module]


@contextmanager
def constants_up_to(numbers: int) -> Iterator[None]:
    """Within this, small tensors that are made of numbers keep them, up to so many."""
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = numbers
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


@contextmanager
def parameters_replaced() -> Iterator[None]:
    """Within this and in this thread, ``module.to()`` and its like make new parameters.

    ``Module._apply`` exchanges what is in a parameter, which does not work for fake ones. In all
    other threads it is what it was.
    """
    before: Apply = nn.Module._apply
    thread = threading.get_ident()

    def apply(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
        if threading.get_ident() != thread:
            return before(module, function, recurse)
        return _with_new_parameters(module, function)

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


def _with_new_parameters(module: nn.Module, function: Callable[..., Any]) -> nn.Module:
    for child in module.children():
        _with_new_parameters(child, function)
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
