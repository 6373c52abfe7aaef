"""A recompute whose weights FSDP2 gathers.

Ranks that run a segment in different ways must still gather in one order: each all-gather waits for
the same one of every other rank, and two of equal size that are mixed up give wrong weights.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module

from ..model.fsdp import gather, no_forward_prefetch
from .state import OfModules


class GatheredRecompute(OfModules):
    """Calls ``function``, which runs ``modules``, and from the second time on as a recompute.

    The weights of ``first`` are gathered before that.
    """

    def __init__(
        self, function: Callable[..., Any], modules: Sequence[Module], first: Sequence[Module]
    ):
        super().__init__(modules)
        self.function = function
        self.first = first
        self._ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ran:
            self._ran = True
            return self.function(*args, **kwargs)
        gather(self.first)
        with no_forward_prefetch(self.modules):
            return self.function(*args, **kwargs)
