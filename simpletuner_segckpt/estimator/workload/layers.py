"""Linear layers as trainers change them for memory or speed, as far as memory goes."""

from typing import Any

import torch
from torch import nn


class _Streamed(torch.autograd.Function):
    """A linear layer whose weight comes from CPU memory, once for forward and once for backward.

    It keeps its input, although a frozen weight needs no gradient: so does RamTorch.
    """

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(input)
        ctx.layer = weight, bias
        here = weight.detach().clone()
        return nn.functional.linear(input, here, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (_,) = ctx.saved_tensors
        here = ctx.layer[0].detach().clone()
        return gradient @ here, None, None


class StreamedLinear(nn.Linear):
    """RamTorch's linear layer, as far as memory on the accelerator goes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Streamed.apply(input, self.weight, self.bias)


def stream_weights(model: nn.Module) -> None:
    """Keep the weights of all linear layers in CPU memory."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = StreamedLinear


class _Fused(nn.Module):
    """``to_q``, ``to_k`` and ``to_v`` as one product, whose parts they hand out in turn."""

    def __init__(self, parts: list[nn.Linear]):
        super().__init__()
        first = parts[0]
        self.widths = [part.out_features for part in parts]
        bias = first.bias is not None
        self.to_qkv = nn.Linear(first.in_features, sum(self.widths), bias, dtype=first.weight.dtype)
        self.parts = nn.ModuleList(parts)  # which trainers leave in memory
        self._left: list[torch.Tensor] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self._left:
            self._left = list(self.to_qkv(input).split(self.widths, dim=-1))
        return self._left.pop(0)


def fuse_projections(model: nn.Module) -> None:
    """Have every self-attention compute query, key and value in one product."""
    for module in list(model.modules()):
        parts: list[Any] = [getattr(module, name, None) for name in ("to_q", "to_k", "to_v")]
        linear = all(isinstance(part, nn.Linear) for part in parts)
        if linear and len({part.in_features for part in parts}) == 1:
            module.to_q = module.to_k = module.to_v = _Fused(parts)
