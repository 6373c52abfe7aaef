"""Blocks whose weights pass through memory that other blocks use as well.

A swapper with a ring of buffers copies the weights of one block over those of another. That is
right when every block is recomputed, since each recompute finds its own weights again; whatever ran
plainly has lost what its backward needs. Two tensors of two blocks at one address are the sign, and
it is looked for until a whole forward has shown none.
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Module

from ..model.stacks import all_modules
from .block_state import held_by
from .watched import version

SHARED = "its blocks share the memory of their weights, which are streamed through it"


class MemoryWatch:
    """What memory the blocks of one stack were seen to have during one forward.

    shared: whether two of them had the same; ``on_end`` is told when the forward is over.
    """

    def __init__(self, blocks: Sequence[Module], on_end: Callable[[bool], None]):
        self.blocks = blocks
        self.on_end = on_end
        self.shared = False
        self._plain: list[int] = []
        # By address: the block, its weight, what is there, and how often that was written.
        self._seen: dict[int, tuple[int, Tensor, Tensor, int]] = {}

    def look(self, *indices: int) -> None:
        """See where the weights of these blocks are now."""
        for index in indices:
            for weight in _weights(self.blocks[index]) if not self.shared else ():
                for tensor in held_by(weight):
                    self._look(index, weight, tensor)

    def _look(self, index: int, weight: Tensor, tensor: Tensor) -> None:
        address, written = tensor.data_ptr(), version(tensor)
        if known := self._seen.get(address):
            other, held, there, before = known
            tied = held is weight and before == written
            if other != index and not tied and there.data_ptr() == address:
                self.shared = True
        self._seen[address] = index, weight, tensor, written

    def ran_plainly(self, index: int) -> None:
        """Block ``index`` ran, and its backward needs what its weights are now."""
        self._plain.append(index)

    def finish(self) -> Sequence[int]:
        """The forward is over. The blocks that ran plainly and lost their weights."""
        self.look(*range(len(self.blocks)))
        self._seen.clear()
        self.on_end(self.shared)
        return self._plain if self.shared else ()


def _weights(block: Module) -> list[Tensor]:
    """The weights of a block, quantised ones in buffers included."""
    return [
        tensor
        for module in all_modules([block])
        for held in (module._parameters, module._buffers)
        for tensor in held.values()
        if tensor is not None
    ]
