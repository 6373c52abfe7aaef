"""One training step and what is to be observed of it, to prove that schedules change nothing."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from ..model.stacks import blocks_of
from ..private.of_torch import pytree

SEED = 11


@dataclass
class Step:
    """Loss and gradients of one training step, and the random state after it."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    random_state: torch.Tensor

    def differences(self, other: "Step") -> list[str]:
        """What is not equal, bit by bit; empty when nothing differs."""
        found = [] if torch.equal(self.loss, other.loss) else ["the loss"]
        if not torch.equal(self.random_state, other.random_state):
            found.append("the random state after the step")
        for name in self.gradients.keys() | other.gradients.keys():
            mine, theirs = self.gradients.get(name), other.gradients.get(name)
            if mine is None or theirs is None:
                if mine is not theirs:
                    found.append(f"the gradient of {name}")
            elif not torch.equal(mine, theirs):
                found.append(f"the gradient of {name}")
        return sorted(found, reverse=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and not self.differences(other)

    __hash__ = None  # type: ignore[assignment]


def loss_of(output: Any) -> torch.Tensor:
    """A scalar that depends on every floating-point tensor of a model's output."""
    leaves = pytree.tree_leaves(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return torch.stack([tensor.float().pow(2).mean() for tensor in tensors]).sum()


def step(
    model: Module,
    inputs: Mapping[str, Any],
    autocast: bool = False,
    run: Callable[..., Any] | None = None,
) -> Step:
    """One forward and backward from the same seed; ``run`` is called in the model's place."""
    torch.manual_seed(SEED)
    model.zero_grad(set_to_none=True)
    device = next(model.parameters()).device.type
    with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
        loss = loss_of((model if run is None else run)(**inputs))
    loss.backward()
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return Step(loss.detach(), gradients, torch.get_rng_state())


@contextmanager
def counted(model: Module, paths: Iterable[str]) -> Iterator[dict[str, Counter[int]]]:
    """Count how often the forward of each block of the stacks at ``paths`` runs."""
    calls: dict[str, Counter[int]] = {path: Counter() for path in paths}
    blocks: list[Any] = []
    for path, counter in calls.items():
        for index, block in enumerate(blocks_of(model, path)):
            block.forward = _counting(block.forward, counter, index)
            blocks.append(block)
    try:
        yield calls
    finally:
        for block in blocks:
            del block.forward


def _counting(forward: Callable[..., Any], calls: Counter[int], index: int) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[index] += 1
        return forward(*args, **kwargs)

    return counting
