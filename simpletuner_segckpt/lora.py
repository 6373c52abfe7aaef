"""The LoRA scale of a forward, which a recompute in backward must have as well."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

from torch.nn import Module

from .contexts import Anew, Contexts


def lora_scale(model: Module) -> Contexts:
    """Contexts for a forward that runs with a LoRA scale.

    diffusers applies the ``scale`` of ``joint_attention_kwargs`` to the LoRA layers only while
    the model's forward runs. Here a recompute in backward gets the scaling that the forward had.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    @cache
    def layers_in_forward() -> list[tuple[Any, dict[str, float]]]:
        """The LoRA layers and the scaling that they have while the forward runs."""
        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        return [(layer, dict(layer.scaling)) for layer in layers]

    @contextmanager
    def scaled(layers: list[tuple[Any, dict[str, float]]]) -> Iterator[None]:
        in_backward = [dict(layer.scaling) for layer, _ in layers]
        try:
            for layer, scaling in layers:
                layer.scaling.update(scaling)
            yield
        finally:
            for (layer, _), scaling in zip(layers, in_backward, strict=True):
                layer.scaling.update(scaling)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), Anew(partial(scaled, layers_in_forward()))

    return contexts


# The arguments by which diffusers' models take a LoRA scale.
_SCALED = ("joint_attention_kwargs", "attention_kwargs", "cross_attention_kwargs")


def has_lora_scale(arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments of a model's forward hold a LoRA scale other than 1."""
    given = (arguments.get(name) for name in _SCALED)
    return any(isinstance(g, dict) and g.get("scale") not in (None, 1.0) for g in given)
