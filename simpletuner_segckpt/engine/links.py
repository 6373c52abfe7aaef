"""How one block's arguments follow from the block before it.

A segment runs several blocks inside one checkpoint call, so the model's own loop no longer
sees what happens between them. That is only right when the loop does nothing there but hand
what block ``k`` returned to block ``k + 1``. Two things are therefore observed:

* *writes*, by identity: each argument of block ``k + 1`` either **is** an object that block
  ``k`` returned (it is carried) or **is** the very argument that block ``k`` got (or a tensor
  that the loop makes anew for every block with the same values, and that has no gradient);
* *reads*, by ``watched.WatchedTensor``: what the loop holds between two blocks is an alias that
  says when an operation uses it, and whose lifetime says whether the loop kept it (a list of
  hidden states, the samples of a ControlNet).

Values are compared leaf by leaf, so state that travels in tuples, lists or dicts counts too, and
so do the attributes of a dataclass. What cannot be watched (tensors of another class, objects that
could be changed in place), and a container that a block writes to, is no link; neither is a
boundary at which grad mode, autocast or the random state changes.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch.utils.checkpoint
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..model.interception import what_runs
from ..private.of_torch import pytree
from ..recompute.containers import Contents, attributes_of, containers, is_record
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
    feeds it; every other argument leaf is the same for both blocks. ``places`` says of each such
    argument which one it is, by position or by name, and which of its leaves; ``names`` are the
    block's parameters that they are for. ``anew`` are the argument leaves that the loop makes anew
    with the same values, each with its place.
    """

    carried: tuple[tuple[int, int], ...]
    places: tuple[tuple[int | str, int], ...]
    names: tuple[str, ...]
    anew: tuple[tuple[int, tuple[int | str, int]], ...] = ()

    @property
    def by_name(self) -> dict[str, int]:
        """Parameter of a block -> index of the result leaf that feeds it."""
        return {name: source for name, (_, source) in zip(self.names, self.carried, strict=True)}

    def feed(self, args: tuple, kwargs: dict[str, Any], result: Any) -> tuple[tuple, dict]:
        """The arguments of the next block, from those of this block and its result.

        What holds nothing that is carried is the same object.
        """
        produced = pytree.tree_leaves(result)
        sources = [produced[source] for _, source in self.carried]
        return _replaced(args, kwargs, zip(self.places, sources, strict=True))

    def share(
        self, args: tuple, kwargs: dict[str, Any], values: Sequence[Any]
    ) -> tuple[tuple, dict]:
        """The arguments of the next block, with ``values`` for what the loop made ``anew``."""
        return _replaced(args, kwargs, zip((place for _, place in self.anew), values, strict=True))


def _replaced(
    args: tuple, kwargs: dict[str, Any], values: Iterable[tuple[tuple[int | str, int], Any]]
) -> tuple[tuple, dict]:
    """Arguments with other leaves at some places."""
    fed: dict[int | str, dict[int, Any]] = {}
    for (place, leaf), value in values:
        fed.setdefault(place, {})[leaf] = value
    given: dict[int | str, Any] = dict(enumerate(args)) | kwargs
    for place, leaves in fed.items():
        given[place] = _with_leaves(given[place], leaves)
    return tuple(given[i] for i in range(len(args))), {name: given[name] for name in kwargs}


def _with_leaves(tree: Any, values: dict[int, Any]) -> Any:
    """``tree`` with other leaves where ``values`` has any, by their index."""
    top = id(tree)  # not itself: what flattens would hold it until the next garbage collection
    children, spec = pytree.tree_flatten(tree, is_leaf=lambda node: id(node) != top)
    if children and children[0] is tree:
        return values[0]
    first = 0
    for i, child in enumerate(children):
        last = first + len(pytree.tree_leaves(child))
        inside = {leaf - first: v for leaf, v in values.items() if first <= leaf < last}
        if inside:
            children[i] = _with_leaves(child, inside)
        first = last
    return pytree.tree_unflatten(children, spec)


class Snapshot:
    """The leaves of a tree at one time, with the version of each tensor.

    The version is what an operation in place raises; identity alone would not see one. Of objects
    that are data (see ``recompute.containers``), their attributes.
    """

    def __init__(self, tree: Any, inside: frozenset[int] = frozenset()):
        self.leaves, self.spec = pytree.tree_flatten(tree)
        self.versions = [version(leaf) for leaf in self.leaves]
        self._records = {
            i: Snapshot(attributes_of(leaf), inside | {id(leaf)})
            for i, leaf in enumerate(self.leaves)
            if is_record(leaf) and id(leaf) not in inside  # one may hold itself
        }

    def same(self, index: int, other: Any) -> bool:
        """Whether ``other`` is what leaf ``index`` was when this was taken."""
        mine = self.leaves[index]
        if isinstance(mine, Tensor):
            return mine is other and version(other) == self.versions[index]
        if index in self._records:
            alike = mine is other or (type(mine) is type(other) and _is_frozen(mine))
            return alike and self._records[index].holds_of(attributes_of(other))
        return type(mine) is type(other) and is_constant(mine) and bool(mine == other)

    def may_equal(self, index: int, other: Any) -> bool:
        """Whether ``other`` is another tensor of the form of leaf ``index``, both plain data.

        Whether it has the same values is for the caller to see: that may have to wait for them.
        """
        mine = self.leaves[index]
        return (
            type(mine) is type(other) is Tensor
            and not (mine.requires_grad or other.requires_grad)
            and (mine.shape, mine.stride()) == (other.shape, other.stride())
            and (mine.dtype, mine.device) == (other.dtype, other.device)
            and version(mine) == self.versions[index]
        )

    def holds_of(self, tree: Any) -> bool:
        """Whether ``tree`` is, leaf by leaf, what it was when this was taken."""
        leaves, spec = pytree.tree_flatten(tree)
        return spec == self.spec and all(map(self.same, range(len(leaves)), leaves))

    def untouched_in(self, tree: Any) -> bool:
        """The same of a tree in which nobody looks into objects that are not data."""
        leaves, spec = pytree.tree_flatten(tree)
        return spec == self.spec and all(map(self._untouched, range(len(leaves)), leaves))

    def _untouched(self, index: int, other: Any) -> bool:
        mine = self.leaves[index]
        if index in self._records and mine is other:
            return self._records[index].untouched_in(attributes_of(other))
        opaque = not isinstance(mine, Tensor) and index not in self._records
        return (opaque and mine is other) or self.same(index, other)


class Arguments(Snapshot):
    """The arguments of one block call, and what the containers among them held."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        super().__init__((args, kwargs))
        self.args = args
        self.kwargs = kwargs
        self.contents = [Contents.of(held) for held in containers(*args, *kwargs.values())]
        given: dict[int | str, Any] = {}
        if self.contents:
            given = dict(enumerate(args)) | kwargs
        self._containers = {key: Snapshot(v) for key, v in given.items() if containers(v)}

    def written(self) -> int | str | None:
        """The first argument whose containers do not hold any more what they held: its key."""
        for key, before in self._containers.items():
            if not before.untouched_in(
                self.args[key] if isinstance(key, int) else self.kwargs[key]
            ):
                return key
        return None


def _is_frozen(record: Any) -> bool:
    parameters = getattr(type(record), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def is_constant(value: Any) -> bool:
    """Whether ``value`` is an object of a kind that no loop changes in place."""
    return value is None or isinstance(value, _CONSTANTS)


def is_opaque(value: Any) -> bool:
    """Whether ``value`` is an object that could be changed in place without being seen."""
    return not (isinstance(value, Tensor) or is_constant(value) or is_record(value))


def signature_of(tree: Any) -> tuple[Any, ...]:
    """What a loop can learn of a block's result without reading it."""
    leaves, spec = pytree.tree_flatten(tree)
    return spec, *(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.stride())
        if isinstance(leaf, Tensor)
        else None
        for leaf in leaves
    )


def place_of(spec: pytree.TreeSpec, leaves: Sequence[Any], index: int) -> tuple[int | str, int]:
    """Which argument leaf ``index`` belongs to, by position or name, and which leaf of it it is."""
    args, kwargs = pytree.tree_unflatten(list(leaves), spec)
    first = 0
    for key, value in (*enumerate(args), *kwargs.items()):
        last = first + len(pytree.tree_leaves(value))
        if index < last:
            return key, index - first
        first = last
    raise IndexError(index)


def argument_name(block: torch.nn.Module, key: int | str) -> str:
    """Name of the parameter that an argument of a block is for."""
    if isinstance(key, str):
        return key
    parameters = list(inspect.signature(what_runs(block)).parameters)[1:]
    return parameters[key] if key < len(parameters) else f"number {key}"
