"""What the engine asks of the machine that it runs on.

A training step that is run without memory (see ``estimator.profile.trace``) has a platform of its
own, since its tensors have nothing that an alias could share and its random numbers no state.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..offload.device import Accelerator
from ..offload.memory import AcceleratorMemory, CpuMemory, Memory
from ..private.of_torch import pytree
from ..recompute.random_states import RandomStates
from .watched import WatchedTensor


class Platform:
    """The machine of this process, and its tensors. Has no state."""

    def accelerator(self) -> Accelerator | None:
        """What tensors are moved from to CPU memory; None where there is nothing to move."""
        return Accelerator.current()

    def memory(self) -> Memory:
        """That in which the model trains."""
        return CpuMemory() if self.accelerator() is None else AcceleratorMemory()

    def random_states(self) -> RandomStates | None:
        """The states of the random generators that a block may draw from."""
        return RandomStates()

    def is_ordinary(self, leaf: Any) -> bool:
        """Whether ``leaf`` is a tensor of no class of its own, which an alias can stand for."""
        return type(leaf) is Tensor

    def watched(
        self, plain: Tensor, on_read: Callable[[str], None], on_look: Callable[[], None]
    ) -> WatchedTensor:
        """An alias of ``plain`` that reports its uses."""
        return WatchedTensor.of(plain, on_read, on_look)

    def hand_out(
        self, tree: Any, on_read: Callable[[str], None], on_look: Callable[[], None] = lambda: None
    ) -> Any:
        """``tree`` with every ordinary tensor replaced by a :class:`WatchedTensor`."""

        def alias(leaf: Any) -> Any:
            return self.watched(leaf, on_read, on_look) if self.is_ordinary(leaf) else leaf

        return pytree.tree_map(alias, tree)

    def unwatchable(self, tree: Any) -> str | None:
        """The type of a leaf of a block's result that cannot be watched, if there is one."""
        for leaf in pytree.tree_leaves(tree):
            if leaf is not None and not self.is_ordinary(leaf):
                return type(leaf).__name__
        return None
