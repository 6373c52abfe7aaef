"""Model classes with their own ``set_gradient_checkpointing_*`` methods.

Some trainers' model classes have ``set_gradient_checkpointing_interval`` and its siblings. With
``native=True`` they carry out the keys, and the report says what such a class makes of them, as the
family's ``[native]`` facts tell (``schedules.own_setters``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.nn import Module

from ..config.settings import Settings
from ..config_schema import OWN_KEYS, CheckpointingConfig
from ..families.schema import Family
from ..messages.findings import Finding
from ..schedules.own_setters import differences, native_report
from ..schedules.report import Report

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


# What a trainer sets for its whole process, and not on a model.
PROCESS_KEYS = {
    "gradient_checkpointing_offload_pin_memory_max_buckets": "pin_memory_max_buckets",
    "gradient_checkpointing_offload_prefetch": "prefetch",
}


@dataclass(frozen=True, eq=False)
class SetterState:
    """What a native class was set to, and what its setters changed.

    By module name: ``before``, the attributes that changed with the values they had, and
    ``added``, those that are new.
    """

    report: Report
    before: dict[str, dict[str, Any]]
    added: dict[str, list[str]]


def has_own_setters(model: Module) -> bool:
    """Whether the class of ``model`` brings setters of its own."""
    return any(hasattr(model, setter) for _, setter in SETTERS.values())


def not_taken(settings: Settings, model: Module) -> Iterator[Finding]:
    """An error for each key that the class of ``model`` would ignore."""
    fields = {key: field for key, (field, setter) in SETTERS.items() if not hasattr(model, setter)}
    default = CheckpointingConfig()
    for key, field in (fields | OWN_KEYS).items():
        if getattr(settings.checkpointing, field) != getattr(default, field):
            message = f"is given, but {type(model).__name__} has no setter for it; leave it out"
            yield settings.finding("unsupported-option", message, key)


def without_unknown_keys(settings: Settings) -> Settings:
    """``settings`` without the keys of which only the class knows what they do."""
    default = CheckpointingConfig()
    unknown = ("keep_last", "keep", "budget", "backend", "offload_attention", "prefetch")
    update = {field: getattr(default, field) for field in unknown}
    return replace(settings, checkpointing=settings.checkpointing.model_copy(update=update))


def call_setters(
    model: Module, config: CheckpointingConfig, family: Family | None, report: Report
) -> SetterState:
    """Call the setters of ``model`` with what ``config`` asks for.

    ``report`` is what the schedule would be; the one returned says what the class makes of it. A
    setter that raises leaves the model as it was.
    """
    snapshot = {name: dict(module.__dict__) for name, module in model.named_modules()}
    try:
        for field, setter in SETTERS.values():
            value = getattr(config, field)
            if hasattr(model, setter):
                getattr(model, setter)(value)
        switch: Any = model
        if config.enabled and hasattr(model, "enable_gradient_checkpointing"):
            switch.enable_gradient_checkpointing()
        elif not config.enabled and hasattr(model, "disable_gradient_checkpointing"):
            switch.disable_gradient_checkpointing()
    except BaseException:
        undo_setters(model, _changes(model, snapshot, report))
        raise
    default = CheckpointingConfig()
    remarks = [
        f"{key}: the class has no setter for it; the trainer itself reads it"
        for key, field in PROCESS_KEYS.items()
        if getattr(config, field) != getattr(default, field)
    ]
    if family and family.native:
        remarks += differences(config, family.native)
    told = replace(native_report(config, family, report), remarks=tuple(remarks))
    return _changes(model, snapshot, told)


def _changes(model: Module, snapshot: dict[str, dict[str, Any]], report: Report) -> SetterState:
    before: dict[str, dict[str, Any]] = {}
    added: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        old = snapshot.get(name, {})
        for key, value in module.__dict__.items():
            if key not in old:
                added.setdefault(name, []).append(key)
            elif old[key] is not value:
                before.setdefault(name, {})[key] = old[key]
    return SetterState(report, before, added)


def undo_setters(model: Module, settled: SetterState) -> None:
    """Undo what the setters changed, and nothing else; modules that are gone stay gone."""
    modules = dict(model.named_modules())
    for name in settled.before.keys() & modules.keys():
        modules[name].__dict__.update(settled.before[name])
    for name in settled.added.keys() & modules.keys():
        for key in settled.added[name]:
            modules[name].__dict__.pop(key, None)
