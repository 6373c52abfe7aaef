"""The checkpoint functions behind ``gradient_checkpointing_backend``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.utils.checkpoint

Checkpoint = Callable[..., Any]


def torch_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` now and again in backward, keeping only its arguments in between.

    Always the non-reentrant variant: it takes any argument, lets frozen parts be frozen and
    recomputes nothing where nothing needs a gradient.
    """
    if kwargs:
        # Passed on by position: tensors that checkpoint gets as such can be seen and moved by
        # saved-tensor hooks, and some of checkpoint's own parameters have plain names.
        function = partial(_call, function, tuple(kwargs))
        args = (*args, *kwargs.values())
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def _call(function: Callable[..., Any], names: tuple[str, ...], *args: Any) -> Any:
    split = len(args) - len(names)
    return function(*args[:split], **dict(zip(names, args[split:], strict=True)))


BACKENDS: dict[str, Checkpoint] = {"torch": torch_checkpoint}
