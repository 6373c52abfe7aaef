"""A LoRA trainer of one's own: Flux, PEFT, accelerate, and three lines of simpletuner_segckpt.

It reads a trainer's config.json, builds a small Flux transformer with random weights, makes a
data set of image latents, trains a LoRA and saves the adapter:

    python examples/flux_lora/train.py examples/flux_lora/configs/*.json

Given several configs it trains with each of them and compares them with the first. Everything
but the schedule is the same, so losses and adapters must be identical, bit by bit.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import FluxTransformer2DModel
from peft import LoraConfig, get_peft_model_state_dict
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset

import simpletuner_segckpt
from simpletuner_segckpt.verify.memory import LiveBytes

LATENT_SIDE, TEXT_TOKENS, TEXT_WIDTH = 20, 32, 64


def build_model() -> FluxTransformer2DModel:
    """Flux in small: the same classes and the same two stacks, a hidden size of 192."""
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=6,
        num_single_layers=10,
        attention_head_dim=48,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=(16, 16, 16),
    )


def make_dataset(count: int = 16) -> TensorDataset:
    """Latents of soft blobs, each with a caption embedding that says where its blob is."""
    grid = torch.linspace(-1, 1, LATENT_SIDE)
    rows, columns = torch.meshgrid(grid, grid, indexing="ij")
    places = torch.rand(count, 2) * 1.6 - 0.8
    blobs = [torch.exp(-((rows - y) ** 2 + (columns - x) ** 2) * 8).flatten() for y, x in places]
    latents = torch.stack(blobs)[..., None] * torch.randn(1, 1, 16)
    captions = torch.cat([places, torch.ones(count, 1)], 1) @ torch.randn(3, TEXT_WIDTH)
    return TensorDataset(latents, captions)


def training_loss(model: Any, latents: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
    """Flow matching: predict the velocity from the data to the noise."""
    noise = torch.randn_like(latents)
    sigma = torch.rand(len(latents), 1, 1, device=latents.device)
    side = torch.arange(LATENT_SIDE, device=latents.device)
    places = torch.cartesian_prod(torch.zeros_like(side[:1]), side, side)
    [velocity] = model(
        hidden_states=(1 - sigma) * latents + sigma * noise,
        encoder_hidden_states=captions[:, None].expand(-1, TEXT_TOKENS, -1),
        pooled_projections=captions,
        timestep=sigma.flatten(),
        img_ids=places,
        txt_ids=places.new_zeros(TEXT_TOKENS, 3),
        return_dict=False,
    )
    return torch.nn.functional.mse_loss(velocity.float(), noise - latents)


@dataclass
class Run:
    """What one training run left behind."""

    name: str
    seconds: float  # per step, median without the first
    kept_bytes: int
    recomputed: int
    blocks: int
    losses: list[float]
    adapter: Path

    def identical(self, other: "Run") -> bool:
        mine, theirs = load_file(self.adapter), load_file(other.adapter)
        return (
            self.losses == other.losses
            and mine.keys() == theirs.keys()
            and all(torch.equal(mine[key], theirs[key]) for key in mine)
        )


def train(config_path: Path, output: Path, progress: Progress) -> Run:
    """Train as one config says."""
    config = json.loads(config_path.read_text())
    accelerator = Accelerator()
    set_seed(config["seed"])
    model = build_model()
    model.requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "proj_mlp", "proj_out"]
    rank, dropout = config["lora_rank"], config["lora_dropout"]
    model.add_adapter(
        LoraConfig(r=rank, lora_alpha=rank, lora_dropout=dropout, target_modules=targets)
    )

    # The three lines: the import above, this one, and (optionally) reading the report.
    installation = simpletuner_segckpt.apply(model, config_path)
    report = installation.report

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config["learning_rate"])
    loader = DataLoader(make_dataset(), batch_size=config["train_batch_size"], shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()

    steps = config["max_train_steps"]
    task = progress.add_task(config_path.stem, total=steps)
    losses: list[float] = []
    seconds: list[float] = []
    kept_bytes = 0
    while len(losses) < steps:
        for latents, captions in loader:
            if len(losses) == steps:
                break
            start = time.perf_counter()
            if len(losses) == steps - 1:  # measured once, in a step that is not timed
                with LiveBytes() as live:
                    loss = training_loss(model, latents, captions)
                kept_bytes = live.total
            else:
                loss = training_loss(model, latents, captions)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            progress.update(
                task, advance=1, description=f"{config_path.stem} loss {losses[-1]:.4f}"
            )

    output.mkdir(parents=True, exist_ok=True)
    adapter = output / f"{config_path.stem}.safetensors"
    unwrapped = accelerator.unwrap_model(model)
    state = {key: value.cpu() for key, value in get_peft_model_state_dict(unwrapped).items()}
    save_file(state, adapter)
    effect = installation.effect
    recomputed = sum(len(stack.covered) for stack in effect.stacks) if effect else 0
    blocks = sum(stack.blocks for stack in report.stacks)
    name = config_path.stem
    return Run(name, median(seconds[1:-1]), kept_bytes, recomputed, blocks, losses, adapter)


def table(runs: list[Run]) -> Table:
    caption = "s / step: one run each, one after the other; on a busy machine it says nothing"
    made = Table(title="Flux LoRA: one training run per schedule", caption=caption)
    for heading in ("schedule", "s / step", "kept MiB", "recomputed", "final loss"):
        made.add_column(heading, justify="left" if heading == "schedule" else "right")
    made.add_column(f"losses and adapter as in {runs[0].name}")
    for run in runs:
        made.add_row(
            run.name,
            f"{run.seconds:.3f}",
            f"{run.kept_bytes / 2**20:.1f}",
            f"{run.recomputed} of {run.blocks}",
            f"{run.losses[-1]:.6f}",
            "identical" if run.identical(runs[0]) else "DIFFERENT",
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG")
    parser.add_argument("--output", type=Path, default=Path("runs/flux_lora"))
    options = parser.parse_args()
    with Progress() as progress:
        runs = []
        for config in options.configs:
            runs.append(train(config, options.output, progress))
            if not progress.console.is_terminal:  # where no progress is shown
                print(f"{runs[-1].name}: trained, final loss {runs[-1].losses[-1]:.6f}", flush=True)
    Console().print(table(runs))
    return 0 if all(run.identical(runs[0]) for run in runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
