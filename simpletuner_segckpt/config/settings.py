"""From what a user hands over (a file, a mapping, a namespace) to checked settings."""

import argparse
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from ..config_schema import (
    CHECKPOINTING_KEYS,
    PREFIX,
    TRAINER_KEYS,
    CheckpointingConfig,
    TrainerKeys,
    is_unset,
    switch,
)
from ..messages.errors import ConfigError
from ..messages.findings import Finding, Severity
from . import deepspeed
from .file import ConfigFile, read_config_file

Keys = TypeVar("Keys", bound=BaseModel)


# Rests of our keys that a trainer may well have as keys of its own.
_COMMON_WORDS = ("backend", "interval")


# The key that a finding about a pair of keys belongs to.
_PAIR_KEYS = {
    "stride-below-interval": "gradient_checkpointing_segment_stride",
    "prefetch-without-offload": "gradient_checkpointing_offload_prefetch",
    "keep-with-ffn": "gradient_checkpointing_keep",
    "budget-with-others": "gradient_checkpointing_budget",
}


@dataclass(frozen=True)
class Settings:
    """The checked keys of one config. ``findings`` holds the warnings."""

    checkpointing: CheckpointingConfig
    trainer: TrainerKeys
    findings: tuple[Finding, ...] = ()
    file: ConfigFile = field(default_factory=ConfigFile)

    def finding(self, rule: str, message: str, key: str, severity: Severity = "error") -> Finding:
        """A finding at the place where ``key`` stands in the file."""
        return self.file.finding(rule, message, written(self.file, key), severity)


# What ``apply`` takes.
ConfigSource = str | Path | Mapping[str, Any] | argparse.Namespace | CheckpointingConfig | Settings


def load_settings(source: ConfigSource) -> Settings:
    """Read and check a config in any form that ``apply`` takes.

    Raises ``ConfigError`` with every finding when one of them is an error.
    """
    if isinstance(source, Settings):
        return source
    if isinstance(source, CheckpointingConfig):
        source = {PREFIX: source.enabled} | source.model_dump(by_alias=True, exclude_unset=True)
    if isinstance(source, argparse.Namespace):
        file = ConfigFile(values={k: v for k, v in vars(source).items() if v is not None})
    elif isinstance(source, Mapping):
        file = ConfigFile(values=dict(source))
    elif isinstance(source, (str, Path)):
        file = read_config_file(source)
    else:
        raise TypeError(
            f"config is a {type(source).__name__}; pass a path, a mapping, a namespace or a "
            "CheckpointingConfig"
        )
    settings, findings = check_settings(file)
    if settings is None:
        errors = [finding for finding in findings if finding.severity == "error"]
        raise ConfigError(sorted(errors, key=lambda finding: (finding.line, finding.column)))
    return settings


def check_settings(file: ConfigFile) -> tuple[Settings | None, list[Finding]]:
    """The settings in a file, or None when an error forbids them, and all findings."""
    findings = list(file.findings)
    readable = len(findings)
    values = _canonical(file, findings)
    checkpointing = _validated(CheckpointingConfig, CHECKPOINTING_KEYS, file, values, findings)
    if _is_off(values):
        # What is wrong with keys that have no effect must not stop a run.
        findings[readable:] = [replace(f, severity="warning") for f in findings[readable:]]
        checkpointing = CheckpointingConfig(enabled=False)
    trainer = _validated(TrainerKeys, TRAINER_KEYS, file, values, findings)
    if checkpointing is not None:
        _warn(checkpointing, file, values, findings)
        if trainer is not None:
            key = written(file, deepspeed.KEY)
            findings += deepspeed.findings_of(file, key, trainer, checkpointing)
    failed = any(finding.severity == "error" for finding in findings)
    if failed or checkpointing is None or trainer is None:
        return None, findings
    return Settings(checkpointing, trainer, tuple(findings), file), findings


def read_keys(model: type[Keys], file: ConfigFile) -> Keys:
    """Other keys of a trainer's config. Raises ``ConfigError`` with what is wrong with them."""
    findings: list[Finding] = []
    values: dict[str, Any] = {}
    for name in model.model_fields:
        key = written(file, name)
        if key in file.values:
            values[name] = file.values[key]
        if key != name and name in file.values:
            message = f"is also given as `{name}`; leave one of the two out"
            findings.append(file.finding("two-spellings", message, key))
    keys = _validated(model, values, file, values, findings)
    if keys is None or findings:
        raise ConfigError(findings)
    return keys


def written(file: ConfigFile, key: str) -> str:
    """``key`` as it stands in the file, with or without the leading dashes."""
    return f"--{key}" if f"--{key}" in file.values else key


def _canonical(file: ConfigFile, findings: list[Finding]) -> dict[str, Any]:
    """The known keys of a file without leading dashes; findings for those that are not right."""
    known = (*CHECKPOINTING_KEYS, *TRAINER_KEYS)
    values: dict[str, Any] = {}
    for key, value in file.values.items():
        if not isinstance(key, str):  # a mapping may have others
            continue
        plain = key.removeprefix("--")
        if plain in known:
            if plain in values:
                other = plain if key != plain else f"--{plain}"
                message = f"is also given as `{file.called(other)}`; leave one of the two out"
                findings.append(file.finding("two-spellings", message, key))
            values[plain] = value
        elif f"{PREFIX}_{plain}" in CHECKPOINTING_KEYS and plain not in _COMMON_WORDS:
            message = f"is not read; did you mean `{PREFIX}_{plain}`?"
            findings.append(file.finding("no-effect", message, key, "warning"))
        elif near := _meant(key):
            message = f"is not a key; did you mean `{near}`?"
            findings.append(file.finding("unknown-key", message, key))
        elif isinstance(value, dict):
            for inner in value:
                if isinstance(inner, str) and inner.removeprefix("--") in CHECKPOINTING_KEYS:
                    message = f"stands inside `{key}` and is not read; move it to the top level"
                    found = file.finding("no-effect", message, key, "warning")
                    findings.append(replace(found, key=f"{key}.{inner}"))
    return values


def _meant(key: str) -> str | None:
    """The key of ours that ``key`` is a misspelling of, if it looks like one."""
    similar = key.strip().lstrip("-").replace("-", "_").lower()
    begun = [key for key in CHECKPOINTING_KEYS[1:] if similar.startswith(f"{key}_")]
    begun += [key for key in CHECKPOINTING_KEYS[1:] if key.startswith(f"{similar}_")]
    if begun and similar != CHECKPOINTING_KEYS[0]:
        return begun[0]
    if similar.startswith("gradient_checkpoint"):
        cutoff = 0.0
    elif similar.startswith("grad"):
        cutoff = 0.9
    else:
        return None
    near = difflib.get_close_matches(similar, CHECKPOINTING_KEYS, n=1, cutoff=cutoff)
    return near[0] if near else None


def _validated(
    model: type[Keys],
    keys: Iterable[str],
    file: ConfigFile,
    values: dict[str, Any],
    findings: list[Finding],
) -> Keys | None:
    try:
        return model.model_validate({key: values[key] for key in keys if key in values})
    except ValidationError as error:
        for problem in error.errors():
            rule = problem["type"]
            key = str(problem["loc"][0]) if problem["loc"] else _PAIR_KEYS[rule]
            findings.append(file.finding(rule, problem["msg"], written(file, key)))
        return None


def _is_off(values: Mapping[str, Any]) -> bool:
    try:
        return switch()(values.get(PREFIX)) is False
    except PydanticCustomError:
        return False


def _warn(
    config: CheckpointingConfig,
    file: ConfigFile,
    values: dict[str, Any],
    findings: list[Finding],
) -> None:
    given = [key for key in CHECKPOINTING_KEYS if key in values and not is_unset(values[key])]

    def warn(rule: str, key: str, message: str) -> None:
        findings.append(file.finding(rule, message, written(file, key), severity="warning"))

    if not config.enabled:
        named = {finding.key for finding in findings}
        for key in given:
            if key != PREFIX and file.called(written(file, key)) not in named:
                warn("no-effect", key, "has no effect, since gradient_checkpointing is off")
        return
    stride = "gradient_checkpointing_segment_stride"
    if stride in given and "gradient_checkpointing_interval" not in given:
        covered = f"of every {config.stride} blocks only the first is recomputed"
        if config.stride == 1:
            covered = "every block is recomputed by itself, as without it"
        message = f"is {config.stride} without gradient_checkpointing_interval, so {covered}; "
        warn("stride-without-interval", stride, f"{message}write the interval as well")
    buckets = "gradient_checkpointing_offload_pin_memory_max_buckets"
    if buckets in given and not (config.offload_attention or config.inputs_on_cpu):
        warn("no-effect", buckets, "has no effect, since nothing is offloaded")
