"""A Flux LoRA with a T5 text encoder trained along: two models, each with a schedule of its own.

    python examples/text_encoder/train.py

Both are small, with random weights. The text encoder is a model of transformers: its stack is
found without a family file, and it takes the same keys.
"""

import argparse
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

import simpletuner_segckpt

TEXT_WIDTH, TEXT_TOKENS, SIDE = 32, 16, 8

# The large model: of every four blocks, the first two are one segment, the others run normally.
TRANSFORMER = {"gradient_checkpointing_interval": 2, "gradient_checkpointing_segment_stride": 4}
# The text encoder: three layers under each checkpoint call, and the last layer is kept.
ENCODER = {"gradient_checkpointing_interval": 3, "gradient_checkpointing_keep_last": 1}


def build_models() -> tuple[FluxTransformer2DModel, PeftModel]:
    """Flux and T5 in small, each with a LoRA."""
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    config = T5Config(
        vocab_size=100, d_model=TEXT_WIDTH, d_kv=16, d_ff=64, num_layers=7, num_heads=2
    )
    transformer.requires_grad_(False)
    transformer.add_adapter(lora(["to_q", "to_k", "to_v"]))
    return transformer, get_peft_model(T5EncoderModel(config), lora(["q", "k", "v"]))


def lora(targets: list[str]) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=4, lora_dropout=0.1, target_modules=targets)


def training_loss(
    transformer: FluxTransformer2DModel, encoder: PeftModel, latents: Tensor, tokens: Tensor
) -> Tensor:
    """Flow matching, with the text as the encoder reads it now: gradients go on into it."""
    text = encoder(tokens).last_hidden_state
    noise = torch.randn_like(latents)
    sigma = torch.rand(len(latents), 1, 1)
    side = torch.arange(SIDE).float()
    [velocity] = transformer(
        hidden_states=(1 - sigma) * latents + sigma * noise,
        encoder_hidden_states=text,
        pooled_projections=text.mean(1),
        timestep=sigma.flatten(),
        img_ids=torch.cartesian_prod(torch.zeros(1), side, side),
        txt_ids=torch.zeros(TEXT_TOKENS, 3),
        return_dict=False,
    )
    return nn.functional.mse_loss(velocity, noise - latents)


def train(steps: int, output: Path) -> list[float]:
    """Train both and save both adapters; returns the losses."""
    torch.manual_seed(0)
    transformer, encoder = build_models()

    # One line for each model, and (optionally) reading what was installed and what ran.
    schedules = {
        "transformer": simpletuner_segckpt.apply(transformer.train(), TRANSFORMER),
        "text encoder": simpletuner_segckpt.apply(encoder.train(), ENCODER),
    }

    trained = [p for model in (transformer, encoder) for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    latents = torch.randn(8, SIDE * SIDE, 16)
    tokens = torch.randint(100, (8, TEXT_TOKENS))
    losses = []
    for _ in range(steps):
        loss = training_loss(transformer, encoder, latents, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for name, installation in schedules.items():
        print(f"{name}, installed:\n{installation.report}")
        print(f"{name}, in the last step:\n{installation.effect}\n")
    output.mkdir(parents=True, exist_ok=True)
    save_file(get_peft_model_state_dict(transformer), output / "transformer.safetensors")
    encoder.save_pretrained(output / "text_encoder")
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}; adapters saved in {output}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("runs/text_encoder"))
    options = parser.parse_args()
    train(options.steps, options.output)


if __name__ == "__main__":
    main()
