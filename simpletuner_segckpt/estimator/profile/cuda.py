"""Run a model on the CPU with the operators, and so the saved tensors, of CUDA.

Attention, dropout and RMS norm are one operator each there, which saves other tensors than what a
CPU takes apart; and CUDA's autocast has other lists than the CPU's. Sources: the dispatch of
``scaled_dot_product_attention`` in ATen/native/transformers/cuda/sdp_utils.cpp, the lists in
ATen/autocast_mode.h (the tests compare them to the installed header).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...private.of_torch import pytree
from ..workload.workload import Workload

aten = torch.ops.aten


# Functions that autocast runs in the lower precision, and in float32. Of torch's lists, those that
# a forward of a diffusion model and its loss can contain.
LOWER = frozenset(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm addmv "
    "addr matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul "
    "scaled_dot_product_attention".split()
)


FLOAT32 = frozenset(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus "
    "layer_norm rms_norm group_norm cosine_similarity l1_loss smooth_l1_loss huber_loss mse_loss "
    "kl_div nll_loss dist cdist renorm logsumexp norm".split()
)


FLOAT32_RESULT = frozenset("prod softmax log_softmax cumprod cumsum sum".split())


# Where these are called through operators or under other names.
_ALSO = {
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "__pow__": "pow",
    "__rpow__": "pow",
    "vector_norm": "norm",
}


class CudaSemantics(TorchFunctionMode):
    """Within this, functions on CPU tensors do what they would do on CUDA.

    autocast: the dtype of ``torch.autocast``, or None without it.
    """

    def __init__(self, autocast: torch.dtype | None):
        super().__init__()
        self.autocast = autocast
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def of(cls, work: Workload) -> "CudaSemantics":
        """As the forward of a workload runs."""
        return cls(torch.bfloat16 if work.autocast else None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if self.autocast is not None:
            if name in LOWER:
                args, kwargs = self._cast(args, kwargs, self.autocast)
            elif name in FLOAT32:
                args, kwargs = self._cast(args, kwargs, torch.float32)
            elif name in FLOAT32_RESULT and kwargs.get("dtype") is None and _is_low(args[0]):
                kwargs = {**kwargs, "dtype": torch.float32}
        replaced = _REPLACED.get(name)
        if replaced is not None:
            return replaced(*args, **kwargs)
        return func(*args, **kwargs)

    def forget(self) -> None:
        """End of an autocast region: let the casts of weights go."""
        self._casts.clear()

    def _cast(self, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: self._as(t, dtype), (args, kwargs))

    def _as(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        cached = dtype is self.autocast and tensor.is_leaf and tensor.requires_grad
        if cached and tensor.dtype is torch.float32 and torch.is_grad_enabled():
            # Autocast keeps the copies of trained float32 weights for the rest of the region.
            if id(tensor) not in self._casts:
                self._casts[id(tensor)] = (tensor, tensor.to(dtype))
            return self._casts[id(tensor)][1]
        return tensor.to(dtype)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return _ALSO.get(name, name)


def _is_low(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` as CUDA picks it.

    Flash in bf16 and fp16 up to 256 wide; with a mask, in float32 or wider memory-efficient; then
    cuDNN where keys are shared by heads, which that cannot do.
    """
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    if query.dim() != 4:  # (heads, tokens, width), which CUDA runs as a batch of one
        q, k, v = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
        out = attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return out.reshape(*query.shape[:-1], value.shape[-1])
    if attn_mask is None and _is_low(query) and width <= 256:
        padded = [_padded(t, 8) for t in (query, key, value)]
        out = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, return_debug_mask=False, scale=scale
        )[0]
        return out[..., :width] if padded[0].shape[-1] != width else out
    bias = None
    if attn_mask is not None:
        bias = attn_mask
        if bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -torch.inf)
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        bias = _aligned(bias).expand(shape)
    if grouped:
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, True, dropout_p, is_causal, False, scale=scale
        )[0]
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """The mask in memory whose rows begin at multiples of 16 elements, as the kernel wants it."""
    width = bias.shape[-1]
    return _padded(bias, 16)[..., :width] if width % 16 else bias


def dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """One operator, which saves its mask with a byte for each element."""
    if not training or p == 0:
        return input
    return aten.native_dropout(input, p, True)[0]


class _RMSNorm(torch.autograd.Function):
    """``aten._fused_rms_norm``, for which a CPU has no kernel and so no derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        shape: list[int],
        weight: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        rows = input.shape[: input.dim() - len(shape)]
        rstd = input.new_empty((*rows, *(1 for _ in shape)), dtype=torch.float32)
        ctx.save_for_backward(input, weight, rstd)
        return torch.empty_like(input, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            torch.empty_like(input) if wanted[0] else None,
            None,
            torch.empty_like(weight) if wanted[2] else None,
            None,
        )


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """One operator, which saves its input and a number for each row."""
    dtype = input.dtype if weight is None else torch.promote_types(input.dtype, weight.dtype)
    return _RMSNorm.apply(input, list(normalized_shape), weight, dtype)


_REPLACED: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
    "dropout": dropout,
    "rms_norm": rms_norm,
}
