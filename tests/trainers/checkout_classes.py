"""Model classes of kohya's sd-scripts and musubi-tuner, built small: the keys on each.

    python tests/trainers/checkout_classes.py --checkout sd-scripts=DIR --checkout musubi-tuner=DIR

Not collected by pytest; needs what the classes import (einops, torchvision, opencv-python-headless,
...). Exits with 1 where a class is wrong or not served.
"""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from class_page import page
from class_runner import Row, random_weights, run

# What is put on the path of a checkout's root.
SOURCES = {"sd-scripts": ".", "musubi-tuner": "src"}

FIXED = "its sizes are fixed in the class, 8 and 17 billion parameters"

STREAMS = {"hidden_size": 32, "num_heads": 2, "depth": 6, "depth_single_blocks": 6}
FLUX = STREAMS | {
    "in_channels": 8,
    "context_in_dim": 16,
    "mlp_ratio": 2.0,
    "axes_dim": [4, 6, 6],
    "theta": 10_000,
    "qkv_bias": True,
    "guidance_embed": True,
}


def randomised(model: nn.Module) -> nn.Module:
    random_weights(model)
    if isinstance(table := getattr(model, "pos_embed", None), torch.Tensor):
        table.normal_(std=0.05)  # SD3's waits for its weights
    return model


def switch_on(model: Any) -> None:
    model.enable_gradient_checkpointing()


def made(path: str, *args: Any, **kwargs: Any) -> Any:
    """What the class or function at a dotted path returns."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)(*args, **kwargs)


def row(
    family: str,
    path: str,
    build: Callable[[], nn.Module] | None = None,
    inputs: Callable[[], dict[str, Any]] | None = None,
    **more: Any,
) -> Row:
    """One class; ``inputs`` makes the arguments of its forward."""
    return Row(
        family,
        path,
        inputs={},
        build=(lambda: randomised(build())) if build else None,
        prepare=(lambda _: inputs()) if inputs else (lambda given: given),
        **more,
    )


def configured(path: str, params: str, values: dict[str, Any], **more: Any) -> Callable[[], Any]:
    """Makes a model of a class that takes a dataclass of the same module."""
    module = path.rpartition(".")[0]
    return lambda: made(path, made(f"{module}.{params}", **values), **more)


def flux_inputs() -> dict[str, Any]:
    return {
        "img": torch.randn(2, 16, 8),
        "img_ids": torch.randint(4, (2, 16, 3)).float(),
        "txt": torch.randn(2, 4, 16),
        "txt_ids": torch.zeros(2, 4, 3),
        "timesteps": torch.full((2,), 0.5),
        "y": torch.randn(2, 16),
        "guidance": torch.full((2,), 3.5),
    }


def chroma_inputs() -> dict[str, Any]:
    inputs = flux_inputs() | {"txt_attention_mask": torch.ones(2, 4)}
    return inputs | {"mod_vectors": torch.randn(2, 3 * 6 + 2 * 6 * 6 + 2, 32)}


def flux2_inputs() -> dict[str, Any]:
    return {
        "x": torch.randn(2, 16, 8),
        "x_ids": torch.randint(4, (2, 16, 4)).float(),
        "timesteps": torch.full((2,), 0.5),
        "ctx": torch.randn(2, 4, 16),
        "ctx_ids": torch.zeros(2, 4, 4),
        "guidance": torch.full((2,), 3.5),
    }


def wan_inputs() -> dict[str, Any]:
    return {
        "x": [torch.randn(4, 1, 8, 8) for _ in range(2)],
        "t": torch.full((2,), 500.0),
        "context": [torch.randn(length, 16) for length in (3, 4)],
        "seq_len": 16,
    }


def qwen_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, 4, 16),
        "encoder_hidden_states_mask": torch.ones(2, 4, dtype=torch.bool),
        "timestep": torch.full((2,), 0.5),
        "img_shapes": [[(1, 4, 4)]] * 2,
        "txt_seq_lens": [4, 4],
    }


def z_image_inputs() -> dict[str, Any]:
    return {
        "x": torch.randn(2, 4, 1, 8, 8),
        "t": torch.full((2,), 0.5),
        "cap_feats": torch.randn(2, 4, 16),
        "cap_mask": torch.ones(2, 4, dtype=torch.bool),
    }


def lumina_inputs() -> dict[str, Any]:
    return z_image_inputs() | {"x": torch.randn(2, 4, 8, 8), "cap_mask": torch.ones(2, 4).long()}


def krea2_inputs() -> dict[str, Any]:
    return {
        "img": torch.randn(2, 16, 8),
        "context": torch.randn(2, 4, 2, 16),
        "t": torch.full((2,), 0.5),
        "pos": torch.randint(4, (2, 20, 3)).float(),
        "mask": torch.ones(2, 20, dtype=torch.bool),
    }


def ideogram_inputs() -> dict[str, Any]:
    image, text = 2, 3  # its marks for the two kinds of tokens
    return {
        "llm_features": torch.randn(2, 12, 16),
        "x": torch.randn(2, 12, 8),
        "t": torch.full((2,), 0.5),
        "position_ids": torch.randint(4, (2, 12, 3)),
        "attention_mask": torch.ones(2, 4, dtype=torch.long),
        "indicator": torch.tensor([[image] * 8 + [text] * 4] * 2),
    }


def framepack_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "timestep": torch.full((2,), 500.0),
        "encoder_hidden_states": torch.randn(2, 4, 16),
        "encoder_attention_mask": torch.ones(2, 4, dtype=torch.bool),
        "pooled_projections": torch.randn(2, 16),
        "guidance": torch.full((2,), 3.5),
        "latent_indices": torch.arange(2)[None].expand(2, -1),
        "image_embeddings": torch.randn(2, 3, 16),
        "return_dict": False,
    }


def sd3_inputs() -> dict[str, Any]:
    return {
        "x": torch.randn(2, 4, 8, 8),
        "t": torch.full((2,), 500.0),
        "y": torch.randn(2, 16),
        "context": torch.randn(2, 4, 16),
    }


def anima_inputs() -> dict[str, Any]:
    return {
        "x": torch.randn(2, 4, 1, 8, 8),
        "timesteps": torch.full((2, 1), 0.5),
        "context": torch.randn(2, 4, 16),
        "padding_mask": torch.zeros(2, 1, 8, 8),
    }


FLUX_BESIDE = ("time_in", "vector_in", "guidance_in")
KREA2 = {
    "features": 32,
    "tdim": 16,
    "txtdim": 16,
    "heads": 2,
    "multiplier": 2,
    "layers": 6,
    "patch": 1,
    "channels": 8,
    "kvheads": 2,
    "txtlayers": 2,
    "txtheads": 2,
    "txtkvheads": 2,
}
IDEOGRAM = {
    "emb_dim": 32,
    "num_layers": 6,
    "num_heads": 2,
    "intermediate_size": 64,
    "adanln_dim": 8,
    "in_channels": 8,
    "llm_features_dim": 16,
    "mrope_section": (4, 2, 2),
}
CHROMA = {key: value for key, value in FLUX.items() if key != "vec_in_dim"} | {
    "approximator_in_dim": 16,
    "approximator_depth": 2,
    "approximator_hidden_size": 32,
    "_use_compiled": False,
}


def musubi() -> list[Row]:
    models = "musubi_tuner"
    flux, flux2 = f"{models}.flux.flux_models.Flux", f"{models}.flux_2.flux2_models.Flux2"
    wan = f"{models}.wan.modules.model.WanModel"
    qwen = f"{models}.qwen_image.qwen_image_model.QwenImageTransformer2DModel"
    z_image = f"{models}.zimage.zimage_model.ZImageTransformer2DModel"
    krea2 = f"{models}.krea2.krea2_mmdit.SingleStreamDiT"
    ideogram = f"{models}.ideogram4.ideogram4_model.Ideogram4Transformer"
    framepack = f"{models}.frame_pack.hunyuan_video_packed.HunyuanVideoTransformer3DModelPacked"
    hunyuan = f"{models}.hunyuan_model.models.HYVideoDiffusionTransformer"
    hunyuan15 = f"{models}.hunyuan_video_1_5.hunyuan_video_1_5_models"
    kandinsky = f"{models}.kandinsky5.models.dit.DiffusionTransformer3D"
    torch_only = {"attn_mode": "torch"}
    flux2_values = STREAMS | {"in_channels": 8, "context_in_dim": 16, "axes_dim": [4, 4, 4, 4]}
    return [
        row(
            "flux",
            flux,
            configured(flux, "FluxParams", FLUX | {"vec_in_dim": 16}, **torch_only),
            flux_inputs,
            beside=FLUX_BESIDE,
        ),
        row(
            "flux2",
            flux2,
            configured(flux2, "Flux2Params", flux2_values, **torch_only),
            flux2_inputs,
            beside=("time_in", "guidance_in"),
        ),
        row(
            "wan",
            wan,
            lambda: made(
                wan,
                dim=32,
                ffn_dim=64,
                freq_dim=16,
                text_dim=16,
                in_dim=4,
                out_dim=4,
                num_heads=2,
                num_layers=6,
                text_len=4,
                **torch_only,
            ),
            wan_inputs,
        ),
        row(
            "qwen_image",
            qwen,
            lambda: made(
                qwen,
                in_channels=16,
                out_channels=4,
                num_layers=6,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=16,
                axes_dims_rope=(4, 6, 6),
            ),
            qwen_inputs,
        ),
        row(
            "z_image",
            z_image,
            lambda: made(
                z_image,
                in_channels=4,
                dim=32,
                n_layers=6,
                n_heads=2,
                n_kv_heads=2,
                cap_feat_dim=16,
                axes_dims=[4, 6, 6],
                axes_lens=[64, 32, 32],
            ),
            z_image_inputs,
        ),
        row("krea2", krea2, configured(krea2, "SingleMMDiTConfig", KREA2), krea2_inputs),
        row(
            "ideogram", ideogram, configured(ideogram, "Ideogram4Config", IDEOGRAM), ideogram_inputs
        ),
        row(
            "framepack",
            framepack,
            lambda: made(
                framepack,
                in_channels=4,
                out_channels=4,
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=6,
                num_single_layers=6,
                num_refiner_layers=1,
                has_image_proj=True,
                image_proj_dim=16,
                text_embed_dim=16,
                pooled_projection_dim=16,
                rope_axes_dim=(4, 6, 6),
                split_attn=True,
                **torch_only,
            ),
            framepack_inputs,
            beside=(
                *("x_embedder.proj", "time_text_embed", "context_embedder", "image_projection"),
                *("norm_out", "proj_out"),
            ),
        ),
        row("hunyuan_video", hunyuan, cannot="its text refiner asks for a GPU"),
        row("kandinsky5_video", kandinsky, cannot="it casts to bfloat16 inside, wherever it runs"),
        row("hunyuanvideo", f"{hunyuan15}.HunyuanVideo_1_5_DiffusionTransformer", cannot=FIXED),
    ]


def sd_scripts() -> list[Row]:
    flux, chroma = "library.flux_models.Flux", "library.chroma_models.Chroma"
    sd3, lumina = "library.sd3_models.MMDiT", "library.lumina_models.NextDiT"
    anima = "library.anima_models.Anima"
    return [
        row(
            "flux",
            flux,
            configured(flux, "FluxParams", FLUX | {"vec_in_dim": 16}),
            flux_inputs,
            beside=FLUX_BESIDE,
        ),
        row("chroma", chroma, configured(chroma, "ChromaParams", CHROMA), chroma_inputs),
        row(
            "sd3",
            sd3,
            lambda: made(
                sd3,
                input_size=None,
                depth=6,
                adm_in_channels=16,
                context_embedder_in_features=16,
                context_embedder_out_features=384,
                pos_embed_max_size=8,
                num_patches=64,
                qk_norm="rms",
            ),
            sd3_inputs,
        ),
        row(
            "lumina2",
            lumina,
            lambda: made(
                lumina,
                dim=32,
                n_layers=6,
                n_heads=2,
                n_kv_heads=2,
                multiple_of=16,
                cap_feat_dim=16,
                axes_dims=[4, 6, 6],
                axes_lens=[64, 32, 32],
            ),
            lumina_inputs,
            beside=("t_embedder", "final_layer"),
        ),
        row(
            "anima",
            anima,
            lambda: made(
                anima,
                max_img_h=16,
                max_img_w=16,
                max_frames=4,
                in_channels=4,
                out_channels=4,
                patch_spatial=2,
                patch_temporal=1,
                model_channels=32,
                num_blocks=6,
                num_heads=2,
                mlp_ratio=2.0,
                crossattn_emb_channels=16,
                pos_emb_cls="rope3d",
                use_adaln_lora=True,
                adaln_lora_dim=8,
            ),
            anima_inputs,
        ),
        row(
            "hunyuan_image",
            "library.hunyuan_image_models.HYImageDiffusionTransformer",
            cannot=FIXED,
        ),
    ]


TABLES = {"musubi-tuner": musubi, "sd-scripts": sd_scripts}

INTRODUCTION = """
# Classes of kohya's scripts

Written by `python tests/trainers/checkout_classes.py`, from checkouts of sd-scripts and
musubi-tuner. Models of six blocks to a stack with random weights, on a CPU; a cell is
"blocks that backward ran again / kB alive after a forward"; under `layer` the second pair is
the class's own `enable_gradient_checkpointing()`, on the same weights. Where that recomputes more
than blocks, the table of segments says what, and how much less `layer` would keep with ours if it
were recomputed as well.
"""


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--checkout", action="append", default=[], metavar="NAME=DIR")
    made.add_argument("--write", type=Path, metavar="PAGE")
    made.add_argument("names", nargs="*", metavar="FAMILY")
    options = made.parse_args()
    rows = []
    for given in options.checkout:
        name, _, folder = given.partition("=")
        if name not in TABLES or not Path(folder).is_dir():
            made.error(f"--checkout is {given}; write one of {', '.join(TABLES)} and its folder")
        sys.path.insert(0, str(Path(folder, SOURCES[name]).resolve()))
        rows += [r for r in TABLES[name]() if not options.names or r.family in options.names]
    torch.cuda.current_device = lambda: 0  # musubi's T5 asks for it when it is imported
    outcomes = list(run(rows, native=False, own_switch=switch_on))
    text = page(outcomes, INTRODUCTION, "")
    if options.write:
        options.write.write_text(text, "utf-8")
    else:
        print(text)
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"{outcome.row.model_class}: {problem}", file=sys.stderr)
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
