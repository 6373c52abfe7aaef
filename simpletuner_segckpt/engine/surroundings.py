"""What is around a block's call, not among its arguments: grad mode and autocast."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.utils.checkpoint


def surroundings() -> tuple[Any, ...]:
    """Grad mode and autocast, in which a block's operations run."""
    return (
        torch.is_grad_enabled(),
        *(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _devices()
        ),
    )


def _devices() -> list[str]:
    return sorted({"cpu", torch.get_device_module().__name__.rpartition(".")[2]})


@contextmanager
def within(around: tuple[Any, ...]) -> Iterator[None]:
    """Run with the grad mode and the autocast that ``surroundings`` returned."""
    with torch.set_grad_enabled(around[0]), ExitStack() as stack:
        for device, (enabled, dtype) in zip(_devices(), around[1:], strict=True):
            stack.enter_context(torch.autocast(device, dtype, enabled))
        yield
