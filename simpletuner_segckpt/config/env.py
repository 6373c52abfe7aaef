"""SimpleTuner's ``config.env``: lines ``NAME=value``, read the way that the trainer reads them.

Its rules are its own and narrower than a shell's (as of 4.10.1): ``export`` and one pair of quotes
around a value are dropped, ``+=`` appends words, a ``#`` is a comment only at the start of a line,
nothing is expanded. Keys without a variable of their own stand in ``TRAINER_EXTRA_ARGS``, as
command-line options.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..config_schema import CHECKPOINTING_KEYS, OWN_KEYS, PREFIX

EXTRA = "TRAINER_EXTRA_ARGS"


# The keys that SimpleTuner reads from variables, of those that this package reads.
VARIABLES = {
    key.upper(): key
    for key in (
        "gradient_checkpointing_segment_stride",
        "gradient_checkpointing_offload_attention",
        "gradient_checkpointing_offload_prefetch",
        "gradient_checkpointing_offload_pin_memory_max_buckets",
        "model_family",
        "model_type",
        "train_batch_size",
        "gradient_accumulation_steps",
        "resolution",
        "resolution_type",
        "lora_type",
        "lycoris_config",
        "mixed_precision",
        "base_model_precision",
        "optimizer",
        "use_ema",
    )
} | {
    "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "MODEL_NAME": "pretrained_model_name_or_path",
    "DATALOADER_CONFIG": "data_backend_config",
    "TRAINING_DYNAMO_BACKEND": "dynamo_backend",
}


_VARIABLE_OF = {key: name for name, key in VARIABLES.items()}


# Variables by which the trainer chooses another kind of file, in the order in which they count.
CHOOSERS = ("SIMPLETUNER_CONFIG_BACKEND", "CONFIG_BACKEND", "CONFIG_TYPE")


_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*(\+?=)(.*)")


class Assignment(NamedTuple):
    """One line; ``line`` and ``column`` (of the name) count from 1."""

    name: str
    value: str
    appends: bool
    line: int
    column: int


class Setting(NamedTuple):
    """A key that a line sets, and what it is called there."""

    key: str
    value: Any
    name: str
    line: int
    column: int


def is_env(name: str, text: str) -> bool:
    """Whether a file is an env file; ``text`` decides for standard input."""
    if name != "<stdin>":
        return name.lower().endswith(".env")
    first = next((line for line in text.splitlines() if not _is_comment(line)), "")
    return re.match(r"(export\s+\w+|[A-Z][A-Z0-9_]*)\+?=", first) is not None


def _is_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def assignments(text: str) -> Iterator[Assignment | tuple[int, str]]:
    """Every line that is no comment; one that assigns nothing as its number and what it holds."""
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        if _is_comment(line):
            continue
        found = _ASSIGNMENT.fullmatch(line)
        if found is None:
            yield number, line.strip()
            continue
        name, sign, value = found.groups()
        yield Assignment(name, _unquoted(value.strip()), sign == "+=", number, found.start(1) + 1)


def _unquoted(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if quoted else value


def settings_of(assignment: Assignment) -> Iterator[Setting]:
    """The keys that a line sets, of those that this package may want to read."""
    name, value, _, line, column = assignment
    if name == EXTRA:
        for option, given in options(value.split()):
            yield Setting(option, _value(option, given), option, line, column)
    elif name in VARIABLES or name.upper().startswith(PREFIX.upper()):
        key = VARIABLES.get(name, name.lower())
        yield Setting(key, _value(key, value), name, line, column)


def _value(key: str, value: Any) -> Any:
    """``value``, or the words of a list: ``attention,ffn``."""
    several = key.removeprefix("--") == "gradient_checkpointing_keep" and isinstance(value, str)
    return value.replace(",", " ").split() if several else value


def options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Command-line options with their values; one without a value is true."""
    rest = list(words)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if not option.startswith("--"):
            continue  # no option, or a reference such as ${TRAINER_EXTRA_ARGS}
        if equals:
            yield option, _unquoted(value)
        elif rest and not rest[0].startswith("--"):
            yield option, _unquoted(rest.pop(0))
        else:
            yield option, True


def remark(setting: Setting) -> str:
    """What SimpleTuner makes of a setting, where that is not what it says; else nothing."""
    key, value, name = setting.key, setting.value, setting.name
    if name.startswith("--"):
        plain = key.removeprefix("--")
        if plain in OWN_KEYS:
            written = f"{plain.upper()}={_text(value)}"
            return f"ends SimpleTuner unless `segckpt launch` starts it; write {written}"
    elif name in VARIABLES:
        if key == PREFIX and value.strip().lower() == "false":
            return (
                "is false, which SimpleTuner leaves out of an env file, so that its default, on, "
                "stays; write off"
            )
    elif key in CHECKPOINTING_KEYS and key not in OWN_KEYS:
        return f"is not read by SimpleTuner; write {_line_of(key, value)}"
    return ""


def _line_of(key: str, value: Any) -> str:
    if key in OWN_KEYS or key in _VARIABLE_OF:
        return f"{_VARIABLE_OF.get(key, key.upper())}={_text(value)}"
    return f'{EXTRA}+=" --{key}={_text(value)}"'


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "off"
    return ",".join(value) if isinstance(value, (list, tuple)) else str(value)


def lines_for(keys: Mapping[str, Any]) -> list[str]:
    """The lines that set ``keys`` in an env file."""
    return [_line_of(key.removeprefix("--"), value) for key, value in keys.items()]


def chooser(found: Iterable[Assignment]) -> Assignment | None:
    """The line by which the file says what kind of file SimpleTuner reads its keys from."""
    by_name = {assignment.name: assignment for assignment in found}
    return next((by_name[name] for name in CHOOSERS if name in by_name), None)
