"""SimpleTuner's own model classes, built small: the keys on each, beside its own setters.

    python tests/trainers/simpletuner_classes.py [--write PAGE] [FAMILY ...]

Needs SimpleTuner 4.10.1 and so Python 3.12; not collected by pytest. Exits with 1 where a class
is wrong, keeps more than its own setters do in the same mode, or is not served.
"""

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from class_page import page
from class_runner import Row, random_weights, run

MODELS = "simpletuner.helpers.models"


def normal(*shape: int) -> dict[str, Any]:
    return {"shape": list(shape)}


def integers(high: int, *shape: int, low: int = 0) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": "int64", "low": low, "high": high}


def full(value: float, *shape: int, dtype: str = "float32") -> dict[str, Any]:
    return {"shape": list(shape), "fill": value, "dtype": dtype}


def row(family: str, path: str, **rest: Any) -> Row:
    return Row(family, f"{MODELS}.{path}", **rest)


def built(path: str, config: Any, **values: Any) -> Any:
    """A model of a class that takes a configuration object."""
    module, _, name = f"{MODELS}.{path}".rpartition(".")
    return random_weights(getattr(import_module(module), name)(config(**values)))


def ideogram() -> Any:
    config = import_module(f"{MODELS}.ideogram.transformer").Ideogram4Config
    return built(
        "ideogram.transformer.Ideogram4Transformer",
        config,
        emb_dim=32,
        num_layers=6,
        num_heads=2,
        intermediate_size=64,
        adanln_dim=8,
        in_channels=8,
        llm_features_dim=16,
        mrope_section=(4, 2, 2),
    )


def heartmula() -> Any:
    module = import_module(f"{MODELS}.heartmula.modeling_heartmula")
    tiny = {
        "num_layers": 6,
        "num_heads": 2,
        "num_kv_heads": 2,
        "embed_dim": 32,
        "max_seq_len": 64,
        "intermediate_dim": 64,
    }
    module._LLAMA_FLAVORS["tiny"] = tiny
    config = import_module(f"{MODELS}.heartmula.configuration_heartmula").HeartMuLaConfig
    return built(
        "heartmula.modeling_heartmula.HeartMuLaModel",
        config,
        backbone_flavor="tiny",
        decoder_flavor="tiny",
        text_vocab_size=32,
        audio_vocab_size=16,
        audio_num_codebooks=4,
        muq_dim=8,
    )


def ace_step() -> Any:
    """With a small encoder of lyrics, whose size is no matter of configuration."""
    from simpletuner_segckpt.families.schema import Tiny
    from simpletuner_segckpt.model.tiny import make_model

    module = import_module(f"{MODELS}.ace_step.transformer")
    encoder = module.LyricEncoder
    small = {"output_size": 32, "attention_heads": 2, "linear_units": 32, "num_blocks": 2}
    module.LyricEncoder = partial(encoder, **small)
    config = {
        "in_channels": 8,
        "num_layers": 6,
        "inner_dim": 32,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "out_channels": 8,
        "max_position": 64,
        "speaker_embedding_dim": 8,
        "text_embedding_dim": 16,
        "ssl_encoder_depths": [1, 1],
        "ssl_latent_dims": [8, 8],
        "lyric_encoder_vocab_size": 32,
        "lyric_hidden_size": 32,
        "patch_size": [4, 1],
        "max_height": 4,
        "max_width": 32,
    }
    try:
        path = f"{MODELS}.ace_step.transformer.ACEStepTransformer2DModel"
        return make_model(Tiny(**{"class": path, "config": config}))
    finally:
        module.LyricEncoder = encoder


def boogu_frequencies(inputs: Mapping[str, Any]) -> dict[str, Any]:
    rope = import_module(f"{MODELS}.boogu_image.rope").BooguImageRotaryPosEmbed
    return {**inputs, "freqs_cis": rope.get_freqs_cis((4, 6, 6), (64, 32, 32), theta=10000)}


IMAGE = normal(4, 1, 8, 8)

ROWS = [
    row(
        "ace_step",
        "ace_step.transformer.ACEStepTransformer2DModel",
        flavour="base",
        build=ace_step,
        inputs={
            "hidden_states": normal(2, 8, 4, 8),
            "attention_mask": full(1, 2, 8),
            "encoder_text_hidden_states": normal(2, 4, 16),
            "text_attention_mask": full(1, 2, 4, dtype="int64"),
            "speaker_embeds": normal(2, 8),
            "lyric_token_idx": integers(32, 2, 5, low=1),
            "lyric_mask": full(1, 2, 5, dtype="int64"),
            "timestep": full(500, 2),
            "return_dict": False,
        },
    ),
    row(
        "anima",
        "anima.transformer.AnimaTransformerModel",
        config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 6,
            "text_embed_dim": 16,
            "adaln_lora_dim": 8,
            "max_size": [8, 16, 16],
            "adapter_vocab_size": 32,
            "adapter_dim": 16,
            "adapter_layers": 2,
            "adapter_heads": 2,
        },
        inputs={
            "hidden_states": normal(2, 4, 1, 4, 4),
            "timestep": full(0.5, 2),
            "encoder_hidden_states": normal(2, 4, 16),
            "return_dict": False,
        },
    ),
    row("auraflow", "auraflow.transformer.AuraFlowTransformer2DModel"),
    row(
        "boogu_image",
        "boogu_image.transformer.BooguImageTransformer2DModel",
        config={
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 12,
            "num_double_stream_layers": 6,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 2,
            "multiple_of": 32,
            "axes_dim_rope": [4, 6, 6],
            "axes_lens": [64, 32, 32],
            "instruction_feature_configs": {
                "instruction_feat_dim": 16,
                "reduce_type": "mean",
                "num_instruction_feat_layers": 1,
            },
        },
        inputs={
            "hidden_states": normal(2, 4, 8, 8),
            "timestep": full(0.5, 2),
            "instruction_hidden_states": normal(2, 4, 16),
            "instruction_attention_mask": full(1, 2, 4, dtype="int64"),
        },
        prepare=boogu_frequencies,
    ),
    row("chroma", "chroma.transformer.ChromaTransformer2DModel"),
    row("cosmos", "cosmos.transformer.CosmosTransformer3DModel"),
    row("cosmos3", "cosmos3.transformer.Cosmos3OmniTransformer"),
    row("deepfloyd", "unet_flowmap.FlowMapUNet2DConditionModel"),
    row("ernie", "ernie.transformer.ErnieImageTransformer2DModel"),
    row("flux", "flux.transformer.FluxTransformer2DModel"),
    row("flux2", "flux2.transformer.Flux2Transformer2DModel"),
    row(
        "flux3_image",
        "flux3_image.transformer.Flux3ImageTransformer2DModel",
        inputs={
            "hidden_states": normal(2, 16, 8),
            "encoder_hidden_states": normal(2, 4, 16),
            "timestep": full(0.5, 2),
            "img_ids": integers(4, 16, 4),
            "txt_ids": integers(4, 4, 4),
            "conditioning_hidden_states": normal(2, 4, 8),
            "conditioning_ids": integers(4, 4, 4),
            "return_dict": False,
        },
    ),
    row(
        "heartmula",
        "heartmula.modeling_heartmula.HeartMuLaModel",
        build=heartmula,
        inputs={"tokens": integers(16, 2, 6, 5), "tokens_mask": full(1, 2, 6, 5, dtype="bool")},
    ),
    row(
        "hidream",
        "hidream.transformer.HiDreamImageTransformer2DModel",
        beside=(
            *("t_embedder", "p_embedder", "x_embedder", "pe_embedder"),
            *("caption_projection.*", "final_layer"),
        ),
        inputs={
            "hidden_states": normal(2, 4, 8, 8),
            "timesteps": full(500, 2),
            "t5_hidden_states": normal(2, 4, 16),
            "llama_hidden_states": normal(4, 2, 4, 16),
            "pooled_embeds": normal(2, 16),
            "return_dict": False,
        },
    ),
    row("hunyuanvideo", "hunyuanvideo.transformer.HunyuanVideo15Transformer3DModel"),
    row(
        "ideogram",
        "ideogram.transformer.Ideogram4Transformer",
        build=ideogram,
        inputs={
            "llm_features": normal(2, 8, 16),
            "x": normal(2, 8, 8),
            "t": full(0.5, 2),
            "position_ids": integers(8, 2, 8, 3),
            "segment_ids": full(1, 2, 8, dtype="int64"),
            "indicator": {"values": [[3, 3, 3, 3, 2, 2, 2, 2]] * 2, "dtype": "int64"},
        },
    ),
    row(
        "infinitetalk",
        "infinitetalk.transformer.InfiniteTalkTransformer3DModel",
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 6,
            "image_dim": None,
            "added_kv_proj_dim": None,
            "rope_max_seq_len": 32,
            "audio_window": 5,
            "audio_layers": 2,
            "audio_dim": 8,
            "audio_intermediate_dim": 16,
            "audio_output_dim": 8,
            "audio_context_tokens": 2,
        },
        inputs={
            "hidden_states": normal(1, 4, 2, 4, 4),
            "timestep": full(500, 1),
            "encoder_hidden_states": normal(1, 4, 16),
            "audio_hidden_states": normal(1, 5, 5, 2, 8),
            "return_dict": False,
        },
    ),
    row("kandinsky5_video", "kandinsky5_video.transformer_kandinsky5.Kandinsky5Transformer3DModel"),
    row("krea2", "krea2.transformer.Krea2Transformer2DModel"),
    row("longcat_image", "longcat_image.transformer.LongCatImageTransformer2DModel"),
    row(
        "longcat_video",
        "longcat_video.transformer.LongCatVideoTransformer3DModel",
        config={
            "in_channels": 4,
            "out_channels": 4,
            "hidden_size": 32,
            "depth": 6,
            "num_heads": 2,
            "caption_channels": 16,
            "adaln_tembed_dim": 16,
            "frequency_embedding_size": 16,
        },
        inputs={
            "hidden_states": normal(2, 4, 1, 4, 4),
            "timestep": full(500, 2),
            "encoder_hidden_states": normal(2, 4, 16),
            "return_dict": False,
        },
    ),
    row("ltxvideo", "ltxvideo.transformer.LTXVideoTransformer3DModel"),
    row("ltxvideo2", "ltxvideo2.transformer.LTX2VideoTransformer3DModel"),
    row("lumina2", "lumina2.transformer.Lumina2Transformer2DModel"),
    row(
        "mageflow",
        "mageflow.transformer.MageFlowTransformer2DModel",
        config={
            "in_channels": 4,
            "out_channels": 4,
            "context_in_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "depth": 6,
            "axes_dim": [4, 6, 6],
            "param_dtype": "float32",
        },
        inputs={
            "img": normal(1, 32, 4),
            "txt": normal(1, 8, 16),
            "timesteps": full(0.5, 2),
            "img_shapes": [[[1, 4, 4], [1, 4, 4]]],
            "img_cu_seqlens": {"values": [0, 16, 32], "dtype": "int32"},
            "txt_cu_seqlens": {"values": [0, 4, 8], "dtype": "int32"},
        },
    ),
    row("minimaxh3", "minimaxh3.transformer.MiniMaxH3Transformer3DModel"),
    row("minimaxmusic", "minimaxmusic.transformer.MiniMaxMusic3Transformer1DModel"),
    row(
        "moss_image",
        "moss_image.transformer.MOSSImageTransformer",
        config={
            "dim": 32,
            "ffn_dim": 64,
            "num_heads": 2,
            "num_layers": 6,
            "text_dim": 16,
            "freq_dim": 16,
            "latent_channels": 4,
        },
        inputs={
            "hidden_states": normal(2, 4, 4, 4),
            "timestep": full(0.5, 2),
            "encoder_hidden_states": normal(2, 4, 16),
            "return_dict": False,
        },
    ),
    row("omnigen", "omnigen.transformer.OmniGenTransformer2DModel"),
    row("pixart", "pixart.transformer.PixArtTransformer2DModel"),
    row("qwen_image", "qwen_image.transformer.QwenImageTransformer2DModel", flavour="v1.0"),
    row("qwen_image", "qwen_image.transformer_21.QwenImage21Transformer2DModel", flavour="v2.1"),
    row("sana", "sana.transformer.SanaTransformer2DModel"),
    row("sanavideo", "sanavideo.transformer.SanaVideoTransformer3DModel"),
    row("sd1x", "unet_flowmap.FlowMapUNet2DConditionModel"),
    row("sd3", "sd3.transformer.SD3Transformer2DModel"),
    row("sdxl", "unet_flowmap.FlowMapUNet2DConditionModel"),
    row("stable_cascade", "stable_cascade.unet.StableCascadeUNet"),
    row("wan", "wan.transformer.WanTransformer3DModel"),
    row(
        "wan_s2v",
        "wan_s2v.transformer.WanS2VTransformer3DModel",
        config={
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "audio_dim": 8,
            "audio_inject_layers": [0, 4],
            "pose_dim": 4,
            "ffn_dim": 32,
            "num_layers": 6,
            "num_weighted_avg_layers": 2,
            "rope_max_seq_len": 32,
        },
        inputs={
            "hidden_states": normal(1, 4, 2, 8, 8),
            "timestep": full(500, 1),
            "encoder_hidden_states": normal(1, 4, 16),
            "motion_latents": normal(1, 4, 2, 8, 8),
            "audio_embeds": normal(1, 2, 8, 8),
            "image_latents": normal(1, 4, 1, 8, 8),
            "pose_latents": normal(1, 4, 2, 8, 8),
            "motion_frames": [5, 2],
            "return_dict": False,
        },
    ),
    row(
        "z_image",
        "z_image.transformer.ZImageTransformer2DModel",
        inputs={
            "x": [IMAGE, IMAGE],
            "t": full(0.5, 2),
            "cap_feats": [normal(6, 16), normal(40, 16)],
        },
    ),
    row(
        "z_image_omni",
        "z_image_omni.transformer.ZImageOmniTransformer2DModel",
        inputs={
            "x": [IMAGE, IMAGE],
            "t": full(0.5, 2),
            "cap_feats": [
                [normal(6, 16), normal(5, 16), normal(3, 16)],
                [normal(40, 16), normal(5, 16), normal(3, 16)],
            ],
            "cond_latents": [[IMAGE], [IMAGE]],
            "siglip_feats": [[normal(4, 4, 16)] * 2, [normal(4, 4, 16)] * 2],
        },
    ),
    row(
        "zlab_i1",
        "zlab_i1.transformer.ZlabI1Transformer2DModel",
        config={
            "input_size": 8,
            "image_resolution": 64,
            "in_channels": 4,
            "hidden_size": 32,
            "depth": 13,
            "num_heads": 2,
            "text_embed_dim": 16,
            "text_num_tokens": 4,
        },
        inputs={"x": normal(2, 4, 8, 8), "t": full(0.5, 2), "caption": normal(2, 4, 16)},
    ),
]


INTRODUCTION = """
# SimpleTuner's own classes

Each model class of SimpleTuner 4.10.1, built small with random weights on a CPU (torch 2.13,
diffusers 0.42.1), and one training step of it: plain, with each set of keys carried out by this
package, and with the same keys given to the class's own setters (`native=True`), on the same
weights in one process. `python tests/trainers/simpletuner_classes.py --write PAGE` makes this page.

In a cell stand the blocks that backward ran again, and the kilobytes (1000 bytes) that the
forward left alive for backward: first of this package, then, after the dot, of the class itself.
A dash is a key that is refused, or a class without setters. **wrong** means that the gradients
are not those of the plain step; the name of an error, that the class ended with it. The trainer's
own calls (`enable_gradient_checkpointing`, `disable_gradient_checkpointing`, its setters) were
made before and after `apply`, and changed nothing.

`layer` is no key but the switch; `2 of 3` is interval 2 with stride 3; `unsloth` and both `keep`
and `keep_last` columns have interval 2; `offload` is `offload_attention` with 2 of 3. On a CPU
nothing is moved, so these two show only what runs again, and bytes of `offload` are no comparison.
Units of UNets (ResNet blocks and the like) run one by one and are not among the blocks counted.
"""

NOTES = """
## Read with care

- Nothing here is a prediction: the models are tiny, and `segckpt estimate` is for real sizes.
- Where a class recomputes more than blocks in every mode, the table of segments says what, and
  how much less `layer` would keep with ours if that were recomputed as well.
- Which blocks a class covers in a mode is its own matter ([families](../families.md)); where it
  covers fewer, it runs fewer again and keeps more.
- With `torch-ffn` this package recomputes feed-forward modules. Classes draw other lines: MageFlow
  and MiniMax H3 take the norm before it along, Flux.1 also what stands beside the attention in
  single-stream blocks and is no module of its own. They keep less there, and run more again.
- Chroma, HiDream and ZLab I1 give every block something of its own (a slice of the modulation, a
  Llama state, a skip connection), so no two of their blocks can run as one. ZLab I1's own class
  hands the skip connections through its segments, and keeps less there. Wan S2V adds the audio
  after some blocks, where its segments end.
"""


def trainer_calls(model: Any) -> None:
    """What SimpleTuner calls on the model that it trains, around a validation, too."""
    for switch in ("enable", "disable", "enable"):
        getattr(model, f"{switch}_gradient_checkpointing", lambda: None)()
    for setter, value in (
        ("set_gradient_checkpointing_interval", 3),
        ("set_gradient_checkpointing_segment_stride", 5),
        ("set_gradient_checkpointing_backend", "torch"),
        ("set_gradient_checkpointing_offload_attention", False),
    ):
        getattr(model, setter, lambda value: None)(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="only these")
    parser.add_argument("--write", type=Path, help="the page that the tables go to")
    arguments = parser.parse_args()
    rows = [r for r in ROWS if not arguments.families or r.family in arguments.families]
    outcomes = []
    for outcome in run(rows, native=True, trainer_calls=trainer_calls):
        outcomes.append(outcome)
        print(outcome.title, *(outcome.problems or ["as planned"]), sep="\n    ", flush=True)
    if arguments.write:
        text = page(outcomes, INTRODUCTION, NOTES)
        arguments.write.write_text(text, encoding="utf-8")
    return any(outcome.problems for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
