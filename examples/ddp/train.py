"""A Wan LoRA on two processes with torch's DDP and three lines of simpletuner_segckpt.

    torchrun --standalone --nproc-per-node 2 examples/ddp/train.py

Each process builds the same small Wan transformer with random weights, trains a LoRA on videos of
its own, and rank 0 says what was installed and what the last step did, and saves the adapter.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

import simpletuner_segckpt

# As in a trainer's config.json: of every three blocks, the first two are one segment and the
# third runs normally.
CONFIG = {
    "model_family": "wan",
    "gradient_checkpointing": True,
    "gradient_checkpointing_interval": 2,
    "gradient_checkpointing_segment_stride": 3,
}


def build_model() -> WanTransformer3DModel:
    """Wan in small: the same class, eight blocks, a hidden size of 64."""
    model = WanTransformer3DModel(
        num_layers=8,
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=128,
        rope_max_seq_len=32,
    )
    model.requires_grad_(False)
    model.add_adapter(
        LoraConfig(r=8, lora_alpha=8, lora_dropout=0.1, target_modules=["to_q", "to_k", "to_v"])
    )
    return model


def training_loss(model: Any) -> torch.Tensor:
    """Flow matching on a random video: predict the velocity from the data to the noise."""
    video, noise = torch.randn(1, 4, 2, 8, 8), torch.randn(1, 4, 2, 8, 8)
    sigma = torch.rand(1)
    [velocity] = model(
        hidden_states=(1 - sigma) * video + sigma * noise,
        timestep=(sigma * 1000).long(),
        encoder_hidden_states=torch.randn(1, 4, 32),
        return_dict=False,
    )
    return torch.nn.functional.mse_loss(velocity, noise - video)


def train(config: dict[str, Any], steps: int, output: Path) -> list[float]:
    """Train in the process group that there is; returns this rank's losses."""
    torch.manual_seed(0)  # the same weights everywhere
    model = build_model().train()

    # The import above, this line, and (optionally) reading what was installed and what ran.
    # It may as well come after the next line, which wraps the model.
    installation = simpletuner_segckpt.apply(model, config)
    wrapped = DistributedDataParallel(model)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())  # data of each rank's own
    losses = []
    for _ in range(steps):
        loss = training_loss(wrapped)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    if dist.get_rank() == 0:
        print(f"{installation.report}\nthe last step:\n{installation.effect}", flush=True)
        output.mkdir(parents=True, exist_ok=True)
        save_file(get_peft_model_state_dict(model), output / "adapter.safetensors")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/ddp"))
    options = parser.parse_args()
    dist.init_process_group("gloo")  # "nccl" and .to(device) on GPUs
    losses = train(CONFIG, options.steps, options.output)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
