"""The way into the loop of a model that has no checkpoint function, or must not use it.

The class of each block becomes a subclass of itself that differs in one method: while a
training forward of the model runs, a call of the block goes to the model's door. The loop
keeps its blocks, its lists, and every test of identity or ``isinstance`` that it makes of them.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

from torch.nn import Module

from .stacks import uncompiled

DOOR = "_segckpt_door"  # the attribute of a block that holds its door


class Doorway(Protocol):
    """What a block needs of a door."""

    @property
    def open_for_blocks(self) -> bool: ...

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any: ...


class Intercepted(Module):
    """Mixed in before the class of a block."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Intercepted):
            # Released, but torch.compile's wrapper remembers this very method.
            return self(*args, **kwargs)
        door: Doorway | None = self.__dict__.get(DOOR)
        if door is None or not door.open_for_blocks:
            return super().__call__(*args, **kwargs)
        return door(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class has no name by which a pickle could find it; it is made anew.
        return _new, (plain_class(type(self)),), self.__getstate__()


def intercept(blocks: Iterable[Any], door: Doorway) -> None:
    """Lead the calls of ``blocks`` through ``door``."""
    for block in blocks:
        if uncompiled(block) is not block:
            release([uncompiled(block)])  # its wrapper is what the loop calls
        block.__dict__[DOOR] = door
        if not isinstance(block, Intercepted):
            # torch.compile's wrapper passes attributes that are set on it on to the block.
            cls: Any = type(block)
            object.__setattr__(block, "__class__", _intercepted(cls))


def release(blocks: Iterable[Any]) -> None:
    """Give ``blocks`` their own class back."""
    for block in blocks:
        block.__dict__.pop(DOOR, None)
        if plain_class(type(block)) is not type(block):
            object.__setattr__(block, "__class__", plain_class(type(block)))


def original_call(block: Module) -> Any:
    """What runs ``block`` itself, past the door."""
    return super(Intercepted, block).__call__ if isinstance(block, Intercepted) else block


def plain_class(cls: type) -> type:
    """The class that was intercepted. Others, also those derived since (FSDP2), stay."""
    return cls.__bases__[1] if cls.__bases__[:1] == (Intercepted,) else cls


@cache
def _intercepted(cls: type) -> type:
    # Regional compilation and device maps go by the class's name.
    attributes = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (Intercepted, cls), attributes)


def _new(cls: type) -> Module:
    made: Any = _intercepted(cls)
    return made.__new__(made)
