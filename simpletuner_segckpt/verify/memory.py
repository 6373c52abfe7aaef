"""What can be measured about a training step from outside the model."""

import weakref
from typing import Any

import torch

from ..private.of_torch import TorchDispatchMode, pytree


class SavedBytes:
    """Bytes of the unique storages that autograd saves while active, parameters left out.

    What a checkpoint call recomputes is not saved and so not counted; the tensors that enter
    it are. Enter it around a forward; it keeps what it counts alive until it is dropped.
    """

    def __init__(self, model: torch.nn.Module):
        self._skip = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._skip:
            self._storages[storage.data_ptr()] = storage
        return tensor

    @property
    def total(self) -> int:
        """Bytes seen so far."""
        return sum(storage.nbytes() for storage in self._storages.values())


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made while this was active and are still alive.

    After a forward that is what is kept for its backward, wherever it is kept: by autograd, by
    checkpoint calls, as the output of an operator that will not be recomputed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in given:
                self._storages.add(leaf.untyped_storage())
        return result

    @property
    def total(self) -> int:
        """Bytes alive now."""
        return sum(storage.nbytes() for storage in self._storages)
