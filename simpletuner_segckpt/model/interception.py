"""Calls of a block, led to another object by the block's own class.

For models that have no checkpoint function or must not use it. The class of each block becomes a
subclass of itself that differs in one method: while a training forward of the model runs, a call
of the block goes to the model's entry. The loop keeps its blocks, its lists, and every test of
identity or ``isinstance`` that it makes of them.

A loop may also run the parts of a block in a function, and never call the block. Then the calls of
that function are led away, of blocks that say so; every other block it runs as before.
"""

import copyreg
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial, update_wrapper
from typing import Any, Protocol

from torch.nn import Module

from ..messages.errors import UnsupportedModel
from .wrappers import unwrapped, wrappers

RECEIVER = "_segckpt_receiver"  # the attribute of a block that says where its calls go
FUNCTION = "_segckpt_function"  # and that of one that a function runs: which


class CallReceiver(Protocol):
    """Where the calls of blocks can go."""

    @property
    def takes_calls(self) -> bool: ...

    def __call__(self, block: Any, /, *args: Any, **kwargs: Any) -> Any: ...


class Intercepted(Module):
    """Mixed in before the class of a block."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Intercepted):
            # Released, but torch.compile's wrapper remembers this very method.
            return self(*args, **kwargs)
        entry: CallReceiver | None = self.__dict__.get(RECEIVER)
        if entry is None or FUNCTION in self.__dict__ or not entry.takes_calls:
            return super().__call__(*args, **kwargs)
        return entry(self, *args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Classes that register or refuse their subclasses are not to know of this one."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy of a block, or of a model, is made of plain blocks. In a copy of a model that has
        # an entry, that intercepts them again.
        made = list(super().__reduce_ex__(protocol))
        if made[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            made[0] = _new  # pickle wants the object's very class for the other one
        made[1] = tuple(plain_class(a) if a is type(self) else a for a in made[1])
        if len(made) > 2 and isinstance(made[2], dict):
            ours = (RECEIVER, FUNCTION)
            made[2] = {key: value for key, value in made[2].items() if key not in ours}
        return tuple(made)


class BlockFunction:
    """In the place of a function that runs the block that is its first argument."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = getattr(args[0], "__dict__", {}) if args else {}
        entry: CallReceiver | None = given.get(RECEIVER) if FUNCTION in given else None
        if entry is None or not entry.takes_calls:
            return self.function(*args, **kwargs)
        return entry(*args, **kwargs)


def block_function(model_class: type, name: str) -> BlockFunction:
    """What stands for the function ``name`` of the module of a model's class, from now on.

    Blocks that no schedule is on it runs as ever. Raises ``UnsupportedModel`` if there is none.
    """
    for cls in model_class.__mro__:
        module = sys.modules.get(cls.__module__)
        found = getattr(module, name, None)
        if isinstance(found, BlockFunction):
            return found
        if callable(found):
            function = BlockFunction(found)
            setattr(module, name, function)
            return function
    raise UnsupportedModel(
        f"{model_class.__name__}: its module has no {name}(), which is to run its blocks; "
        "native=True has a class with setters of its own carry the keys out"
    )


def intercept(
    blocks: Iterable[Any], entry: CallReceiver, function: BlockFunction | None = None
) -> None:
    """Lead the calls of ``blocks`` through ``entry``, or of the ``function`` that runs them."""
    for block in blocks:
        if block.__dict__.get(RECEIVER) is entry:
            continue
        release(wrappers(block)[1:])  # the outermost is what the loop calls
        block.__dict__[RECEIVER] = entry
        if function is not None:
            block.__dict__[FUNCTION] = function
        if not isinstance(block, Intercepted):
            # torch.compile's wrapper passes attributes that are set on it on to the block.
            cls: Any = type(block)
            object.__setattr__(block, "__class__", _intercepted(cls))


def release(blocks: Iterable[Any]) -> None:
    """Give ``blocks`` their own class back."""
    for block in blocks:
        block.__dict__.pop(RECEIVER, None)
        block.__dict__.pop(FUNCTION, None)
        if plain_class(type(block)) is not type(block):
            object.__setattr__(block, "__class__", plain_class(type(block)))


def original_call(block: Module) -> Any:
    """What runs ``block`` itself, wherever its calls go."""
    function = getattr(block, "__dict__", {}).get(FUNCTION)
    if function is not None:
        return partial(function.function, block)
    return super(Intercepted, block).__call__ if isinstance(block, Intercepted) else block


def what_runs(block: Module) -> Callable[..., Any]:
    """The function that is called with ``block`` and the arguments of its call."""
    function = block.__dict__.get(FUNCTION)
    return function.function if function is not None else type(unwrapped(block)).forward


def plain_class(cls: type) -> type:
    """The class that was intercepted; of one derived from that since (FSDP2), its like."""
    if cls is Intercepted or Intercepted not in cls.__mro__:
        return cls
    return cls.__bases__[1] if cls.__bases__[0] is Intercepted else _derived_anew(cls)


@cache
def _derived_anew(cls: type) -> type:
    bases = tuple(plain_class(base) for base in cls.__bases__)
    kept = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, kept)


@cache
def _intercepted(cls: type) -> type:
    # Regional compilation and device maps go by the class's name.
    attributes = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    try:
        return type(cls)(cls.__name__, (Intercepted, cls), attributes)
    except TypeError as error:
        raise UnsupportedModel(f"the blocks' class {cls.__name__}: {error}") from None


def _new(cls: Any, *args: Any) -> Any:
    return cls.__new__(cls, *args)
