"""Describe a model that no family file describes.

The same record that proves segments (see ``engine.recording``) says which lists of blocks a
model's forward runs through, what passes between the blocks, and why a list cannot be segmented.
From that comes the family file to start from.
"""

from collections.abc import Mapping
from typing import Any

import tomlkit
from torch.nn import Module

from ..engine.links import Link
from ..engine.proof import Proof
from ..families.registry import FamilyRegistry
from ..families.schema import Family
from ..install.apply import apply
from ..model.stacks import blocks_of
from .step import loss_of


def probe(model: Module, inputs: Mapping[str, Any]) -> Family:
    """The family of ``model``, from one training step on ``inputs``.

    ``inputs`` are keyword arguments of its forward. The model is left as it was. Raises
    ``UnsupportedModel`` when it has no list of blocks.
    """
    everything_together = {"gradient_checkpointing_interval": 10_000}
    installation = apply(model, everything_together, registry=FamilyRegistry())
    base = installation.model
    try:
        loss_of(model(**inputs)).backward()
        model.zero_grad(set_to_none=True)
        proofs: dict[str, Proof] = installation.proofs
        left_out = [
            {"path": s.path, "reason": "its blocks are not run through the checkpoint function"}
            for s in installation.report.stacks
            if s.path not in proofs
        ]
        effect = installation.effect
        in_order = [stack.path for stack in effect.stacks] if effect else []
        stacks = [_stack(base, path, proofs[path]) for path in in_order if path in proofs]
    finally:
        installation.remove()
    cls = type(base)
    return Family.model_validate(
        {
            "family": "my_family",
            "title": cls.__name__,
            "classes": (f"{cls.__module__}.{cls.__qualname__}",),
            "stacks": stacks,
            "left_out": left_out,
        }
    )


def _stack(model: Module, path: str, proof: Proof) -> dict[str, Any]:
    blocks = blocks_of(model, path)
    links = [boundary for boundary in proof.boundaries if isinstance(boundary, Link)]
    reasons = [boundary for boundary in proof.boundaries if isinstance(boundary, str)]
    found: dict[str, Any] = {"path": path, "block": type(blocks[0]).__name__}
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else config
    counts = [
        key
        for key, value in (values.items() if isinstance(values, Mapping) else ())
        if isinstance(value, int) and not isinstance(value, bool) and value == len(blocks)
    ]
    if counts:  # the most telling of several keys with that value
        words = set(path.split("_"))
        found["count"] = max(
            counts, key=lambda key: (len(words & set(key.split("_"))), "layer" in key, -len(key))
        )
    if links:
        found["carried"] = links[0].by_name
    if reasons and links:
        found["cut"] = f"where {reasons[0]}"
    elif reasons:
        found["per_block"] = reasons[0]
    return found


def render(family: Family) -> str:
    """The family as the TOML file to start from."""
    document = tomlkit.document()
    document.add(tomlkit.comment(f"{family.title}: say here what is special about its blocks."))
    document.add("family", tomlkit.string(family.family))
    document["family"].comment("the trainer's model_family")
    document.add("title", tomlkit.string(family.title))
    document.add("classes", tomlkit.item(list(family.classes)))
    for name, entries in (("stacks", family.stacks), ("left_out", family.left_out)):
        tables = tomlkit.aot()
        for entry in entries:
            table = tomlkit.table()
            for key, value in entry.model_dump(exclude_defaults=True).items():
                item = tomlkit.inline_table() if isinstance(value, dict) else value
                if isinstance(value, dict):
                    item.update(value)
                table.add(key, item)
            tables.append(table)
        if entries:
            document.add(name, tables)
    return tomlkit.dumps(document)
