"""The keys of a trainer's config that say what a training step is: for the estimator.

Names and values are SimpleTuner's. Everything else of the file is left alone.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator

from .keys import _Keys
from .spelling import json_value, one_of, path, real_number, switch, whole_number, word

RESOLUTION_TYPES = ("pixel", "area", "pixel-area")
MODEL_TYPES = ("lora", "full")
LORA_TYPES = ("standard", "lycoris")
PRECISIONS = ("no", "bf16", "fp16", "fp8")


class TrainingKeys(_Keys):
    """What is trained, and on what; None where the file does not say."""

    train_batch_size: Annotated[int | None, BeforeValidator(whole_number(1, "samples"))] = None
    gradient_accumulation_steps: Annotated[int, BeforeValidator(whole_number(1, "steps"))] = 1
    resolution: Annotated[float | None, BeforeValidator(real_number)] = None
    resolution_type: Annotated[str, BeforeValidator(one_of(RESOLUTION_TYPES))] = "pixel-area"
    num_frames: Annotated[int | None, BeforeValidator(whole_number(1, "frames"))] = None
    data_backend_config: Annotated[Any, BeforeValidator(json_value)] = None
    model_type: Annotated[str, BeforeValidator(one_of(MODEL_TYPES))] = "lora"
    lora_type: Annotated[str, BeforeValidator(one_of(LORA_TYPES))] = "standard"
    lora_rank: Annotated[int | None, BeforeValidator(whole_number(1, "the rank of LoRA"))] = None
    lora_dropout: Annotated[float | None, BeforeValidator(real_number)] = None
    peft_lora_target_modules: Annotated[Any, BeforeValidator(json_value)] = None
    lycoris_config: Annotated[Any, BeforeValidator(json_value)] = None
    mixed_precision: Annotated[str, BeforeValidator(one_of(PRECISIONS))] = "bf16"
    base_model_precision: Annotated[str, BeforeValidator(word)] = "no_change"
    optimizer: Annotated[str | None, BeforeValidator(word)] = None
    use_ema: Annotated[bool, BeforeValidator(switch())] = False
    ramtorch: Annotated[bool, BeforeValidator(switch())] = False
    fuse_qkv_projections: Annotated[bool, BeforeValidator(switch())] = False
    dynamo_backend: Annotated[str, BeforeValidator(word)] = "no"
    pretrained_model_name_or_path: Annotated[str | None, BeforeValidator(path)] = None
    pretrained_transformer_model_name_or_path: Annotated[str | None, BeforeValidator(path)] = None
