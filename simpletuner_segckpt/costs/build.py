"""Blocks that are built alike cost alike."""

from typing import Any

from torch import nn


def build_of(block: nn.Module) -> Any:
    """What two blocks have in common that are built alike: weights, and settings of modules."""
    weights = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters()
    )
    settings = tuple(
        (path, key, value)
        for path, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float)) and not key.endswith(("idx", "index", "layer_id"))
    )
    return type(block), weights, settings
