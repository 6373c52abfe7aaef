"""What a loop may change on a block between two calls: its attributes and its weights."""

from typing import Any

import torch.utils.checkpoint

from ..model.stacks import all_modules
from ..model.wrappers import unwrapped
from .links import is_constant
from .watched import version


def attributes(block: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a block, which a loop may set just before it calls the block."""
    return dict(unwrapped(block).__dict__)


def weights(block: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Which tensors the parameters of a block are, and where; a loop may swap them in and out."""
    modules = all_modules([block])
    return [_whereabouts(p) for m in modules for p in m._parameters.values() if p is not None]


def first_matrix(block: torch.nn.Module) -> tuple[Any, ...]:
    """The same of one matrix of the block: quick to ask, and what whoever swaps takes first."""
    matrices = (parameter for parameter in block.parameters() if parameter.dim() > 1)
    return next(map(_whereabouts, matrices), ())


def _whereabouts(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    plain = type(parameter) is torch.nn.Parameter
    memory = parameter.data_ptr() if plain else 0
    return id(parameter), version(parameter), parameter.device, memory


def changed_attribute(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The name of an attribute that differs between two results of ``attributes``."""
    for name in before.keys() | now.keys():
        old, new = before.get(name), now.get(name)
        if old is not new and not (is_constant(old) and type(old) is type(new) and old == new):
            return name
    return None
