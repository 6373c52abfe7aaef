"""Hooks on the feed-forward and the attention inside a block.

A schedule is about blocks. What is recomputed, kept or offloaded *inside* a block is about
submodules that a family file names. Their calls are intercepted as those of blocks are (see
``model.interception``); whoever calls the block says with ``treated`` how they are to run, and
without that they run plainly.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch.nn import Module

from ..model.interception import RECEIVER, intercept, original_call
from ..model.wrappers import unwrapped
from .state import StatefulRecompute

SubmoduleKind = Literal["feed_forward", "attention"]


# Takes a function and its arguments and calls it: plainly, under a checkpoint call, with its saved
# tensors moved.
CallWrapper = Callable[..., Any]


class _Around(threading.local):
    wrappers: Mapping[SubmoduleKind, CallWrapper] = {}


_around = _Around()


class Owner(Protocol):
    """What a hook needs of the entry of its model."""

    def feed_forward(self, call: CallWrapper, *args: Any, **kwargs: Any) -> Any: ...


class SubmoduleHook:
    """What the calls of one feed-forward or attention go through.

    recomputed: whether it is a feed-forward that is recomputed by itself. ``owner`` runs it where
        its block is compiled, so that no run of the block is around it. blocks: all of its stack.
    """

    def __init__(
        self, kind: SubmoduleKind, owner: Owner, recomputed: bool, blocks: Sequence[Module]
    ):
        self.kind = kind
        self.owner = owner
        self.recomputed = recomputed
        self.blocks = blocks

    @property
    def takes_calls(self) -> bool:
        if torch.compiler.is_compiling():
            return self.recomputed and torch.is_grad_enabled()
        return self.kind in _around.wrappers

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        call: CallWrapper = original_call(module)
        if torch.compiler.is_compiling():
            return self.owner.feed_forward(call, *args, **kwargs)
        if self.recomputed:
            call = StatefulRecompute([module], call, self.blocks)
        others = dict(_around.wrappers)
        run = others.pop(self.kind)
        with treated(others):  # a wrapper of a part may hold what was the part before
            return run(call, *args, **kwargs)


@contextmanager
def treated(wrappers: Mapping[SubmoduleKind, CallWrapper]) -> Iterator[None]:
    """Within this, submodules run through the wrapper of their kind."""
    before = _around.wrappers
    _around.wrappers = wrappers
    try:
        yield
    finally:
        _around.wrappers = before


def intercept_submodules(block: Module, paths: Iterable[str], part: "SubmoduleHook") -> None:
    """Lead the calls of the modules at ``paths`` through ``part``, where they do not go already."""
    found = submodules_of(block, paths)
    intercept([m for m in found if not isinstance(m.__dict__.get(RECEIVER), SubmoduleHook)], part)


def submodules_of(block: Module, paths: Iterable[str]) -> list[Module]:
    """The modules at ``paths`` in ``block``; not every block of a stack has them all."""
    found = []
    for path in paths:
        part: Any = unwrapped(block)
        for name in path.split("."):
            part = getattr(part, name, None)
        if isinstance(part, Module):
            found.append(part)
    return found
