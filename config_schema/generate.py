"""The JSON Schema of the keys, for editors: ``python -m simpletuner_segckpt.config_schema``.

A config refers to it with ``"$schema"``. It describes the plain spelling of every key and
accepts the one with leading dashes; keys of the trainer are left alone.
"""

import json
from pathlib import Path
from typing import Any

from .keys import CHECKPOINTING_KEYS, PREFIX, CheckpointingConfig

SCHEMA_FILE = Path(__file__).with_name("segckpt.schema.json")


def json_schema() -> dict[str, Any]:
    """The schema as a JSON document (draft 2020-12)."""
    generated = CheckpointingConfig.model_json_schema(by_alias=True)
    properties = {name: _property(entry) for name, entry in generated["properties"].items()}
    known = "|".join(name.removeprefix(PREFIX) for name in CHECKPOINTING_KEYS)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gradient_checkpointing keys of a trainer's config",
        "description": "Segmented activation checkpointing, as read by simpletuner-segckpt.",
        "type": "object",
        "properties": {"$schema": {"type": "string"}, **properties},
        "patternProperties": {
            **{f"^--{name}$": {"$ref": f"#/properties/{name}"} for name in properties},
            # A key that begins like ours and is none of them is a slip of the pen.
            f"^(--)?{PREFIX}(?!({known})$)": False,
        },
    }


def _property(entry: dict[str, Any]) -> dict[str, Any]:
    order = ("title", "description", "default", "anyOf", "examples")
    return {key: entry[key] for key in order if key in entry}


def render() -> str:
    """The text of the schema file."""
    return json.dumps(json_schema(), indent=2) + "\n"
