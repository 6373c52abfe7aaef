"""Models that are noticed when they train, whether or not the script switched them on.

Not every trainer enables checkpointing by a method of diffusers or transformers: its models may
have a flag, a method of their own, or nothing. torch calls a global forward pre-hook before each
module; one of a class that is looked for gets its schedule there, before its first training forward
runs. The hook is taken away at the second one, since all models of a training step have run by
then.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from warnings import filterwarnings
from weakref import WeakSet

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from ..model.wrappers import is_compiled, unwrap
from ..private.of_torch import arguments_by_name, pytree
from .apply import entry_of


class Noticing:
    """The hook.

    wanted: whether models of a class are looked for. notice: gives a model its schedule. done:
    whether no other model need be looked for, once a model that has been noticed trains again.
    """

    def __init__(
        self,
        wanted: Callable[[type], bool],
        notice: Callable[[Module], None],
        done: Callable[[], bool],
    ):
        self._wanted = wanted
        self._notice = notice
        self._done = done
        self._kinds: dict[type, bool] = {}  # whether an instance may be, or wrap, what is wanted
        self._noticed: WeakSet[Module] = WeakSet()
        self._handle = register_module_forward_pre_hook(self)

    def look_for(self, kind: type) -> None:
        """Models of this class count, too: one has its schedule."""
        self._kinds[kind] = True

    def stop(self) -> None:
        """Take the hook away."""
        self._handle.remove()

    def __call__(self, module: Module, args: tuple) -> None:
        if torch.compiler.is_compiling():  # traced: it must leave nothing in the graph
            return
        kind = type(module)
        looked_for = self._kinds.get(kind)
        if looked_for is None:
            wraps = unwrap(module) is not module  # whatever that is
            looked_for = self._kinds[kind] = wraps or self._wanted(kind)
        if looked_for and torch.is_grad_enabled():
            self._look(module, args, sys._getframe(1))

    def _look(self, module: Module, args: tuple, frame: FrameType) -> None:
        """``module``, or what it wraps, is of a class that is looked for and may be training."""
        base = unwrap(module)
        if base in self._noticed:
            if module is base and self._done():
                self.stop()
            return
        arguments = arguments_by_name(frame)
        had = entry_of(base)
        if had is None and not (self._wanted(type(base)) and _trains(module, (args, arguments))):
            return
        self._notice(base)
        if self._done() and any(is_compiled(inner) for inner in module.modules()):
            self.stop()  # what is compiled while a hook is there is compiled again without it
        if module is not base:  # its own hooks are still to be called
            return
        self._noticed.add(base)
        entry = entry_of(base)
        if entry is not None and entry is not had:
            # torch has listed the hooks that it calls before this forward.
            entry.open_in(frame, base, args, arguments)


def _trains(model: Module, arguments: Any) -> bool:
    """Whether something in a forward of ``model`` needs a gradient."""
    return any(parameter.requires_grad for parameter in model.parameters()) or any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad
        for leaf in pytree.tree_leaves(arguments)
    )


@contextmanager
def noticing(
    wanted: Callable[[type], bool], notice: Callable[[Module], None], done: Callable[[], bool]
) -> Iterator[Noticing]:
    """Within this, models of ``wanted`` classes are handed to ``notice`` when they first train."""
    # What torch says of any global hook; this one looks through the compiler's wrapper.
    filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
    hook = Noticing(wanted, notice, done)
    try:
        yield hook
    finally:
        hook.stop()
