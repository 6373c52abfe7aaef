"""What a forward keeps for backward outside its blocks, read off the graph that autograd makes."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..private.of_torch import memory_of, saved_by


class Graph:
    """The graph of one forward, as far as it has been looked at.

    Nodes that blocks made are left alone: what a checkpoint call saved is not to be asked for.
    """

    def __init__(self, known: Iterable[Tensor]):
        self.memory = set(map(memory_of, known))  # what is counted, or was there before
        self._seen: set[Any] = set()
        self._blocks = 0
        # Nodes that returned a block's results: which block, bytes, and the last block they reach.
        self._results: dict[Any, tuple[int, int]] = {}
        self._reaches: dict[Any, int] = {}

    def made_by_block(self, results: Iterable[Tensor]) -> None:
        """The next block returned these: the graph before them is its own."""
        for tensor in results:
            if tensor.grad_fn is not None:
                self._seen.add(tensor.grad_fn)
                size = tensor.numel() * tensor.element_size()
                self._results[tensor.grad_fn] = (self._blocks, size)
        self._blocks += 1

    def waiting_gradients(self) -> list[int]:
        """For each block, bytes of the gradients that wait, in its backward, for that of another.

        What a later block than the next one takes (a skip of a U-Net) has its gradient when the
        backward of that is over, and until its own begins.
        """
        waiting = [0] * self._blocks
        for node, last in self._reaches.items():
            made, size = self._results[node]
            if last > made + 1:
                for block in range(made, last):
                    waiting[block] += size
        return waiting

    def saved_before(self, tensors: Iterable[Tensor]) -> int:
        """Bytes that nodes have saved from ``tensors`` back to blocks, if not counted before."""
        waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        saved = 0
        while waiting:
            node = waiting.pop()
            if node in self._results:
                self._reaches[node] = self._blocks
            if node in self._seen:
                continue
            self._seen.add(node)
            for tensor in saved_by(node):
                if not isinstance(tensor, Parameter):
                    saved += self.new(tensor)
            waiting += [following for following, _ in node.next_functions if following is not None]
        return saved

    def new(self, tensor: Tensor) -> int:
        """The bytes of a tensor's memory, the first time that it is met."""
        memory = memory_of(tensor)
        if memory in self.memory:
            return 0
        self.memory.add(memory)
        return tensor.untyped_storage().nbytes()
