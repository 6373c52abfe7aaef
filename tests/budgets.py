"""Real steps under a memory budget, and a ledger of live tensors that knows nothing of the plugin.

``python tests/budgets.py`` prints, for ten budgets of every model, what a step really took.
"""

import gc
import sys
import weakref
from dataclasses import dataclass, field

import torch
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import ATTENTION, add_lora, model_and_inputs
from transformers import LlamaConfig, LlamaForCausalLM

from simpletuner_segckpt import apply
from simpletuner_segckpt.verify.step import SEED

# Projections of a Llama's attention.
LLAMA = r".*\.(q|k|v|o)_proj"

MODELS = ("flux", "wan", "sd3", "z_image", "ltxvideo", "sdxl", "llama")

# So many times the two samples of a tiny model's inputs, so that activations outweigh its weights.
BATCH = 8


def made(name):
    """A tiny real model, and inputs for it."""
    if name != "llama":
        return model_and_inputs(name)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tokens = torch.randint(0, 64, (2, 32))
    return LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}


def larger(inputs, times):
    """The same with ``times`` as many samples, of two."""

    def repeated(value):
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == 2:
            return value.repeat(times, *[1] * (value.dim() - 1))
        if isinstance(value, list) and len(value) == 2:
            return value * times
        return {k: repeated(v) for k, v in value.items()} if isinstance(value, dict) else value

    return repeated(inputs)


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are alive, of those shown to it and those made under it."""

    def __init__(self):
        super().__init__()
        self.level = self.peak = 0
        self._known = set()

    def show(self, tree):
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())

    def _add(self, storage):
        key = storage._cdata
        if storage.device.type == "cpu" and key not in self._known:  # not of a fake tensor
            self._known.add(key)
            size = storage.nbytes()
            self.level += size
            self.peak = max(self.peak, self.level)
            weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key, size):
        self._known.discard(key)
        self.level -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.show(result)
        return result


@dataclass
class Trainer:
    """A model in training. full: all of it; otherwise a LoRA on its attention."""

    name: str
    full: bool = False
    accumulate: bool = False
    model: torch.nn.Module = field(init=False)

    def __post_init__(self):
        torch.manual_seed(SEED)
        self.model, inputs = made(self.name)
        self.inputs = larger(inputs, BATCH)
        if not self.full:
            self.model.requires_grad_(False)
            add_lora(self.model, LLAMA if self.name == "llama" else ATTENTION)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.0, foreach=False)

    def forward(self, inputs=None):
        torch.manual_seed(SEED)
        output = self.model(**(self.inputs if inputs is None else inputs))
        if self.name == "llama":
            return output.loss
        leaves = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        return sum(mse_loss(leaf, torch.zeros_like(leaf)) for leaf in leaves)

    def step(self, *several):
        """One step, with as many forwards as there are ``several`` inputs; bytes at its peak."""
        with LiveBytes() as ledger:
            ledger.show([t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)])
            ledger.show([p.grad for p in self.trained])
            loss = sum(self.forward(inputs) for inputs in several or (None,))
            loss.backward()
            del loss
            peak = ledger.peak  # the optimizer's own step is no part of it
        self.optimizer.step()
        if not self.accumulate:
            self.optimizer.zero_grad()
        return peak

    def gradients(self):
        self.forward().backward()
        found = [p.grad.clone() for p in self.trained]
        self.optimizer.zero_grad()
        return found


def within(trainer, budget, steps=3):
    """The peaks of steps within a budget of ``budget`` bytes, and what is installed."""
    key = {"gradient_checkpointing_budget": f"{budget / 2**20:.6f}MiB"}
    installation = apply(trainer.model, {"gradient_checkpointing": True, **key})
    return [trainer.step() for _ in range(steps)], installation


def extremes(name, full):
    """The peaks with everything recomputed, and with nothing."""
    trainer = Trainer(name, full)
    trainer.step()
    plain = trainer.step()
    apply(trainer.model, {"gradient_checkpointing": True})
    trainer.step()
    return trainer.step(), plain


def main():
    for name in sys.argv[1:] or MODELS:
        for full in (False, True):
            low, high = extremes(name, full)
            print(
                f"{name} {'full' if full else 'LoRA'}: {low / 2**20:.2f} to {high / 2**20:.2f} MiB"
            )
            for tenth in range(-1, 12):
                gc.collect()
                budget = low + (high - low) * tenth // 10
                peaks, installation = within(Trainer(name, full), budget)
                told = installation.effect.within
                print(
                    f"  {budget / 2**20:8.2f} MiB: {peaks[-1] / budget:.3f} used,"
                    f" {told.predicted / peaks[-1]:.3f} predicted, {told.share:.0%} recomputed",
                    *told.drawn,
                )


if __name__ == "__main__":
    main()
