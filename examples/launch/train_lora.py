"""A LoRA training script of the usual kind, which knows nothing of segckpt.

It has the parts of the scripts that ship with diffusers: arguments, the parts of a pipeline,
adapters, `enable_gradient_checkpointing`, `accelerator.prepare`, a loop with validation images in
between, and `save_lora_weights`. The models are small and have random weights, so that it runs
anywhere:

    python examples/launch/train_lora.py --gradient_checkpointing --output_dir runs/lora
    python -m simpletuner_segckpt.launch --config examples/launch/config.json \
        examples/launch/train_lora.py --gradient_checkpointing --output_dir runs/lora-segckpt
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPTextConfig, CLIPTextModel

WIDTH = 32  # of the text encoder
TOKENS = 8  # of a prompt


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/lora"))
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--train_text_encoder", action="store_true")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--mixed_precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--max_train_steps", type=int, default=6)
    parser.add_argument("--validation_steps", type=int, default=2)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def build_pipeline() -> FluxPipeline:
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=100,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=4,
            num_attention_heads=2,
            max_position_embeddings=TOKENS,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=2,
        )
    )
    vae = AutoencoderKL(
        block_out_channels=(8,),
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=5,
        num_single_layers=6,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
    )
    scheduler = FlowMatchEulerDiscreteScheduler()
    return FluxPipeline(scheduler, vae, text_encoder, None, None, None, transformer)


def encode_prompts(text_encoder, tokens):
    encoded = text_encoder(tokens)
    return encoded.last_hidden_state, encoded.pooler_output


def main() -> None:
    args = parse_args()
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    set_seed(args.seed)
    pipeline = build_pipeline().to(accelerator.device)
    pipeline.set_progress_bar_config(disable=True)
    vae, text_encoder, transformer = pipeline.vae, pipeline.text_encoder, pipeline.transformer
    for model in (vae, text_encoder, transformer):
        model.requires_grad_(False)

    if args.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
        if args.train_text_encoder:
            text_encoder.gradient_checkpointing_enable()

    def lora(*modules: str) -> LoraConfig:
        return LoraConfig(r=args.rank, init_lora_weights="gaussian", target_modules=list(modules))

    transformer.add_adapter(lora("to_q", "to_k", "to_v", "to_out.0"))
    trained = [transformer]
    if args.train_text_encoder:
        text_encoder = get_peft_model(text_encoder, lora("q_proj", "k_proj", "v_proj", "out_proj"))
        trained.append(text_encoder)
    parameters = [p for model in trained for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    images = torch.rand(12, 3, 16, 16) * 2 - 1
    prompts = torch.randint(3, 100, (12, TOKENS))
    data = DataLoader(TensorDataset(images, prompts), batch_size=2, shuffle=True)
    transformer, optimizer, data = accelerator.prepare(transformer, optimizer, data)
    if args.train_text_encoder:  # one that is frozen has no gradients to be averaged
        text_encoder = accelerator.prepare(text_encoder)

    step = 0
    while step < args.max_train_steps:
        for pixels, tokens in data:
            with accelerator.accumulate(transformer):
                states, pooled = encode_prompts(text_encoder, tokens)
                latents = vae.encode(pixels).latent_dist.sample()
                batch, channels, height, width = latents.shape
                noise = torch.randn_like(latents)
                sigmas = torch.rand(batch, device=latents.device)
                mixed = torch.lerp(latents, noise, sigmas.view(-1, 1, 1, 1))
                packed = FluxPipeline._pack_latents(mixed, batch, channels, height, width)
                predicted = transformer(
                    hidden_states=packed,
                    encoder_hidden_states=states,
                    pooled_projections=pooled,
                    timestep=sigmas,
                    txt_ids=torch.zeros(TOKENS, 3, device=packed.device),
                    img_ids=FluxPipeline._prepare_latent_image_ids(
                        batch, height // 2, width // 2, packed.device, packed.dtype
                    ),
                    return_dict=False,
                )[0]
                target = FluxPipeline._pack_latents(noise - latents, batch, channels, height, width)
                loss = torch.nn.functional.mse_loss(predicted.float(), target.float())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                if step % args.validation_steps == 0:
                    validate(accelerator, pipeline, transformer, text_encoder, args)
            if step >= args.max_train_steps:
                break
    print(f"trained {step} steps, last loss {loss.item():.6f}")
    save(accelerator, transformer, text_encoder if args.train_text_encoder else None, args)
    accelerator.end_training()


@torch.no_grad()
def validate(accelerator, pipeline, transformer, text_encoder, args) -> None:
    """An image, as a user of the adapter would make it."""
    if not accelerator.is_main_process:
        return
    pipeline.transformer = accelerator.unwrap_model(transformer)
    if args.gradient_checkpointing:
        pipeline.transformer.disable_gradient_checkpointing()
    tokens = torch.arange(3, 3 + TOKENS, device=accelerator.device).unsqueeze(0)
    states, pooled = encode_prompts(accelerator.unwrap_model(text_encoder), tokens)
    pipeline(
        prompt_embeds=states,
        pooled_prompt_embeds=pooled,
        height=16,
        width=16,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(args.seed),
        output_type="latent",
    )
    if args.gradient_checkpointing:
        pipeline.transformer.enable_gradient_checkpointing()


def save(accelerator, transformer, text_encoder, args) -> None:
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return
    layers = {
        f"{name}_lora_layers": get_peft_model_state_dict(accelerator.unwrap_model(model))
        for name, model in (("transformer", transformer), ("text_encoder", text_encoder))
        if model is not None
    }
    FluxPipeline.save_lora_weights(args.output_dir, **layers)


if __name__ == "__main__":
    main()
