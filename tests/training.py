"""What the tests share: tiny real models to train."""

import logging
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.nn import Module

from simpletuner_segckpt import Family, FamilyRegistry, Installation
from simpletuner_segckpt.engine.entry import CheckpointEntry
from simpletuner_segckpt.families.schema import Tiny
from simpletuner_segckpt.model.tiny import is_before, make_inputs, make_model, missing_needs
from simpletuner_segckpt.verify.step import SEED

REGISTRY = FamilyRegistry.shipped()


def family(name: str, flavour: str | None = None) -> Family:
    return REGISTRY.find(name, flavour)


def installed(family: Family, tiny: Tiny) -> bool:
    """Whether a tiny model can be made of what is installed."""
    return not missing_needs(tiny) and not is_before(family.since)


def skip_before(family: Family) -> None:
    """Skip a test of classes that came after the installed diffusers."""
    if is_before(family.since):
        pytest.skip(f"{family.title} came with diffusers {family.since}")


def tiny(name: str, flavour: str | None = None) -> Tiny:
    return family(name, flavour).tiny[0]


def model_and_inputs(name: str, flavour: str | None = None, **config: Any):
    spec = tiny(name, flavour)
    return make_model(spec, **config).train(), make_inputs(spec)


def entry_of(installation: Installation) -> CheckpointEntry:
    """What is on the model: for tests of the engine."""
    return installation._owner


# The attention projections of diffusers' models.
ATTENTION = r".*\.(to_q|to_k|to_v|to_out\.0|to_qkv_mlp_proj)"


def add_lora(model: Module, names: str = ATTENTION) -> None:
    """A LoRA with dropout on every attention projection; its B matrices are not zero."""
    config = LoraConfig(r=4, lora_alpha=4, lora_dropout=0.1, target_modules=names)
    inject_adapter_in_model(config, model)
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=generator)


def set_dropout(model: Module, p: float = 0.1) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p


def keys(interval: int = 1, stride: int | None = None, keep_last: int = 0) -> dict[str, Any]:
    """A config with these values; those that are unset are null, as trainers write them."""
    return {
        "gradient_checkpointing_interval": interval,
        "gradient_checkpointing_segment_stride": stride,
        "gradient_checkpointing_keep_last": keep_last,
    }


def warned(records: Iterable[logging.LogRecord]) -> list[str]:
    """What the package warned of, without the codes."""
    ours = (record for record in records if record.name == "simpletuner_segckpt")
    texts = [record.getMessage() for record in ours if record.levelno == logging.WARNING]
    return [re.sub(r"^SEG\d+ ", "", text) for text in texts]
