"""A training loop of one's own on accelerate: a Wan LoRA with everything that such loops have.

    python examples/accelerate_loop/train.py
    accelerate launch examples/accelerate_loop/train.py

bf16 mixed precision, gradients that add up over three batches, clipping, validation in between
without recomputing, checkpoints to resume from. The model is small and has random weights.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import simpletuner_segckpt

TEXT_TOKENS, TEXT_WIDTH = 8, 32


def build_model() -> WanTransformer3DModel:
    """Wan in small, frozen, with a LoRA on its attentions."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=96,
        num_layers=8,
    )
    model.requires_grad_(False)
    names = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, lora_dropout=0.1, target_modules=names))
    return model


def make_dataset(count: int = 18) -> TensorDataset:
    """Latents of short videos, and what a text encoder made of their captions."""
    return TensorDataset(
        torch.randn(count, 4, 3, 8, 8), torch.randn(count, TEXT_TOKENS, TEXT_WIDTH)
    )


def training_loss(model: Any, latents: Tensor, captions: Tensor) -> Tensor:
    """Flow matching: predict the velocity from the data to the noise."""
    noise = torch.randn_like(latents)
    sigma = torch.rand(len(latents), 1, 1, 1, 1, device=latents.device)
    [velocity] = model(
        hidden_states=(1 - sigma) * latents + sigma * noise,
        timestep=1000 * sigma.flatten(),
        encoder_hidden_states=captions,
        return_dict=False,
    )
    return mse_loss(velocity.float(), noise - latents)


@torch.no_grad()
def validate(model: WanTransformer3DModel, called: Any, batch: list[Tensor]) -> float:
    """As trainers do it: checkpointing off, and on again afterwards with the same schedule."""
    model.disable_gradient_checkpointing()
    called.eval()
    try:
        return training_loss(called, *batch).item()
    finally:
        called.train()
        model.enable_gradient_checkpointing()


def train(output: Path, config: Path | None, epochs: int) -> list[float]:
    """Train, with the schedule of ``config`` if there is one; returns the losses."""
    accelerator = Accelerator(
        mixed_precision="bf16", gradient_accumulation_steps=3, project_dir=output
    )
    set_seed(42)
    model = build_model()
    installation = simpletuner_segckpt.apply(model, config) if config else None

    loader = DataLoader(make_dataset(), batch_size=2, shuffle=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    called, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    held_out = [tensor.to(accelerator.device) for tensor in make_dataset(2).tensors]

    called.train()
    losses = []
    for epoch in range(epochs):
        for latents, captions in loader:
            with accelerator.accumulate(called):
                loss = training_loss(called, latents, captions)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        held_out_loss = validate(model, called, held_out)
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}, held out {held_out_loss:.4f}")
        accelerator.save_state(str(output / f"epoch-{epoch}"))

    if accelerator.is_main_process:
        model.save_lora_adapter(output / "adapter")
        if installation:
            print(f"installed:\n{installation.report}")
            print(f"in the last step:\n{installation.effect}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("config.json"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/accelerate_loop"))
    options = parser.parse_args()
    train(options.output, options.config, options.epochs)


if __name__ == "__main__":
    main()
