"""Contexts around a forward and its recompute, which can be entered once for every backward.

torch enters the context of a recompute each time that a backward gets there; what
``contextlib.contextmanager`` makes can be entered once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from ..private.of_torch import top_saved_tensors_hooks

# Makes what to enter around a forward, and around its recompute.
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


# Saves a tensor for backward, and gives it back there.
Pack = Callable[[Any], Any]
Unpack = Callable[[Any], Any]


def within_innermost(
    wrap: Callable[[Pack, Unpack], tuple[Pack, Unpack]],
) -> AbstractContextManager[Any] | None:
    """A context in which tensors are saved by what ``wrap`` makes of the innermost hooks.

    None where there are none. To whoever asks it is still a checkpoint call, if it was one.
    """
    hooks = top_saved_tensors_hooks()
    if hooks is None:
        return None
    pack, unpack = wrap(*hooks)
    if pack is not hooks[0]:
        pack.__module__ = hooks[0].__module__
    return saved_tensors_hooks(pack, unpack)


class Together(AbstractContextManager[None]):
    """Several contexts as one."""

    def __init__(self, *contexts: AbstractContextManager[Any]):
        self.contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class Once(AbstractContextManager[None]):
    """A context that is entered the first time, and nothing after that."""

    def __init__(self, context: AbstractContextManager[Any]):
        self.context: AbstractContextManager[Any] = context

    def __enter__(self) -> None:
        self._entered, self.context = self.context, nullcontext()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
