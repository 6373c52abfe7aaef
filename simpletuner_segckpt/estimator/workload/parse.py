"""From a trainer's config to the workload: what it says, and what has to be assumed."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config.settings import Settings, read_keys
from ...config_schema import TrainingKeys
from ...families.registry import FamilyRegistry
from ...families.schema import Family
from ...messages.errors import WorkloadError, reason_of
from .optimizers import optimizers
from .workload import Adapter, Workload, training_of

# SimpleTuner's default: https://github.com/bghira/SimpleTuner, the LoRA fields of its config.
LORA_RANK = 16


LORA_DROPOUT = 0.1


# Bytes for each weight of a linear layer, by what a `base_model_precision` begins with.
QUANTIZED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5, "nf4": 0.5, "fp4": 0.5, "int2": 0.25}


# What `lycoris_config` files of trainers commonly hold.
LOKR: Mapping[str, Any] = {
    "algo": "lokr",
    "multiplier": 1.0,
    "linear_dim": 10_000,
    "linear_alpha": 1,
    "full_matrix": True,
    "bypass_mode": True,
    "factor": 16,
    "apply_preset": {
        "target_module": ["Attention", "FeedForward"],
        "module_algo_map": {"Attention": {"factor": 16}, "FeedForward": {"factor": 8}},
    },
}


@dataclass(frozen=True)
class Overrides:
    """What the command line says instead of the config. None: what the config says."""

    family: str | None = None
    size: str | None = None
    model: str | None = None
    batch: int | None = None
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    text: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class ParsedWorkload:
    """A workload, what was assumed for it, and what of the config it does not model."""

    workload: Workload
    assumed: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def parse_workload(
    settings: Settings, registry: FamilyRegistry, overrides: Overrides = Overrides()
) -> ParsedWorkload:
    """The workload of a config.

    Raises ``ConfigError`` for keys that are wrong, ``UnknownFamily``, and ``WorkloadError`` when
    the model's size or the inputs of a step are not known.
    """
    keys = read_keys(TrainingKeys, settings.file)
    folder = Path(settings.file.name).parent
    assumed: list[str] = []
    ignored: list[str] = []
    family, model_class, size, config = _model(settings, keys, registry, overrides, folder, assumed)
    training = training_of(family)

    batch = overrides.batch or keys.train_batch_size
    if batch is None:
        batch = 1
        assumed.append("1 sample in a batch (train_batch_size is not set)")
    width, height, frames = _sample(keys, family, overrides, folder, assumed)
    adapter, lycoris = _adapter(keys, folder, assumed)
    rank = overrides.rank or keys.lora_rank
    dropout = keys.lora_dropout
    if adapter == "lora":
        if rank is None:
            rank = LORA_RANK
            assumed.append(f"LoRA of rank {rank} (lora_rank is not set)")
        if dropout is None:
            dropout = LORA_DROPOUT
            assumed.append(f"LoRA dropout {dropout:g}, SimpleTuner's default (lora_dropout)")
    targets = _targets(keys, folder, assumed) or training.targets
    dtype = "float32" if keys.mixed_precision == "no" else "bfloat16"
    optimizer = optimizers().get(keys.optimizer or "adamw_bf16")
    if keys.optimizer is None:
        assumed.append("optimizer adamw_bf16 (optimizer is not set)")
    elif optimizer is None:
        assumed.append(f"optimizer {keys.optimizer} is not known: the states of adamw_bf16")
    optimizer = optimizer or optimizers()["adamw_bf16"]
    base_bytes = _base_bytes(keys, overrides, folder, ignored)
    if settings.trainer.musubi_blocks_to_swap:
        ignored.append("musubi_blocks_to_swap: the weights of swapped blocks are counted")
    if settings.trainer.controlnet:
        ignored.append("controlnet: the model is estimated, not the ControlNet that is trained")
    if settings.trainer.fsdp_enable:
        ignored.append("fsdp_enable: everything is counted as on one card, unsharded")
    if keys.mixed_precision in ("fp16", "fp8"):
        ignored.append(f"mixed_precision {keys.mixed_precision} is taken as bf16")
    if keys.ramtorch:
        ignored.append("ramtorch: the time of its transfers, and whether they can be hidden")
    if keys.dynamo_backend not in ("no", "none", "disabled", "eager"):
        ignored.append(
            f"dynamo_backend {keys.dynamo_backend}: compiled blocks save other tensors, often fewer"
        )
    bytes_each = 4 if dtype == "float32" else 2
    if training.text and not overrides.text:
        assumed.append(f"{training.text} text tokens (--text)")
    workload = Workload(
        family,
        model_class,
        config,
        size=size,
        batch=batch,
        width=width,
        height=height,
        frames=frames,
        text=overrides.text or training.text,
        adapter=adapter,
        rank=rank or LORA_RANK,
        dropout=dropout or 0.0,
        targets=targets,
        lycoris=lycoris,
        dtype=dtype,
        autocast=dtype == "bfloat16",
        base_bytes=base_bytes,
        optimizer_bytes=optimizer.states * bytes_each + optimizer.bytes,
        stepping=optimizer.step,
        weights_on_cpu=keys.ramtorch,
        fused_qkv=keys.fuse_qkv_projections,
        accumulates=keys.gradient_accumulation_steps > 1,
        ema=keys.use_ema,
    )
    return ParsedWorkload(workload, assumed, ignored)


def _model(
    settings: Settings,
    keys: TrainingKeys,
    registry: FamilyRegistry,
    overrides: Overrides,
    folder: Path,
    assumed: list[str],
) -> tuple[Family, str, str, dict[str, Any]]:
    """The family, the class, the name of the size and the configuration of the model."""
    from ...messages.errors import UsageError
    from ...schedules.checked_file import read_model_config

    name = overrides.family or settings.trainer.model_family
    flavour = overrides.size or settings.trainer.model_flavour
    given = overrides.model or _local(keys, folder)
    if given:
        try:
            config = read_model_config(given)
        except UsageError as error:
            raise WorkloadError(str(error).removeprefix("--model: ")) from None
        class_name = str(config.get("_class_name"))
        family = registry.for_class_name(class_name, name)
        if family is None:
            raise WorkloadError(f"{given}: no family describes the class {class_name}")
        path = next(c for c in family.classes if c.rpartition(".")[2] == class_name)
        return family, path, "", {k: v for k, v in config.items() if not k.startswith("_")}
    if name is None:
        raise WorkloadError("the config has no model_family; write it there or pass --family")
    family = registry.find(name, flavour)
    size = family.size(flavour)
    if overrides.size and overrides.size not in family.sizes:
        sizes = ", ".join(family.sizes) or "none"
        raise WorkloadError(f"--size {overrides.size}: {family.family} has the sizes {sizes}")
    if size is None or not family.classes:
        raise WorkloadError(
            f"no size of {family.family} is known; pass --model DIR with the model's config.json"
        )
    if flavour and flavour not in (f.lower() for f in (*family.flavours, *family.sizes)):
        assumed.append(f"the size {size} (model_flavour {flavour} is not known)")
    elif not flavour and len(family.sizes) > 1:
        assumed.append(f"the size {size} (model_flavour is not set)")
    return family, family.classes[0], size, family.config_of_size(size)


def _local(keys: TrainingKeys, folder: Path) -> str | None:
    """The folder of the model, when the config names one that is there."""
    for given in (
        keys.pretrained_transformer_model_name_or_path,
        keys.pretrained_model_name_or_path,
    ):
        for path in (Path(given), folder / given) if given else ():
            if os.path.isdir(path):  # never raises, whatever the name
                return str(path)
    return None


def _sample(
    keys: TrainingKeys, family: Family, overrides: Overrides, folder: Path, assumed: list[str]
) -> tuple[int, int, int]:
    """Width and height in pixels, and frames, of the largest sample."""
    training = training_of(family)
    width, height = overrides.width, overrides.height
    frames = overrides.frames or keys.num_frames
    found = [size for entry in data_sets(keys, folder, assumed) if (size := _size(entry))]
    if found and width is None:
        side, frames_there = max(found)
        assumed.append(f"{side}x{side} pixels, the largest in data_backend_config")
        width = height = side
        frames = frames or frames_there
    if width is None and keys.resolution:
        width = height = side_of(keys.resolution, keys.resolution_type)
    if width is None or height is None:
        width, height = training.resolution
        assumed.append(f"{width}x{height} pixels (resolution is not set)")
    if training.frames == 1:
        return width, height, 1
    if frames is None:
        frames = training.frames
        assumed.append(f"{frames} frames (num_frames is not set)")
    latents = (frames - 1) // training.downscale[0]
    if latents * training.downscale[0] + 1 != frames:
        said = latents * training.downscale[0] + 1
        assumed.append(f"{said} frames, since its VAE takes no {frames}")
        frames = said
    return width, height, frames


def data_sets(keys: TrainingKeys, folder: Path, assumed: list[str]) -> Sequence[Mapping[str, Any]]:
    """The data sets that SimpleTuner's ``data_backend_config`` trains on."""
    entries = _json_at("data_backend_config", keys.data_backend_config, folder, assumed)
    if not isinstance(entries, list):
        return []
    return [
        entry
        for entry in entries
        if isinstance(entry, dict)
        and "resolution" in entry
        and not entry.get("disabled")
        and entry.get("dataset_type", "image") in ("image", "video")
    ]


def _size(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    video = entry.get("video")
    frames = video.get("num_frames", 1) if isinstance(video, dict) else 1
    try:
        return side_of(float(entry["resolution"]), entry.get("resolution_type", "pixel")), int(
            frames
        )
    except (TypeError, ValueError, OverflowError):
        return None


def side_of(resolution: float, kind: str) -> int:
    """The edge of a square sample in pixels. ``area`` counts in megapixels."""
    side = math.sqrt(resolution * 1024 * 1024) if kind == "area" else resolution
    return edge_of(side)


def edge_of(pixels: float) -> int:
    """An edge of a sample in pixels, which is a multiple of 64."""
    return max(64, round(pixels / 64) * 64)


def _adapter(
    keys: TrainingKeys, folder: Path, assumed: list[str]
) -> tuple[Adapter, Mapping[str, Any]]:
    if keys.model_type == "full":
        return "full", {}
    if keys.lora_type != "lycoris":
        return "lora", {}
    config = _json_at("lycoris_config", keys.lycoris_config, folder, assumed)
    if isinstance(config, dict):
        return "lycoris", config
    assumed.append("LoKr by a factor of 16, feed-forwards 8 (lycoris_config holds no object)")
    return "lycoris", LOKR


def _targets(keys: TrainingKeys, folder: Path, assumed: list[str]) -> tuple[str, ...]:
    name = "peft_lora_target_modules"
    given = _json_at(name, keys.peft_lora_target_modules, folder, assumed)
    if given is not None and not isinstance(given, list):
        assumed.append(f"the family's LoRA targets ({name} holds no list)")
    return tuple(map(str, given)) if isinstance(given, list) else ()


def _json_at(key: str, value: Any, folder: Path, assumed: list[str]) -> Any:
    """``value``, or what the JSON file holds that it is the path of.

    None, which is said, when that cannot be read.
    """
    if not isinstance(value, str):
        return value
    reason = ""
    for path in (folder / value, Path(value)):
        try:
            data = path.read_bytes()
        except (OSError, ValueError) as error:
            reason = reason or reason_of(error)
            continue
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            reason = "it is not JSON"
    assumed.append(f"nothing of {key}, whose file {value} cannot be read: {reason}")
    return None


def _base_bytes(
    keys: TrainingKeys, overrides: Overrides, folder: Path, ignored: list[str]
) -> float:
    """Bytes for each weight of a frozen linear layer."""
    precision = keys.base_model_precision
    if precision != "no_change":
        for start, size in QUANTIZED.items():
            if precision.startswith(start):
                ignored.append(f"base_model_precision {precision}: {_of_quantized(precision)}")
                return size
        ignored.append(f"base_model_precision {precision} is not known: as if it were no_change")
        return 4.0
    given = overrides.model or _local(keys, folder)
    return stored_bytes(Path(given)) if given else 4.0


def _of_quantized(precision: str) -> str:
    """What is left out, and how far published measurements were above the prediction."""
    if precision == "fp8-torchao":
        return "it quantizes activations as well; up to three times the prediction was measured"
    return "its scales and workspaces; up to a third more than the prediction was measured"


def stored_bytes(folder: Path) -> float:
    """Bytes of the most common dtype of matrices in the safetensors files of a model.

    4 where there are none: what is in them then makes no difference to the estimate. Raises
    ``WorkloadError`` for a file that is broken.
    """
    from safetensors import safe_open

    places = (folder, folder / "transformer", folder / "unet")
    paths = [path for place in places for path in sorted(place.glob("*.safetensors"))]
    sizes = {"F8_E4M3": 1.0, "F8_E5M2": 1.0, "I8": 1.0, "U8": 1.0, "BF16": 2.0, "F16": 2.0}
    found: dict[float, int] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - it is no dict
                    view = tensors.get_slice(key)
                    shape = view.get_shape()
                    if len(shape) == 2:
                        size = sizes.get(view.get_dtype(), 4.0)
                        found[size] = found.get(size, 0) + math.prod(shape)
        except Exception as error:  # safetensors has an error of its own
            raise WorkloadError(f"{path} is not a safetensors file: {error}") from None
    return max(found, key=lambda size: found[size], default=4.0)


def describe(read: ParsedWorkload) -> str:
    """The workload in a line: ``Wan 2.1 / 2.2, 832x480 pixels, 81 frames, batch 1, LoRA ...``."""
    work = read.workload
    sample = f"{work.width}x{work.height} pixels"
    if work.frames > 1:
        sample += f", {work.frames} frames"
    trained = {
        "lora": f"LoRA of rank {work.rank}, dropout {work.dropout:g}",
        "lycoris": f"LyCORIS {work.lycoris.get('algo', '')}".strip(),
        "full": "all weights trained",
    }[work.adapter]
    name = f"{work.family.title} {work.size}".strip()
    return f"{name}: {sample}, batch {work.batch}, {trained}, {work.dtype}"
