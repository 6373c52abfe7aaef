"""Blocks that are called past the forward of their own model.

A wrapper may go over the blocks of an inner model and never call that, or a script may call the
model's ``forward`` itself. No hook of the model sees it, so the first block of each stack tells.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ..model.stacks import blocks_of
from ..private.of_torch import hooks_on
from ..schedules.conditions import Condition
from .planner import ForwardPlanner
from .runs import recomputable


class OutsideCalls:
    """Such calls of the blocks of one model, each of which runs as one that is covered, by itself.

    seen: whether another module was seen to call its blocks.
    """

    condition = Condition(
        "call",
        "past the model's forward",
        "each block that came ran as one that is covered, by itself",
    )

    def __init__(self, forwards: ForwardPlanner):
        self.forwards = forwards
        self.seen = False
        self._model: weakref.ref[Module] | None = None

    @property
    def model(self) -> Module | None:
        """The model whose blocks were seen to be called, as long as it is there."""
        return None if self._model is None else self._model()

    def see(self, model: Module, block: Module) -> None:
        """A loop of another module calls ``block`` of ``model``."""
        self.seen = True
        self._model = weakref.ref(model)
        self.forwards.messages.warn(
            "past-the-hooks",
            f"a {type(block).__name__} of {type(model).__name__} was called past the forward of "
            "that model, by a loop of another module: from the next one on, every block runs as "
            "one that is covered, by itself; call apply() on the outer model for its schedule",
        )

    def run(self, block: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run ``block`` as one that is covered."""
        if not self.seen:
            self.forwards.messages.warn(
                "past-the-hooks",
                "the model's forward was entered past its hooks (was `.forward` called directly?); "
                "every block runs as one that is covered, by itself",
            )
        wrappers = self.forwards.backend.begin()
        result = wrappers.covered(self.forwards.config.keep)(recomputable(block), *args, **kwargs)
        if wrappers.offload is not None:
            wrappers.offload.finish()
        return result


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


def watch_first_blocks(
    model: Module, stacks: Iterable[str], entry: Noticing
) -> Iterator[RemovableHandle]:
    """Have the first block of each stack tell ``entry`` when it is called, where none does yet."""
    for path in stacks:
        for block in blocks_of(model, path)[:1]:
            hooks = [hook for _, hook in hooks_on(block, "forward pre-hook")]
            if not any(isinstance(hook, Notice) and not hook.is_idle for hook in hooks):
                yield block.register_forward_pre_hook(Notice(entry, model))
