"""What the tests share: real training steps on tiny real models, and what to observe of them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.nn import Module
from torch.utils import _pytree as pytree

from simpletuner_segckpt import Family, FamilyRegistry
from simpletuner_segckpt.family import Tiny
from simpletuner_segckpt.tiny import make_inputs, make_model

REGISTRY = FamilyRegistry.shipped()
SEED = 11


def family(name: str, flavour: str | None = None) -> Family:
    return REGISTRY.find(name, flavour)


def tiny(name: str, flavour: str | None = None) -> Tiny:
    return family(name, flavour).tiny[0]


def model_and_inputs(name: str, flavour: str | None = None, **config: Any):
    spec = tiny(name, flavour)
    return make_model(spec, **config).train(), make_inputs(spec)


def add_lora(model: Module) -> None:
    """A LoRA with dropout on every attention projection; its B matrices are not zero."""
    names = r".*\.(to_q|to_k|to_v|to_out\.0|to_qkv_mlp_proj)"
    config = LoraConfig(r=4, lora_alpha=4, lora_dropout=0.1, target_modules=names)
    inject_adapter_in_model(config, model)
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=generator)


def set_dropout(model: Module, p: float = 0.1) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p


def loss_of(output: Any) -> torch.Tensor:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.float().pow(2).mean() for tensor in tensors)


@dataclass
class Step:
    """Loss and gradients of one training step, and the random state after it."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    random_state: torch.Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step) or self.gradients.keys() != other.gradients.keys():
            return False
        pairs = zip(self.gradients.values(), other.gradients.values(), strict=True)
        return (
            torch.equal(self.loss, other.loss)
            and torch.equal(self.random_state, other.random_state)
            and all(
                (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
                for a, b in pairs
            )
        )


def step(
    model: Module, inputs: dict[str, Any], autocast: bool = False, run: Callable | None = None
) -> Step:
    """One forward and backward from the same seed; ``run`` is called in the model's place."""
    torch.manual_seed(SEED)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = loss_of((model if run is None else run)(**inputs))
    loss.backward()
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return Step(loss.detach(), gradients, torch.get_rng_state())


@contextmanager
def counted(model: Module, paths: list[str]) -> Iterator[dict[str, Counter]]:
    """Counts how often the forward of each block of the stacks at ``paths`` runs."""
    calls: dict[str, Counter] = {path: Counter() for path in paths}
    blocks = [
        (path, index, block)
        for path in paths
        for index, block in enumerate(model.get_submodule(path).children())
    ]
    for path, index, block in blocks:
        block.forward = _counting(block.forward, calls[path], index)
    try:
        yield calls
    finally:
        for _, _, block in blocks:
            del block.forward


def _counting(forward: Callable, calls: Counter, index: int) -> Callable:
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[index] += 1
        return forward(*args, **kwargs)

    return counting


def keys(interval: int = 1, stride: int | None = None, keep_last: int = 0) -> dict[str, Any]:
    """A config with these values; those that are unset are null, as trainers write them."""
    return {
        "gradient_checkpointing_interval": interval,
        "gradient_checkpointing_segment_stride": stride,
        "gradient_checkpointing_keep_last": keep_last,
    }
