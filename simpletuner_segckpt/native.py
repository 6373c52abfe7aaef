"""Classes that bring their own setters: asked for what the config says, and believed in nothing.

Some trainers' model classes have ``set_gradient_checkpointing_interval`` and its siblings. Their
own switches are used then, and the report says which of the options that were asked for such a
class ignores, runs differently or breaks on, as the family's ``[native]`` facts tell.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.nn import Module

from .config_schema import CheckpointingConfig
from .family import Family
from .report import Condition, Report
from .schedule import Schedule

# Key of the config -> the field that holds it, and the setter that takes its value.
SETTERS = {
    "gradient_checkpointing_interval": ("interval", "set_gradient_checkpointing_interval"),
    "gradient_checkpointing_segment_stride": (
        "stride",
        "set_gradient_checkpointing_segment_stride",
    ),
    "gradient_checkpointing_backend": ("backend", "set_gradient_checkpointing_backend"),
    "gradient_checkpointing_offload_attention": (
        "offload_attention",
        "set_gradient_checkpointing_offload_attention",
    ),
}
OWN_KEYS = {"gradient_checkpointing_keep": "keep", "gradient_checkpointing_keep_last": "keep_last"}

# How a class carries out an interval above 1, where that is not the schedule of the config.
MEANINGS = {
    "per-block": "the class checkpoints the covered blocks one by one",
    "every-nth": "the class checkpoints every n-th block, and no segments",
    "ignored": "the class ignores it: every block is checkpointed",
    "broken": "the class breaks when checkpointing is on",
}


@dataclass(frozen=True)
class Settled:
    """What a native class was set to, and the attributes that its setters changed."""

    report: Report
    before: dict[str, dict[str, Any]]  # by module name


def is_native(model: Module) -> bool:
    """Whether the class of ``model`` brings setters of its own."""
    return any(hasattr(model, setter) for _, setter in SETTERS.values())


def settle(
    model: Module, config: CheckpointingConfig, family: Family | None, report: Report
) -> Settled:
    """Call the setters of ``model`` with what ``config`` asks for.

    ``report`` is what the schedule would be; the one returned says what the class makes of it.
    """
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    conditions = list(report.conditions)
    default = CheckpointingConfig()
    for key, (field, setter) in SETTERS.items():
        value = getattr(config, field)
        if hasattr(model, setter):
            getattr(model, setter)(value)
        elif value != getattr(default, field):
            conditions.append(Condition("family", key, "the class has no setter for it: ignored"))
    for key, field in OWN_KEYS.items():
        if getattr(config, field) != getattr(default, field):
            conditions.append(Condition("family", key, "the class knows no such key: ignored"))
    conditions += _known_differences(config, family)
    switch: Any = model
    if config.enabled and hasattr(model, "enable_gradient_checkpointing"):
        switch.enable_gradient_checkpointing()
    elif not config.enabled and hasattr(model, "disable_gradient_checkpointing"):
        switch.disable_gradient_checkpointing()
    whole = family is None or family.native is None or family.native.segments == "whole-block"
    stacks = tuple(
        replace(
            stack,
            strategy="native",
            schedule=stack.schedule if whole else Schedule(stack.blocks, ()),
            reason="" if whole else "its own schedule, see the conditions",
        )
        for stack in report.stacks
        if config.enabled
    )
    changed = {
        name: state for name, state in before.items() if state != model.get_submodule(name).__dict__
    }
    return Settled(replace(report, conditions=tuple(conditions), stacks=stacks), changed)


def _known_differences(config: CheckpointingConfig, family: Family | None) -> Iterator[Condition]:
    """What the facts say of the options that were asked for."""
    native = family.native if family else None
    if native is None:
        return
    wide = config.interval > 1 or config.stride is not None
    if wide and native.segments in MEANINGS:
        key = "gradient_checkpointing_interval"
        yield Condition("family", key, MEANINGS[native.segments])
    if wide and native.fallback:
        reason = f"where it goes block by block, the class covers {native.fallback}"
        yield Condition("family", "gradient_checkpointing_interval", reason)
    if config.backend not in native.backends:
        reason = f"the class does not carry out {config.backend}"
        yield Condition("family", "gradient_checkpointing_backend", reason)
    if config.offload_attention and not native.attention_offload:
        reason = "the class does not carry it out"
        yield Condition("family", "gradient_checkpointing_offload_attention", reason)
    for note in native.notes:
        yield Condition("family", "note", note)


def restore(model: Module, settled: Settled) -> None:
    """Undo what the setters changed."""
    for name, state in settled.before.items():
        module = model.get_submodule(name)
        module.__dict__.clear()
        module.__dict__.update(state)
