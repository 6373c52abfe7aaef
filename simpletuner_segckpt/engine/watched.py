"""Tensors that say when the model's loop uses them."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch.utils.checkpoint
from torch import Tensor

from ..private import of_torch
from ..private.of_torch import DisableTorchFunctionSubclass, pytree
from ..recompute.containers import containers, held_by, is_container

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


# What gives a tensor another form and computes nothing.
_PERMUTES = frozenset({Tensor.permute, torch.permute})
_TRANSPOSES = frozenset({Tensor.transpose, torch.transpose})
_REARRANGES = frozenset(
    {
        *_PERMUTES,
        *_TRANSPOSES,
        Tensor.contiguous,
        *(
            getattr(owner, name)
            for name in ("reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
            for owner in (Tensor, torch)
        ),
        Tensor.view,
    }
)


class WatchedTensor(torch.Tensor):
    """What the model's loop holds between two blocks: an alias of a block's output.

    Blocks never see it; they get ``plain``. Every other operation on it is reported to
    ``on_read`` with the operation's name, and carries on with ``plain``, so its result and
    its gradient are what they would have been. Asking for its shape, dtype and the like is
    reported to ``on_look``, and so is what only gives it another form: the result is watched in
    its turn, keeps its ``source`` alive, and is the source again once its dimensions are back in
    their ``order``. (Code that gets at the memory past torch's own functions, such as
    TorchScript or DLPack, is not seen.)
    """

    plain: Tensor
    on_read: Callable[[str], None]
    on_look: Callable[[], None]
    source: "WatchedTensor | None" = None
    order: tuple[int, ...] | None = None  # of the source's dimensions, while they are the same

    @staticmethod
    def of(
        plain: Tensor, on_read: Callable[[str], None], on_look: Callable[[], None]
    ) -> "WatchedTensor":
        """An alias of ``plain``."""
        return WatchedTensor.standing_for(plain, plain, on_read, on_look)

    @staticmethod
    def standing_for(
        alias: Tensor, plain: Tensor, on_read: Callable[[str], None], on_look: Callable[[], None]
    ) -> "WatchedTensor":
        """The same, with ``alias`` in the place of what shares its memory with ``plain``."""
        watched = alias.as_subclass(WatchedTensor)
        watched.plain = plain
        watched.on_read = on_read
        watched.on_look = on_look
        return watched

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        watched = [leaf for leaf in leaves if isinstance(leaf, WatchedTensor)]
        plain_args, plain_kwargs = pytree.tree_unflatten([plain(leaf) for leaf in leaves], spec)
        before = [_identity(alias.plain) for alias in watched]
        with DisableTorchFunctionSubclass():
            result = func(*plain_args, **plain_kwargs)
        if func in _METADATA:
            for alias in watched:
                alias.on_look()
            return result
        for alias, identity in zip(watched, before, strict=True):
            if result is alias.plain and _identity(result) == identity:
                return alias  # .to() or .contiguous() with nothing to do
        forms = func in _REARRANGES or (func is Tensor.__getitem__ and _is_part(plain_args[1]))
        if forms and len(watched) == 1 and type(result) is Tensor:
            return watched[0]._rearranged(result, func, plain_args, plain_kwargs)
        for alias in watched:
            alias.on_read(getattr(func, "__name__", str(func)))
        return result

    def _rearranged(
        self, result: Tensor, func: Any, args: tuple, kwargs: dict[str, Any]
    ) -> "WatchedTensor":
        """What stands for ``result``, this tensor in another form."""
        self.on_look()
        source = self if self.source is None else self.source
        order = tuple(range(self.plain.dim())) if self.source is None else self.order
        order = None if order is None or kwargs else _reordered(order, func, args[1:])
        in_order = tuple(range(source.plain.dim()))
        if order == in_order and result.stride() == source.plain.stride():
            return source
        watched = WatchedTensor.of(result, self.on_read, self.on_look)
        watched.source, watched.order = source, order
        return watched


def _is_part(index: Any) -> bool:
    """Whether what stands at ``index`` of a tensor is a view of it."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(p is None or p is ... or type(p) in (int, slice) for p in parts)


def _reordered(order: tuple[int, ...], func: Any, dims: tuple) -> tuple[int, ...] | None:
    """``order`` after ``func`` with these arguments; None where dimensions are not the same."""
    if func is Tensor.contiguous:
        return order
    if func in _PERMUTES:
        wanted = dims[0] if isinstance(dims[0], (tuple, list)) else dims
        return tuple(order[dim] for dim in wanted)
    if func in _TRANSPOSES and all(isinstance(dim, int) for dim in dims):
        changed = list(order)
        first, second = dims
        changed[first], changed[second] = changed[second], changed[first]
        return tuple(changed)
    return None


def plain(value: Any) -> Any:
    """The block's own output behind a :class:`WatchedTensor`; anything else as it is."""
    return value.plain if isinstance(value, WatchedTensor) else value


def plain_tree(tree: Any) -> Any:
    """``tree`` without aliases for good: containers that held some hold what they stand for."""
    return _plain(tree, [], set())


@contextmanager
def plain_arguments(args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """``args`` and ``kwargs`` without aliases while a block runs.

    A block may write to the containers that it is given, so these are the same objects: what stands
    behind each alias takes its place in them, and gives it back afterwards. Only tuples are made
    anew, and only around an alias.
    """
    replaced: list[_Replaced] = []
    try:
        args, values = _plain((args, tuple(kwargs.values())), replaced, set())
        yield args, dict(zip(kwargs, values, strict=True))
    finally:
        for holder, key, before, given in reversed(replaced):
            if _held(holder, key) is given:
                holder[key] = before
            else:
                report_use(before, "a block took it out of its container")


# A list, deque, dict or the attributes of an object; a place in it; what was there before, and what
# a block finds there.
_Replaced = tuple[Any, Any, Any, Any]


def _plain(value: Any, replaced: list[_Replaced], seen: set[int]) -> Any:
    if isinstance(value, Tensor):
        return plain(value)
    if isinstance(value, tuple):
        inner = [_plain(part, replaced, seen) for part in value]
        if all(map(is_, inner, value)):
            return value
        make: Any = getattr(type(value), "_make", type(value))  # of a named tuple
        return make(inner)
    if is_container(value) and id(value) not in seen:
        seen.add(id(value))
        for holder in _holders(value):
            for key, part in list(
                holder.items() if isinstance(holder, dict) else enumerate(holder)
            ):
                new = _plain(part, replaced, seen)
                if new is not part:
                    holder[key] = new
                    replaced.append((holder, key, part, new))
    return value


def _holders(container: Any) -> Iterator[Any]:
    """Where a container holds things, as lists and dicts that can be written to."""
    if isinstance(container, (dict, list, deque)):
        yield container
    if attributes := getattr(container, "__dict__", None):
        yield attributes


def _held(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except LookupError:
        return None


def watched_in(tree: Any) -> list["WatchedTensor"]:
    """Every :class:`WatchedTensor` in ``tree``, those in containers included."""
    found = [tree, *(part for held in containers(tree) for part in held_by(held))]
    return [part for value in found for part in _loose(value) if isinstance(part, WatchedTensor)]


def _loose(value: Any) -> Iterator[Any]:
    """What is in nested tuples."""
    if isinstance(value, tuple):
        for part in value:
            yield from _loose(part)
    else:
        yield value


def report_use(tree: Any, use: str) -> None:
    """Report ``use`` of every :class:`WatchedTensor` in ``tree``."""
    for alias in watched_in(tree):
        alias.on_read(use)


def version(value: Any) -> int:
    """How often a tensor was written in place; 0 for everything that does not count."""
    value = plain(value)
    return of_torch.version(value) if isinstance(value, Tensor) else 0


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """What an operation in place changes: the values, or the tensor's place in the graph."""
    return version(tensor), tensor.grad_fn, tensor.requires_grad
