"""A recompute whose weights FSDP2 gathers.

Ranks that run a segment in different ways must still gather in one order: each all-gather waits for
the same one of every other rank, and two of equal size that are mixed up give wrong weights.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch.nn import Module

from ..model.fsdp import gather, no_forward_prefetch
from ..model.stacks import all_modules


class GatheredRecompute:
    """Calls ``function``, which runs ``modules``, and from the second time on as a recompute.

    The weights of ``first`` are gathered before that.
    """

    def __init__(
        self, function: Callable[..., Any], modules: Sequence[Module], first: Sequence[Module]
    ):
        self.function = function
        self.modules = modules
        self.first = first
        self._ran = False

    @cached_property
    def everything(self) -> list[Module]:
        """The modules, and those inside them."""
        return all_modules(self.modules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ran:
            self._ran = True
            return self.function(*args, **kwargs)
        gather(self.first)
        with no_forward_prefetch(self.modules):
            return self.function(*args, **kwargs)
