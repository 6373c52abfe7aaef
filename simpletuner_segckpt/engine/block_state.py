"""What a loop may change on a block between two calls: its attributes and its weights."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from ..model.stacks import all_modules
from ..model.wrappers import unwrapped
from .links import is_constant
from .watched import version


def attributes(block: Module) -> dict[str, Any]:
    """The attributes of a block, which a loop may set just before it calls the block."""
    return dict(unwrapped(block).__dict__)


def weights(block: Module) -> list[tuple[Any, ...]]:
    """Which tensors the parameters of a block are, and where; a loop may swap them in and out."""
    modules = all_modules([block])
    return [_whereabouts(p) for m in modules for p in m._parameters.values() if p is not None]


def first_matrix(block: Module) -> tuple[Any, ...]:
    """The same of one matrix of the block: quick to ask, and what whoever swaps takes first."""
    matrices = (parameter for parameter in block.parameters() if parameter.dim() > 1)
    return next(map(_whereabouts, matrices), ())


def _whereabouts(parameter: Parameter) -> tuple[Any, ...]:
    memory = [tensor.data_ptr() for tensor in held_by(parameter)]
    return id(parameter), version(parameter), parameter.device, *memory


def held_by(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own behind ``tensor``: itself, as a rule.

    Shards and many quantised weights wrap others, which may be exchanged while they stay.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), Tensor):  # and no DeviceMesh
                yield from held_by(inner)
        return
    # Any other class that dispatches for itself keeps its memory where nobody can ask for it.
    plain = type(tensor) in (Tensor, Parameter)
    asked = plain or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if asked and tensor.device.type != "meta" and tensor.data_ptr() != 0:
        yield tensor


def changed_attribute(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The name of an attribute that differs between two results of ``attributes``."""
    for name in before.keys() | now.keys():
        old, new = before.get(name), now.get(name)
        if old is not new and not (is_constant(old) and type(old) is type(new) and old == new):
            return name
    return None
