"""What can be measured about a training step from outside the model."""

from typing import Any

import torch


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
