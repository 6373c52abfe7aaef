"""Proof that nothing but the carried state passes between two blocks of a stack.

A segment runs several blocks inside one checkpoint call, so the model's own loop no longer
sees what happens between them. That is only right when the loop does nothing there but hand
what block ``k`` returned to block ``k + 1``. Two things are therefore observed:

* *writes*, by identity: each argument of block ``k + 1`` either **is** an object that block
  ``k`` returned (it is carried) or **is** the very argument that block ``k`` got;
* *reads*, by :class:`Handed`: what the loop holds between two blocks is an alias that says
  when an operation uses it, and whose lifetime says whether the loop kept it (a list of
  hidden states, the samples of a ControlNet).

Values are compared leaf by leaf, so state that travels in tuples, lists or dicts counts too.
What cannot be watched (tensors of another class, objects that could be changed in place) is no
link; neither is a boundary at which grad mode, autocast or the random state changes.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree  # private, but what torch.utils.checkpoint itself uses

from .stacks import all_modules, unwrapped

Tensor = torch.Tensor

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

# Questions about a tensor that every block of a stack answers alike; asking is not reading.
_METADATA = frozenset(
    {
        Tensor.dim,
        Tensor.ndimension,
        Tensor.size,
        Tensor.numel,
        Tensor.element_size,
        Tensor.stride,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.is_inference,
        Tensor.get_device,
        Tensor.__len__,
        Tensor.__hash__,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_tensor,
        torch.numel,
        *(
            getattr(Tensor, name).__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "ndim",
                "layout",
                "requires_grad",
                "is_leaf",
                "is_cuda",
                "is_cpu",
                "is_meta",
                "is_sparse",
                "is_quantized",
                "itemsize",
                "nbytes",
            )
        ),
    }
)


class Handed(torch.Tensor):
    """What the model's loop holds between two blocks: an alias of a block's output.

    Blocks never see it; they get ``plain``. Every other operation on it is reported to
    ``on_read`` with the operation's name, and carries on with ``plain``, so its result and
    its gradient are what they would have been. Asking for its shape, dtype and the like is
    reported to ``on_look``. (Code that gets at the memory past torch's own functions, such as
    TorchScript or DLPack, is not seen.)
    """

    plain: Tensor
    on_read: Callable[[str], None]
    on_look: Callable[[], None]

    @staticmethod
    def of(plain: Tensor, on_read: Callable[[str], None], on_look: Callable[[], None]) -> "Handed":
        handed = plain.as_subclass(Handed)
        handed.plain = plain
        handed.on_read = on_read
        handed.on_look = on_look
        return handed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        handed = [leaf for leaf in leaves if isinstance(leaf, Handed)]
        plain_args, plain_kwargs = pytree.tree_unflatten([plain(leaf) for leaf in leaves], spec)
        before = [_identity(alias.plain) for alias in handed]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*plain_args, **plain_kwargs)
        if func in _METADATA:
            for alias in handed:
                alias.on_look()
            return result
        for alias, identity in zip(handed, before, strict=True):
            if result is alias.plain and _identity(result) == identity:
                return alias  # .to() or .contiguous() with nothing to do
        for alias in handed:
            alias.on_read(getattr(func, "__name__", str(func)))
        return result


def plain(value: Any) -> Any:
    """The block's own output behind a :class:`Handed`; anything else as it is."""
    return value.plain if isinstance(value, Handed) else value


def plain_tree(tree: Any) -> Any:
    """``tree`` with every :class:`Handed` replaced by what it stands for."""
    return pytree.tree_map_only(Handed, plain, tree)


def read(tree: Any, use: str) -> None:
    """Report ``use`` of every :class:`Handed` in ``tree``."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Handed):
            leaf.on_read(use)


def is_ordinary(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor of no class of its own, which an alias can stand for."""
    return type(leaf) is Tensor


def hand_out(
    tree: Any, on_read: Callable[[str], None], on_look: Callable[[], None] = lambda: None
) -> Any:
    """``tree`` with every plain tensor replaced by a :class:`Handed`."""

    def alias(leaf: Any) -> Any:
        return Handed.of(leaf, on_read, on_look) if is_ordinary(leaf) else leaf

    return pytree.tree_map(alias, tree)


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


def attributes(block: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a block, which a loop may set just before it calls the block."""
    return dict(unwrapped(block).__dict__)


def weights(block: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Which tensors the parameters of a block are, and where; a loop may swap them in and out."""
    modules = all_modules([block])
    return [_place(p) for m in modules for p in m._parameters.values() if p is not None]


def first_matrix(block: torch.nn.Module) -> tuple[Any, ...]:
    """The same of one matrix of the block: quick to ask, and what whoever swaps takes first."""
    matrices = (parameter for parameter in block.parameters() if parameter.dim() > 1)
    return next(map(_place, matrices), ())


def _place(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
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


def unwatchable(tree: Any) -> str | None:
    """The type of a leaf of a block's result that cannot be watched, if there is one."""
    for leaf in pytree.tree_leaves(tree):
        if leaf is not None and not is_ordinary(leaf):
            return type(leaf).__name__
    return None


def signature_of(tree: Any) -> tuple[Any, ...]:
    """What a loop can learn of a block's result without reading it."""
    leaves, spec = pytree.tree_flatten(tree)
    return spec, *(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.stride())
        if isinstance(leaf, Tensor)
        else None
        for leaf in leaves
    )


def surroundings() -> tuple[Any, ...]:
    """Grad mode and autocast, in which a block's operations run."""
    return (
        torch.is_grad_enabled(),
        *(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _devices()
        ),
    )


def _devices() -> list[str]:
    return sorted({"cpu", torch.get_device_module().__name__.rpartition(".")[2]})


@contextmanager
def within(around: tuple[Any, ...]) -> Iterator[None]:
    """Run with the grad mode and the autocast that ``surroundings`` returned."""
    with torch.set_grad_enabled(around[0]), ExitStack() as stack:
        for device, (enabled, dtype) in zip(_devices(), around[1:], strict=True):
            stack.enter_context(torch.autocast(device, dtype, enabled))
        yield


def random_states() -> list[Tensor]:
    """The state of the default generators of the CPU and of the accelerator in use."""
    states = [torch.get_rng_state()]
    accelerator = torch.get_device_module()
    if accelerator is not torch.cpu and accelerator.is_available():
        states.append(accelerator.get_rng_state())
    return states


def set_random_states(states: list[Tensor]) -> None:
    """Go back to what ``random_states`` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module().set_rng_state(state)


def inside_checkpoint() -> bool:
    """Whether a checkpoint call of somebody else runs around this code."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


def version(value: Any) -> int:
    """How often a tensor was written in place; 0 for everything that does not count."""
    value = plain(value)
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """What an operation in place changes: the values, or the tensor's place in the graph."""
    return version(tensor), tensor.grad_fn, tensor.requires_grad


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
