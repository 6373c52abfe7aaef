"""Pipelines of diffusers in the least size that training scripts take, and data for them.

    python tests/trainers/tiny_pipelines.py FOLDER

Weights are random with a fixed seed, tokenizers know single letters. Nothing is downloaded.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    DDPMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

WIDTH = 16  # of a text state
DEPTH = 5  # blocks of a stack
SIZE = 64  # pixels of an image's side; a latent is 8 times smaller
FRAMES = 5
LETTERS = [chr(code) for code in range(33, 127)]
CLIP_WORDS = [
    *LETTERS,
    *(f"{letter}</w>" for letter in LETTERS),
    "<|startoftext|>",
    "<|endoftext|>",
]


def clip_tokenizer(folder: Path) -> CLIPTokenizer:
    folder.mkdir()
    words = {word: number for number, word in enumerate(CLIP_WORDS)}
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=77)


def t5_tokenizer(folder: Path) -> T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    letters = Tokenizer(models.Unigram([*pieces, *((c, -3.0) for c in LETTERS)], unk_id=2))
    letters.pre_tokenizer = pre_tokenizers.Metaspace()
    letters.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=letters, **special).save_pretrained(folder)
    return T5TokenizerFast.from_pretrained(folder, model_max_length=512)


def clip(model: type[CLIPTextModel] = CLIPTextModel) -> CLIPTextModel:
    end = len(CLIP_WORDS) - 1
    return model(
        CLIPTextConfig(
            vocab_size=len(CLIP_WORDS),
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            projection_dim=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=end - 1,
            eos_token_id=end,
            pad_token_id=end,
        )
    )


def t5(width: int = WIDTH) -> T5EncoderModel:
    words = len(LETTERS) + 4
    return T5EncoderModel(
        T5Config(vocab_size=words, d_model=width, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    )


def vae(channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8,) * 4,
        latent_channels=channels,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )


def flux(folder: Path, depths: tuple[int, int] = (DEPTH, DEPTH)) -> FluxPipeline:
    """``depths``: blocks of the two stacks. The tokenizers' files are left in ``folder``."""
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae(16),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(folder / "clip"),
        text_encoder_2=t5(),
        tokenizer_2=t5_tokenizer(folder / "t5"),
        transformer=FluxTransformer2DModel(
            in_channels=64,
            num_layers=depths[0],
            num_single_layers=depths[1],
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def sd3(folder: Path) -> StableDiffusion3Pipeline:
    tokenizer = clip_tokenizer(folder / "clip")
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(16),
        text_encoder=clip(CLIPTextModelWithProjection),
        tokenizer=tokenizer,
        text_encoder_2=clip(CLIPTextModelWithProjection),
        tokenizer_2=tokenizer,
        text_encoder_3=t5(2 * WIDTH),
        tokenizer_3=t5_tokenizer(folder / "t5"),
        transformer=SD3Transformer2DModel(
            sample_size=8,
            num_layers=DEPTH,
            in_channels=16,
            out_channels=16,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=2 * WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=2 * WIDTH,
            pos_embed_max_size=8,
            qk_norm="rms_norm",
            dual_attention_layers=(0, 1),
        ),
    )


def sdxl(folder: Path) -> StableDiffusionXLPipeline:
    tokenizer = clip_tokenizer(folder / "clip")
    return StableDiffusionXLPipeline(
        scheduler=DDPMScheduler(),
        vae=vae(4),
        text_encoder=clip(),
        tokenizer=tokenizer,
        text_encoder_2=clip(CLIPTextModelWithProjection),
        tokenizer_2=tokenizer,
        unet=UNet2DConditionModel(
            sample_size=8,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=DEPTH,
            attention_head_dim=2,
            cross_attention_dim=2 * WIDTH,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=4,
            projection_class_embeddings_input_dim=6 * 4 + WIDTH,
        ),
    )


def cogvideox(folder: Path) -> CogVideoXPipeline:
    return CogVideoXPipeline(
        scheduler=CogVideoXDPMScheduler(),
        vae=AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8,) * 4,
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=4,
        ),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(folder / "t5"),
        transformer=CogVideoXTransformer3DModel(
            num_layers=DEPTH,
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=WIDTH,
            sample_width=8,
            sample_height=8,
            sample_frames=FRAMES,
            max_text_seq_length=16,
        ),
    )


PIPELINES: dict[str, Callable[[Path], DiffusionPipeline]] = {
    "flux": flux,
    "sd3": sd3,
    "sdxl": sdxl,
    "cogvideox": cogvideox,
}


def images(folder: Path) -> dict[Path, str]:
    """Image in a new ``folder`` -> its caption."""
    folder.mkdir()
    dice = random.Random(0)
    captions = {folder / f"{number}.png": f"a photo of number {number}" for number in range(4)}
    for path in captions:
        Image.frombytes("RGB", (SIZE, SIZE), dice.randbytes(SIZE * SIZE * 3)).save(path)
    return captions


def data(folder: Path) -> None:
    """``images``, ``captioned`` (with captions in a table), ``pairs.jsonl`` and ``videos``."""
    pairs = [
        {"image": str(path), "text": text, "conditioning_image": str(path)}
        for path, text in images(folder / "images").items()
    ]
    captioned = images(folder / "captioned")
    captions = [{"file_name": path.name, "text": text} for path, text in captioned.items()]
    for path, rows in (("captioned/metadata.jsonl", captions), ("pairs.jsonl", pairs)):
        (folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    videos = folder / "videos"
    videos.mkdir()
    dice = random.Random(0)
    for number in range(len(pairs)):
        # The one video format that needs no encoder.
        frames = (b"FRAME\n" + dice.randbytes(SIZE * SIZE * 3 // 2) for _ in range(FRAMES))
        head = f"YUV4MPEG2 W{SIZE} H{SIZE} F8:1 Ip A1:1 C420\n".encode()
        (videos / f"{number}.y4m").write_bytes(head + b"".join(frames))
    (videos / "prompts.txt").write_text("".join(f"{row['text']}\n" for row in pairs))
    (videos / "videos.txt").write_text("".join(f"{number}.y4m\n" for number in range(len(pairs))))


def main(folder: Path) -> None:
    for name, build in PIPELINES.items():
        torch.manual_seed(0)
        parts = folder / "tokenizers" / name
        parts.mkdir(parents=True)
        build(parts).save_pretrained(folder / name)
    data(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
