"""Feed-forwards and attentions inside the blocks, run as the block around them wants it.

The schedule is about blocks. What is recomputed, kept or offloaded *inside* a block is about
parts of it, which a family file names. The calls of those parts are intercepted as calls of
blocks are (see ``intercept``); a block's run says with ``treated`` how they are to run, and
without that they run plainly.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch.nn import Module

from .intercept import DOOR, intercept, original_call
from .repeat import Repeatable
from .report import Tally
from .stacks import unwrapped

Kind = Literal["feed_forward", "attention"]

# Calls a function with the arguments that follow it: plainly, or to be recomputed, or ...
Runner = Callable[..., Any]


class _Around(threading.local):
    """What this thread is in the middle of."""

    runners: Mapping[Kind, Runner] = {}
    tally: Tally | None = None


_around = _Around()


class Owner(Protocol):
    """What a part needs of the door of its model."""

    def feed_forward(self, call: Runner, *args: Any, **kwargs: Any) -> Any: ...


class Part:
    """The way through which the calls of one part come.

    recomputed: whether it is a feed-forward that is recomputed by itself. ``owner`` runs it where
        its block is compiled, so that no run of the block is around it.
    """

    def __init__(self, kind: Kind, owner: Owner, recomputed: bool):
        self.kind = kind
        self.owner = owner
        self.recomputed = recomputed

    @property
    def open_for_blocks(self) -> bool:
        if torch.compiler.is_compiling():
            return self.recomputed and torch.is_grad_enabled()
        return self.kind in _around.runners

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        call: Runner = original_call(module)
        if torch.compiler.is_compiling():
            return self.owner.feed_forward(call, *args, **kwargs)
        if self.recomputed:
            call = Repeatable([module], call)
        others = dict(_around.runners)
        run = others.pop(self.kind)
        with treated(others):  # a wrapper of a part may hold what was the part before
            return run(call, *args, **kwargs)


@contextmanager
def treated(runners: Mapping[Kind, Runner]) -> Iterator[None]:
    """Within this, parts run through the runner of their kind."""
    before = _around.runners
    _around.runners = runners
    try:
        yield
    finally:
        _around.runners = before


@contextmanager
def tallying() -> Iterator[Tally]:
    """Count what happens within this; see ``tally``."""
    before = _around.tally
    _around.tally = Tally()
    try:
        yield _around.tally
    finally:
        _around.tally = before


def tally() -> Tally | None:
    """What is being counted in this thread: the run of a block in forward, or nothing."""
    return _around.tally


def intercept_parts(block: Module, paths: Iterable[str], part: "Part") -> None:
    """Lead the calls of the modules at ``paths`` through ``part``, where they do not go already."""
    found = parts_of(block, paths)
    intercept([m for m in found if not isinstance(m.__dict__.get(DOOR), Part)], part)


def parts_of(block: Module, paths: Iterable[str]) -> list[Module]:
    """The modules at ``paths`` in ``block``; not every block of a stack has them all."""
    found = []
    for path in paths:
        part: Any = unwrapped(block)
        for name in path.split("."):
            part = getattr(part, name, None)
        if isinstance(part, Module):
            found.append(part)
    return found
