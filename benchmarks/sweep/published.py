"""The published sweep of SimpleTuner's examples, and what its runs were as far as that is known."""

import csv
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict

# What a published mode is in our words, where it has another name.
SAME_AS = {
    "seg2-stride4-offload": "seg2-stride4+offload",
    "activation-offload": "torch-ffn+offload",
}


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Example(_Record):
    """One published run: the trainer's config as far as it is known, and what was assumed.

    modes: the keys of a published mode where they are not those of its name.
    """

    title: str
    config: Mapping[str, Any]
    assumed: tuple[str, ...] = ()
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    modes: Mapping[str, Mapping[str, Any]] = {}


class Reason(_Record):
    """Why rows are off whose "example precision variant mode" contains all of ``words``.

    compiled: whether that is since their blocks were compiled.
    """

    words: tuple[str, ...]
    reason: str
    compiled: bool = False


class Published(_Record):
    """``published.toml``."""

    source: str
    left_out: Mapping[str, str]
    reasons: tuple[Reason, ...]
    examples: Mapping[str, Example]

    def reason(self, row: "Row") -> str:
        """Why a row may be off, or nothing."""
        entry = self._entry(row)
        return entry.reason if entry else ""

    def compiled(self, row: "Row") -> bool:
        """Whether the blocks of a row were compiled."""
        entry = self._entry(row)
        return entry is not None and entry.compiled

    def _entry(self, row: "Row") -> Reason | None:
        text = f"{row.example} {row.precision} {row.variant} {row.mode}"
        fitting = (entry for entry in self.reasons if all(word in text for word in entry.words))
        return next(fitting, None)


class Row(_Record):
    """One cell of the sweep. seconds: of a step. gib: its peak. None: not measured."""

    example: str
    precision: str
    variant: str
    mode: str
    gpu: str
    status: str
    seconds: float | None
    gib: float | None


@cache
def published() -> Published:
    """The examples, and the reasons for what is off."""
    return Published.model_validate(tomllib.loads(_text("published.toml")))


@cache
def rows() -> tuple[Row, ...]:
    """All 888 cells."""
    return tuple(
        Row.model_validate({key: value or None for key, value in row.items()} | _texts(row))
        for row in csv.DictReader(_text("published_sweep.csv").splitlines())
    )


def _texts(row: Mapping[str, str]) -> dict[str, str]:
    return {key: row[key] for key in ("example", "precision", "variant", "mode", "gpu", "status")}


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
