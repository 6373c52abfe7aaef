"""The few things that offloading asks of an accelerator, whichever it is."""

from typing import Any

import torch
from torch import Tensor


class Accelerator:
    """``torch.accelerator``, with copies that say on which stream they run.

    device_type: the one whose tensors are offloaded, such as ``cuda`` or ``xpu``.
    """

    def __init__(self, device_type: str):
        self.device_type = device_type

    @classmethod
    def current(cls) -> "Accelerator | None":
        """The one of this machine; None without one, or where it shares the CPU's memory."""
        device = torch.accelerator.current_accelerator(check_available=True)
        return None if device is None or device.type == "mps" else cls(device.type)

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is an ordinary one, in this accelerator's memory."""
        return tensor.device.type == self.device_type and type(tensor) is Tensor

    def stream(self, device: torch.device) -> Any:
        """A new stream of ``device``."""
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        """The stream on which the model runs in this thread."""
        return torch.accelerator.current_stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        """Pinned CPU memory, of shape ``(nbytes,)``. Raises ``RuntimeError``."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def empty(self, nbytes: int, device: torch.device, stream: Any) -> Tensor:
        """Memory of ``device`` for use on ``stream``, of shape ``(nbytes,)``."""
        with stream:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Start a copy on ``stream``; what of it is on the CPU must be pinned."""
        with stream:
            target.copy_(source, non_blocking=True)

    def copy_and_wait(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Copy on ``stream``, and return when that is done."""
        with stream:
            target.copy_(source)

    def use(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator that ``tensor`` is in use on ``stream`` as well."""
        tensor.record_stream(stream)
