"""How one block's arguments follow from the block before it.

A segment runs several blocks inside one checkpoint call, so the model's own loop no longer
sees what happens between them. That is only right when the loop does nothing there but hand
what block ``k`` returned to block ``k + 1``. Two things are therefore observed:

* *writes*, by identity: each argument of block ``k + 1`` either **is** an object that block
  ``k`` returned (it is carried) or **is** the very argument that block ``k`` got;
* *reads*, by ``watched.WatchedTensor``: what the loop holds between two blocks is an alias that
  says when an operation uses it, and whose lifetime says whether the loop kept it (a list of
  hidden states, the samples of a ControlNet).

Values are compared leaf by leaf, so state that travels in tuples, lists or dicts counts too.
What cannot be watched (tensors of another class, objects that could be changed in place) is no
link; neither is a boundary at which grad mode, autocast or the random state changes.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch.utils.checkpoint
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..model.wrappers import unwrapped
from ..private.of_torch import pytree
from .watched import version

_CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    BlockMask,
)


@dataclass(frozen=True, slots=True)
class Link:
    """How the arguments of a block follow from the block before it.

    ``carried`` pairs the index of an argument leaf with the index of the result leaf that
    feeds it; every other argument leaf is the same for both blocks. ``names`` are the block's
    parameters that those arguments are for.
    """

    carried: tuple[tuple[int, int], ...]
    names: tuple[str, ...]

    @property
    def by_name(self) -> dict[str, int]:
        """Parameter of a block -> index of the result leaf that feeds it."""
        return {name: source for name, (_, source) in zip(self.names, self.carried, strict=True)}

    def feed(self, leaves: Sequence[Any], result: Any) -> tuple[Any, ...]:
        """The argument leaves of the next block, from this block's leaves and its result."""
        produced = pytree.tree_leaves(result)
        following = list(leaves)
        for argument, index in self.carried:
            following[argument] = produced[index]
        return tuple(following)


class Arguments:
    """The arguments of one block call, flattened, with the version of each tensor.

    The version is what an operation in place raises; identity alone would not see one.
    """

    def __init__(self, args: tuple, kwargs: dict):
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.versions = [version(leaf) for leaf in self.leaves]

    def same(self, index: int, other: Any) -> bool:
        """Whether ``other`` is what leaf ``index`` was when this record was made."""
        mine = self.leaves[index]
        if isinstance(mine, Tensor):
            return mine is other and version(other) == self.versions[index]
        return type(mine) is type(other) and is_constant(mine) and bool(mine == other)


def is_constant(value: Any) -> bool:
    """Whether ``value`` is an object of a kind that no loop changes in place."""
    return value is None or isinstance(value, _CONSTANTS)


def signature_of(tree: Any) -> tuple[Any, ...]:
    """What a loop can learn of a block's result without reading it."""
    leaves, spec = pytree.tree_flatten(tree)
    return spec, *(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.stride())
        if isinstance(leaf, Tensor)
        else None
        for leaf in leaves
    )


def argument_name(
    block: torch.nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec, index: int
) -> str:
    """Name of the parameter of ``block.forward`` to which argument leaf ``index`` belongs."""
    tree = pytree.tree_unflatten(list(leaves), spec)
    path: Any = pytree.tree_flatten_with_path(tree)[0][index][0]
    part, key = path[:2]
    if part.idx == 1:  # a keyword
        return str(key.key)
    parameters = list(inspect.signature(type(unwrapped(block)).forward).parameters)[1:]
    return parameters[key.idx] if key.idx < len(parameters) else f"number {key.idx}"
