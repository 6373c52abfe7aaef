"""A full fine-tune of Flux, sharded over two processes with FSDP2, each segment as one unit.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2/train.py

The units that FSDP2 shards and gathers are the segments that are recomputed together, so there
are fewer all-gathers than with a unit per block. Rank 0 says what was installed and what the last
step did, and saves the gathered weights.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import simpletuner_segckpt

# As in a trainer's config.json: two consecutive blocks are one segment.
CONFIG = {
    "model_family": "flux",
    "gradient_checkpointing": True,
    "gradient_checkpointing_interval": 2,
}
SIDE, TEXT_TOKENS, TEXT_WIDTH = 8, 4, 32


def build_model() -> FluxTransformer2DModel:
    """Flux in small: the same classes and the same two stacks, a hidden size of 64."""
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=4,
        num_single_layers=6,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )


def training_loss(model: Any) -> torch.Tensor:
    """Flow matching on random latents: predict the velocity from the data to the noise."""
    latents, noise = torch.randn(1, SIDE * SIDE, 16), torch.randn(1, SIDE * SIDE, 16)
    caption = torch.randn(1, TEXT_WIDTH)
    sigma = torch.rand(1, 1, 1)
    side = torch.arange(float(SIDE))
    [velocity] = model(
        hidden_states=(1 - sigma) * latents + sigma * noise,
        encoder_hidden_states=caption[:, None].expand(-1, TEXT_TOKENS, -1),
        pooled_projections=caption,
        timestep=sigma.flatten(),
        img_ids=torch.cartesian_prod(torch.zeros(1), side, side),
        txt_ids=torch.zeros(TEXT_TOKENS, 3),
        return_dict=False,
    )
    return torch.nn.functional.mse_loss(velocity, noise - latents)


def train(config: dict[str, Any], steps: int, output: Path) -> list[float]:
    """Train in the process group that there is; returns this rank's losses."""
    torch.manual_seed(0)  # the same weights everywhere, before each rank keeps its shard
    model = build_model().train()

    # The import above, and these two calls in either order.
    simpletuner_segckpt.fully_shard_segments(model, CONFIG)
    installation = simpletuner_segckpt.apply(model, config)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # data of each rank's own
    losses = []
    for _ in range(steps):
        loss = training_loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)  # on every rank; filled on rank 0
    if dist.get_rank() == 0:
        print(f"{installation.report}\nthe last step:\n{installation.effect}", flush=True)
        output.mkdir(parents=True, exist_ok=True)
        save_file(weights, output / "flux.safetensors")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/fsdp2"))
    options = parser.parse_args()
    dist.init_process_group("gloo")  # "nccl" and torch.cuda.set_device on GPUs
    losses = train(CONFIG, options.steps, options.output)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
