"""Time, kept bytes and recomputed FLOPs of schedules with and without kept operators.

One Wan of 8 blocks, width 512, in one process; the modes take turns, round by round, so that a
drift of the machine's speed falls on all of them. Seconds are the median over the rounds of the
ratio to `none` in the same round. Kept bytes are those between forward and backward: what autograd
saves, and what the kept operators returned. FLOPs are counted by torch's own FlopCounterMode.
"""

import argparse
import time
from statistics import median

import torch
from diffusers import WanTransformer3DModel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import simpletuner_segckpt
from simpletuner_segckpt.verify.memory import LiveBytes

KEEP = "gradient_checkpointing_keep"
INTERVAL = "gradient_checkpointing_interval"
STRIDE = "gradient_checkpointing_segment_stride"
ATTENTIONS = ["attention", "cross-attention"]
MODES = {
    "none": {"gradient_checkpointing": False},
    "layer": {},
    "layer, keep attentions": {KEEP: ATTENTIONS},
    "layer, keep attentions and ffn": {KEEP: [*ATTENTIONS, "ffn"]},
    "layer, torch-ffn": {"gradient_checkpointing_backend": "torch-ffn"},
    "seg2-stride4": {INTERVAL: 2, STRIDE: 4},
    "seg2-stride4, keep attentions": {INTERVAL: 2, STRIDE: 4, KEEP: ATTENTIONS},
}


def attention_flops(query, key, value, *_, **__) -> int:
    return sdpa_flop_count(query, key, value)


def attention_backward_flops(gradient, query, key, value, *_, **__) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


# Torch has no formula for the CPU's fused attention: it is that of the other ones.
FLOPS_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}
TARGETS = {4096: 1.03, 8192: 1.0}  # tokens: step time of `layer, keep attentions` to seg2-stride4
MOST_BYTES = 1 / 3  # of those of seg2-stride4


def build(device: str, dtype: torch.dtype):
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_layers=8,
        num_attention_heads=8,
        attention_head_dim=64,
        ffn_dim=2048,
        text_dim=256,
        freq_dim=128,
        in_channels=16,
        out_channels=16,
    )
    return model.to(device, dtype).train()


def make_inputs(tokens: int, device: str, dtype: torch.dtype):
    """Latents of 32 x 32 patches in each frame, and 64 text tokens."""
    frames = tokens // 1024
    return {
        "hidden_states": torch.randn(1, 16, frames, 64, 64, device=device, dtype=dtype),
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": torch.randn(1, 64, 256, device=device, dtype=dtype),
        "return_dict": False,
    }


def train_step(model, inputs) -> None:
    model(**inputs)[0].float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def seconds(model, inputs) -> float:
    start = time.perf_counter()
    train_step(model, inputs)
    if inputs["hidden_states"].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def bytes_and_flops(model, inputs) -> tuple[int, int]:
    """Bytes kept between forward and backward, and FLOPs of a step."""
    with FlopCounterMode(display=False, custom_mapping=FLOPS_ON_CPU) as counter:
        with LiveBytes() as live:
            output = model(**inputs)[0]
        kept = live.total
        output.float().square().mean().backward()
    model.zero_grad(set_to_none=True)
    return kept, counter.get_total_flops()


def measure(model, inputs, small, modes, rounds: int) -> dict[str, tuple[float, int, int]]:
    """By mode: step time as a ratio to `none`, kept bytes, FLOPs of a step."""
    times: dict[str, list[float]] = {name: [] for name in modes}
    still: dict[str, tuple[int, int]] = {}
    for number in range(-1, rounds):  # the first round counts, the others take the time
        for name in modes if number % 2 else reversed(modes):
            installation = simpletuner_segckpt.apply(model, MODES[name])
            train_step(model, small)  # the plugin's first forward records
            if number < 0:
                still[name] = bytes_and_flops(model, inputs)
            else:
                times[name].append(seconds(model, inputs))
            installation.remove()
    ratios = {
        name: median(t / none for t, none in zip(of_mode, times["none"], strict=True))
        for name, of_mode in times.items()
    }
    return {name: (ratios[name], *still[name]) for name in modes}


def print_table(tokens: int, found: dict[str, tuple[float, int, int]]) -> None:
    forward = found["none"][2] / 3  # a backward has twice the FLOPs of its forward
    print(f"\n{tokens:,} tokens\n")
    print("| mode | step time / none | kept MiB | recomputed, of the forward |")
    print("| --- | --- | --- | --- |")
    for name, (ratio, kept, total) in found.items():
        again = (total - found["none"][2]) / forward
        print(f"| {name} | {ratio:.3f} | {kept / 2**20:.1f} | {again:.0%} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    model = build(options.device, dtype)
    missed = False
    for tokens in options.tokens:
        small, inputs = (make_inputs(n, options.device, dtype) for n in (1024, tokens))
        found = measure(model, inputs, small, options.modes, options.rounds)
        print_table(tokens, found)
        ours, wide = found["layer, keep attentions"], found["seg2-stride4"]
        time_ratio, byte_ratio = ours[0] / wide[0], ours[1] / wide[1]
        print(
            "\nlayer, keep attentions / seg2-stride4: "
            f"time {time_ratio:.3f}, bytes {byte_ratio:.3f}"
        )
        target = TARGETS.get(tokens)
        if target:
            print(f"targets: time at most {target}, bytes below {MOST_BYTES:.3f}")
            missed |= time_ratio > target or byte_ratio >= MOST_BYTES
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
