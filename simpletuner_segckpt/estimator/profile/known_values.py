"""Numbers that a model asks of its tensors, where there are none.

Small masks and indices that a forward makes for itself keep their numbers. A mask that is computed
from activations (which tokens go to which expert) has none; a share of its places, equal for all
experts, stands for it, as a balanced router would choose.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...private.of_fake_tensors import FakeTensor
from .fake_tensors import MOST_CONSTANTS

_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}


class KnownValues(TorchFunctionMode):
    """Within this, what can be known of the numbers of a model without memory is.

    experts: between how many a mask over tokens divides them.
    """

    def __init__(self, experts: int = 1):
        super().__init__()
        self.experts = experts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__getitem__", "__setitem__") and self._routes(args[1]):
            chosen = torch.arange(args[1].numel() // self.experts)
            return func(args[0], chosen, *args[2:])
        result = func(*args, **(kwargs or {}))
        if name in _FILLED and _is_index(result):
            numbers = torch.tensor([_FILLED[name]] * prod(result.shape), dtype=result.dtype)
            return numbers.view(result.shape)
        if name == "arange" and _is_index(result) and all(isinstance(a, int) for a in args):
            return torch.tensor(list(range(*args)), dtype=result.dtype)
        return result

    def _routes(self, index: Any) -> bool:
        """Whether ``index`` is a mask over tokens whose numbers nobody knows."""
        return (
            self.experts > 1
            and isinstance(index, FakeTensor)
            and index.dtype is torch.bool
            and index.dim() == 1
            and index.constant is None
        )


def _is_index(tensor: Any) -> bool:
    return (
        isinstance(tensor, FakeTensor)
        and not tensor.is_floating_point()
        and not tensor.is_complex()
        and 0 < tensor.numel() <= MOST_CONSTANTS
    )
