"""The model of a workload with its adapter, and the inputs of a step.

Under ``fakes.without_memory`` that takes a second and no memory; without it, the same code makes
the model that ``bench`` trains.
"""

import inspect
import logging
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from ...families.schema import Training, matches
from ...messages.errors import WorkloadError
from ...messages.log import quiet
from ...model.tiny import load_class, make
from ...private.of_libraries import KEEP_IN_FP32
from ...private.of_torch import persistent_buffers, pytree
from .layers import fuse_projections, stream_weights
from .shapes import resolved
from .workload import Workload, training_of


def build(work: Workload) -> nn.Module:
    """The model with random weights, in training mode, its adapter in it, and frozen around it.

    Keys of its configuration that the class does not know are left out, as diffusers does. Raises
    ``WorkloadError``.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, work.dtype))  # faster than to convert it
    try:
        model_class: Any = load_class(work.model_class, work.family.since)
        known = full_config(work.model_class, {})
        config = {key: value for key, value in work.config.items() if key in known}
        model = model_class(**config)
    finally:
        torch.set_default_dtype(before)
    model.train()
    if work.fused_qkv:
        fuse_projections(model)
    if work.weights_on_cpu:
        stream_weights(model)
    if work.adapter == "full":
        return convert(model, getattr(torch, work.dtype))
    model.requires_grad_(False)
    targets = work.targets
    if work.fused_qkv:
        targets = ("to_qkv", *(t for t in targets if not t.endswith(("to_q", "to_k", "to_v"))))
    if work.adapter == "lycoris":
        add_lycoris(model, work.lycoris)
    else:
        lora = LoraConfig(
            r=work.rank,
            lora_alpha=work.rank,
            lora_dropout=work.dropout,
            target_modules=targets_of(model, targets),
        )
        inject_adapter_in_model(lora, model)
    return convert(model, getattr(torch, work.dtype))


def convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Weights in ``dtype``, but for those that diffusers always loads in float32."""
    exempt = set(getattr(model, KEEP_IN_FP32, None) or ())
    for path, parameter in model.named_parameters():
        wanted = torch.float32 if exempt & set(path.split(".")) else dtype
        if parameter.dtype is not wanted:
            owner, _, name = path.rpartition(".")
            changed = nn.Parameter(parameter.detach().to(wanted), parameter.requires_grad)
            model.get_submodule(owner)._parameters[name] = changed
    for module in model.modules():
        for name in persistent_buffers(module):
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
    return model


def add_lycoris(model: nn.Module, config: Mapping[str, Any]) -> None:
    """An adapter of LyCORIS; ``config`` is what SimpleTuner's ``lycoris_config`` file holds."""
    try:
        from lycoris import LycorisNetwork, create_lycoris
    except ImportError:
        raise WorkloadError(
            "lora_type lycoris needs the lycoris-lora package: pip install "
            "'simpletuner-segckpt[lycoris]'"
        ) from None
    options = dict(config)
    presets = {name: deepcopy(v) for name, v in vars(LycorisNetwork).items() if name.isupper()}
    try:  # a preset is for the whole process
        LycorisNetwork.apply_preset(options.pop("apply_preset", {}))
        with quiet(logging.getLogger("LyCORIS"), logging.CRITICAL):
            network = create_lycoris(model, options.pop("multiplier", 1.0), **options)
            network.apply_to()
    finally:
        for name, value in presets.items():
            setattr(LycorisNetwork, name, value)
    if not network.loras:
        raise WorkloadError("lycoris_config fits no layer of the model; look at its apply_preset")
    network.requires_grad_(True)
    for module in network.loras:  # as parts of the layers that they change, so of their blocks
        module.org_module[0].add_module("lycoris", module)


def targets_of(model: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Paths of the linear layers that ``names`` mean.

    A name is the end of a path; ``*`` stands for any one part of it.
    """
    found = []
    for path, module in model.named_modules():
        parts = path.split(".")
        if isinstance(module, nn.Linear) and any(
            matches(name, ".".join(parts[-len(name.split(".")) :])) for name in names
        ):
            found.append(path)
    if not found:
        raise WorkloadError(f"no linear layer of the model is called {' or '.join(names)}")
    return found


def inputs(work: Workload) -> dict[str, Any]:
    """Keyword arguments of the model's forward, in the dtype of the weights."""
    training = training_of(work.family)
    specs = resolved(training.inputs, words(work, training))
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, work.dtype)
    made = {name: make(spec, generator) for name, spec in specs.items()}
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, made
    )


def words(work: Workload, training: Training) -> dict[str, int]:
    """What the shapes of a family file are written in."""
    frames, height, width = training.downscale
    integers = {
        name: value
        for name, value in full_config(work.model_class, work.config).items()
        if isinstance(value, int)  # and switches, as 0 and 1
    }
    return integers | {
        "batch": work.batch,
        "frames": (work.frames - 1) // frames + 1,
        "height": work.height // height,
        "width": work.width // width,
        "text": work.text or training.text,
    }


def full_config(model_class: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the defaults of the class; None for what has no default."""
    parameters = inspect.signature(load_class(model_class).__init__).parameters
    return {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in parameters.items()
    } | dict(config)
