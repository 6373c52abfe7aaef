"""The checkpoint functions behind ``gradient_checkpointing_backend``."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch.utils.checkpoint
from torch.nn import Module

Checkpoint = Callable[..., Any]


def torch_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` now and again in backward, keeping only its arguments in between.

    Always the non-reentrant variant: it takes any argument, lets frozen parts be frozen and
    recomputes nothing where nothing needs a gradient.
    """
    return _torch_checkpoint({}, function, args, kwargs)


def _torch_checkpoint(
    options: dict[str, Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    if kwargs:
        # Passed on by position: tensors that checkpoint gets as such can be seen and moved by
        # saved-tensor hooks, and some of checkpoint's own parameters have plain names.
        function = partial(_call, function, tuple(kwargs))
        args = (*args, *kwargs.values())
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **options)


def _call(function: Callable[..., Any], names: tuple[str, ...], *args: Any) -> Any:
    split = len(args) - len(names)
    return function(*args[:split], **dict(zip(names, args[split:], strict=True)))


BACKENDS: dict[str, Checkpoint] = {"torch": torch_checkpoint}


def with_lora_scale(model: Module) -> Checkpoint:
    """``torch_checkpoint`` for a forward that runs with a LoRA scale.

    diffusers applies the ``scale`` of ``joint_attention_kwargs`` to the LoRA layers only while
    the model's forward runs. Here a recompute in backward gets the scaling that the forward had.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    @cache
    def layers_in_forward() -> list[tuple[Any, dict[str, float]]]:
        """The LoRA layers and the scaling that they have while the forward runs."""
        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        return [(layer, dict(layer.scaling)) for layer in layers]

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layers = layers_in_forward()

        @contextmanager
        def scaled() -> Iterator[None]:
            in_backward = [dict(layer.scaling) for layer, _ in layers]
            try:
                for layer, scaling in layers:
                    layer.scaling.update(scaling)
                yield
            finally:
                for (layer, _), scaling in zip(layers, in_backward, strict=True):
                    layer.scaling.update(scaling)

        contexts = {"context_fn": lambda: (nullcontext(), scaled())}
        return _torch_checkpoint(contexts, function, args, kwargs)

    return checkpoint


# The arguments by which diffusers' models take a LoRA scale.
_SCALED = ("joint_attention_kwargs", "attention_kwargs", "cross_attention_kwargs")


def has_lora_scale(arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments of a model's forward hold a LoRA scale other than 1."""
    given = (arguments.get(name) for name in _SCALED)
    return any(isinstance(g, dict) and g.get("scale") not in (None, 1.0) for g in given)
