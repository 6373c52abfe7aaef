"""The checkpoint functions behind ``gradient_checkpointing_backend``."""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

Checkpoint = Callable[..., Any]


def torch_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` now and again in backward, keeping only its arguments in between.

    Always the non-reentrant variant: it takes any argument, lets frozen parts be frozen and
    recomputes nothing where nothing needs a gradient.
    """
    # Keyword arguments travel as a dict: some of checkpoint's own parameters have plain names.
    if kwargs:
        return torch.utils.checkpoint.checkpoint(
            _call, function, args, kwargs, use_reentrant=False
        )
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def _call(function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    return function(*args, **kwargs)


BACKENDS: dict[str, Checkpoint] = {"torch": torch_checkpoint}
