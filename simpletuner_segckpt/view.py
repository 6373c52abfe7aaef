"""The way into the loop of a model that has no checkpoint function to replace.

A list of blocks gets the class :class:`BlockView`. While a training forward of its model runs,
iterating or indexing it yields :class:`Turn` objects that look like the blocks but are run by
the model's door; at all other times it is the list it was. One turn per block, so the loop's
own index stays true and what the loop does between two blocks is seen by the door.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from torch.nn import Module, ModuleList

from .errors import UnsupportedModel
from .stacks import block_list


class Doorway(Protocol):
    """What a view needs of a door."""

    @property
    def running(self) -> bool: ...

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any: ...


class Turn:
    """A block whose call goes through the door; every other attribute is the block's own."""

    def __init__(self, block: Module, door: Doorway):
        object.__setattr__(self, "_block", block)
        object.__setattr__(self, "_door", door)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._door(self._block, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._block, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # loops ask isinstance
        return type(self._block)


class BlockView(ModuleList):
    """The block list of a model without a checkpoint function. Its door is ``_segckpt_door``."""

    _segckpt_door: Doorway

    def __iter__(self) -> Iterator[Any]:
        blocks = super().__iter__()
        return map(self._turn, blocks) if self._active() else blocks

    def __getitem__(self, index: Any) -> Any:
        if not self._active():
            # A slice is an ordinary list: only the whole stack is scheduled.
            return (
                ModuleList(list(self)[index])
                if isinstance(index, slice)
                else super().__getitem__(index)
            )
        if isinstance(index, slice):
            return [self._turn(block) for block in list(super().__iter__())[index]]
        return self._turn(super().__getitem__(index))

    def _active(self) -> bool:
        return self._segckpt_door.running

    def _turn(self, block: Module) -> Turn:
        return Turn(block, self._segckpt_door)


def put_view(model: Module, path: str, door: Doorway) -> None:
    """Make the list at ``path`` a view. Raises ``UnsupportedModel`` if it cannot be one."""
    blocks = block_list(model, path)
    check_viewable(blocks, path)
    view: Any = blocks
    view.__class__ = BlockView
    view._segckpt_door = door


def check_viewable(blocks: ModuleList | None, path: str) -> None:
    """Raises ``UnsupportedModel`` for a list with a class of its own, which a view would hide."""
    if type(blocks) not in (ModuleList, BlockView):
        raise UnsupportedModel(f"{path} is a {type(blocks).__name__}, not a plain nn.ModuleList")


def take_view(model: Module, path: str) -> None:
    """Make the view at ``path`` the plain list it was; anything else stays as it is."""
    blocks = block_list(model, path)
    if isinstance(blocks, BlockView):
        view: Any = blocks
        del view._segckpt_door
        view.__class__ = ModuleList
