"""Step time through the plugin, as a ratio to the same checkpoint calls written by hand.

`layer` against diffusers' own per-block checkpointing, and segments of two against a checkpoint
function that runs two blocks and checks nothing. All in one process on one Wan of 8 blocks, width
256, 1,280 tokens, in pairs whose order alternates, so that a drift of the machine's speed falls on
both. Prints the median of the pairs' ratios.
"""

import argparse
import time
from statistics import median

import torch
from diffusers import WanTransformer3DModel
from torch.utils.checkpoint import checkpoint

import simpletuner_segckpt

TARGET = 1.03


def build(device: str):
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_layers=8,
        num_attention_heads=4,
        attention_head_dim=64,
        ffn_dim=1024,
        text_dim=128,
        freq_dim=128,
        in_channels=16,
        out_channels=16,
    ).to(device)
    inputs = {
        "hidden_states": torch.randn(1, 16, 5, 32, 32, device=device),  # 5 x 16 x 16 tokens
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": torch.randn(1, 64, 128, device=device),
        "return_dict": False,
    }
    return model.train(), inputs


def step_seconds(model, inputs) -> float:
    start = time.perf_counter()
    model(**inputs)[0].square().mean().backward()
    model.zero_grad(set_to_none=True)
    if inputs["hidden_states"].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def native_layer(model) -> None:
    model.enable_gradient_checkpointing()


def plugin_layer(model) -> None:
    simpletuner_segckpt.apply(model, {"gradient_checkpointing": True})


def handwritten_pairs(model) -> None:
    first = set(model.blocks[::2])
    follower = dict(zip(model.blocks[::2], model.blocks[1::2], strict=True))

    def pair(block, hidden_states, *rest):
        return follower[block](block(hidden_states, *rest), *rest)

    def function(block, hidden_states, *rest):
        if block not in first:
            return hidden_states
        return checkpoint(pair, block, hidden_states, *rest, use_reentrant=False)

    model.enable_gradient_checkpointing(function)


def plugin_pairs(model) -> None:
    simpletuner_segckpt.apply(model, {"gradient_checkpointing_interval": 2})


def compare(model, inputs, by_hand, plugin, pairs: int) -> float:
    """Median over pairs of the plugin's step time divided by the other's."""
    ratios = []
    for number in range(-2, pairs):  # two pairs warm up
        seconds = {}
        for use in (by_hand, plugin) if number % 2 else (plugin, by_hand):
            simpletuner_segckpt.remove(model)
            use(model)
            step_seconds(model, inputs)  # the plugin's first forward records
            seconds[use] = step_seconds(model, inputs)
        if number >= 0:
            ratios.append(seconds[plugin] / seconds[by_hand])
    return median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    model, inputs = build(options.device)
    layer = compare(model, inputs, native_layer, plugin_layer, options.pairs)
    pairs = compare(model, inputs, handwritten_pairs, plugin_pairs, options.pairs)
    print(f"layer, plugin / diffusers: {layer:.4f}")
    print(f"segments of two, plugin / by hand: {pairs:.4f}")
    print(f"target: at most {TARGET}")
    return int(max(layer, pairs) > TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
