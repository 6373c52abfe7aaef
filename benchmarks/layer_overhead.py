"""Step time of `layer` through the plugin, as a ratio to diffusers' own per-block checkpointing.

Both in one process on one Wan of 8 blocks, width 256, 1,280 tokens, in pairs: A B B A ..., so
that a drift of the machine's speed falls on both. Prints the median of the pairs' ratios.
"""

import argparse
import time
from statistics import median

import torch
from diffusers import WanTransformer3DModel

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


def use_native(model) -> None:
    simpletuner_segckpt.remove(model)
    model.enable_gradient_checkpointing()


def use_plugin(model) -> None:
    simpletuner_segckpt.apply(model, {"gradient_checkpointing": True})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    model, inputs = build(options.device)
    times = {use_native: [], use_plugin: []}
    for number in range(-2, options.pairs):  # two pairs warm up
        for use in sorted(times, key=lambda use: use.__name__, reverse=number % 2 == 0):
            use(model)
            seconds = step_seconds(model, inputs)
            if number >= 0:
                times[use].append(seconds)
    native, plugin = times[use_native], times[use_plugin]
    ratios = [b / a for a, b in zip(native, plugin, strict=True)]
    print(f"diffusers per-block {median(native):.4f} s, plugin layer {median(plugin):.4f} s")
    print(f"ratio plugin / diffusers: {median(ratios):.4f} (target at most {TARGET})")
    return int(median(ratios) > TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
