"""The sizes of a call: what its memory depends on, beside the model."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ..model.stacks import all_modules
from ..private.of_torch import pytree

# How far the numbers of elements of the arguments may lie off one line, as a share of its ends.
STRAIGHT = 0.01


class Sizes(NamedTuple):
    """fixed: all that must be the same for two calls to be comparable. shapes: of its tensors."""

    fixed: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        """The shapes: ``encoder_hidden_states 1x77x64, hidden_states 1x16x64x64``."""
        named = zip(self.names, self.shapes, strict=True)
        shown = [f"{name} {'x'.join(map(str, shape))}" for name, shape in named if len(shape) > 1]
        return ", ".join(shown[:3]) or "no sizes"

    @property
    def elements(self) -> tuple[int, ...]:
        """How many elements each tensor has."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)


def sizes_of(module: Module, arguments: Mapping[str, Any]) -> Sizes:
    """The sizes of a call of ``module`` with these arguments, and how it runs."""
    tensors: dict[str, Tensor] = {}
    others: list[tuple[str, Any]] = []
    for name, value in _leaves(arguments):
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, (bool, str)) or value is None:
            others.append((name, value))
    device = next((t.device.type for t in tensors.values()), "cpu")
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    held = [owner._parameters.values() for owner in all_modules([module]) if owner._parameters]
    trained = sum(p.requires_grad for own in held for p in own if p is not None)
    kinds = tuple((name, t.dtype, t.dim()) for name, t in tensors.items())
    fixed = (module.training, autocast, trained, tuple(others), kinds)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    return Sizes(fixed, shapes, tuple(tensors))


def share_between(sizes: Sizes, low: Sizes, high: Sizes) -> float | None:
    """How far from ``low`` to ``high`` a call lies, from 0 to 1; None where it is not on that line.

    It is on the line if the number of elements of every tensor is as far along between theirs.
    """
    if not sizes.fixed == low.fixed == high.fixed:
        return None
    own, less, more = sizes.elements, low.elements, high.elements
    spread = sum(more) - sum(less)
    share = (sum(own) - sum(less)) / spread if spread else 0.0
    if not 0 <= share <= 1:
        return None
    for count, first, last in zip(own, less, more, strict=True):
        if abs(first + share * (last - first) - count) > STRAIGHT * max(first, last):
            return None
    return share


def _leaves(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values with names, also those inside containers, and inside objects such as dataclasses."""
    for name, value in sorted(arguments.items()):
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            where = name + pytree.keystr(path)
            if isinstance(leaf, Tensor) or not hasattr(leaf, "__dict__"):
                yield where, leaf
            else:
                yield from ((f"{where}.{k}", v) for k, v in sorted(vars(leaf).items()))
