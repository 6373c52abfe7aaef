"""Blocks that a loop of another module calls, past the forward of their own model.

A wrapper may go over the blocks of an inner model and never call that. No hook of the model sees
it, so the first block of each stack tells.
"""

import weakref
from typing import Any, Protocol

from torch.nn import Module


class Noticing(Protocol):
    """What is told that a block is called."""

    def notice(self, model: Module, block: Module) -> None: ...


class Notice:
    """Forward pre-hook of the first block of a stack. Keeps neither the model nor its entry alive.

    That of a block which is copied without its model, or pickled, does nothing; an entry puts it in
    its place again when its model trains.
    """

    def __init__(self, entry: Noticing | None = None, model: Module | None = None):
        self._entry = None if entry is None else weakref.ref(entry)
        self._model = None if model is None else weakref.ref(model)

    def __call__(self, block: Module, args: tuple) -> None:
        entry = None if self._entry is None else self._entry()
        model = None if self._model is None else self._model()
        if entry is not None and model is not None:
            entry.notice(model, block)

    @property
    def is_idle(self) -> bool:
        return self._entry is None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Notice":
        twins = [memo.get(id(ref and ref())) for ref in (self._entry, self._model)]
        return Notice(*twins) if None not in twins else Notice()

    def __reduce__(self) -> Any:
        return Notice, ()
