"""What the plugin costs the host, as ratios of CPU time.

On a fast accelerator a step of small images takes as long as its host takes to issue it. Here
everything is host time: a Flux of 57 tiny blocks (19 + 38) on one thread. Compared are `keep` with
`layer`, and `layer` with diffusers' own checkpointing, with and without a LoRA on every linear
layer. The two models of a comparison take turns, step by step, in an order that alternates; a ratio
is the median over the pairs, for which nothing but this process's CPU time counts. Python's garbage
collector runs between the steps.
"""

import argparse
import gc
import time
from statistics import median

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

import simpletuner_segckpt

KEEP = "gradient_checkpointing_keep"
WARM_UP = 3  # pairs in which the plugin learns


def build(lora: bool):
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        num_layers=19,
        num_single_layers=38,
        num_attention_heads=2,
        attention_head_dim=8,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        in_channels=4,
        axes_dims_rope=(2, 2, 4),
    ).train()
    if lora:
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=2, target_modules="all-linear"))
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 16),
        "pooled_projections": torch.randn(1, 16),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
        "return_dict": False,
    }
    return model, inputs


def installed(lora: bool, config):
    """A model and its inputs; with diffusers' own checkpointing where ``config`` is None."""
    model, inputs = build(lora)
    if config is None:
        model.enable_gradient_checkpointing()
    else:
        simpletuner_segckpt.apply(model, config)
    return model, inputs


def step_seconds(model, inputs) -> float:
    gc.collect()
    start = time.process_time()
    model(**inputs)[0].square().mean().backward()
    seconds = time.process_time() - start
    model.zero_grad(set_to_none=True)
    return seconds


def compare(lora: bool, ours, base, pairs: int) -> float:
    """Median over the pairs of the CPU time of a step, divided by that of ``base``."""
    models = [installed(lora, config) for config in (ours, base)]
    ratios = []
    for number in range(-WARM_UP, pairs):
        seconds = {which: step_seconds(*models[which]) for which in (0, 1)[:: number % 2 * 2 - 1]}
        if number >= 0:
            ratios.append(seconds[0] / seconds[1])
    return median(ratios)


# What is compared: with LoRA or not, its config, that of the other, the target.
COMPARED = {
    "keep attention / layer": (False, {KEEP: "attention"}, {}, 1.05),
    "keep attention and ffn / layer": (False, {KEEP: ["attention", "ffn"]}, {}, None),
    "LoRA, keep attention / layer": (True, {KEEP: "attention"}, {}, None),
    "layer / diffusers": (False, {}, None, None),
    "LoRA, layer / diffusers": (True, {}, None, 1.01),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--only", default="", help="those whose name contains a word")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    for name, (lora, ours, base, target) in COMPARED.items():
        if options.only not in name:
            continue
        ratio = compare(lora, ours, base, options.pairs)
        print(f"{name}: {ratio:.3f}" + (f" (target: at most {target})" if target else ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
