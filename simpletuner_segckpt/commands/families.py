"""``segckpt families``: which model families are supported, and how. No torch is imported."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from ..families.registry import FamilyRegistry
from ..families.schema import Family, Stack
from ..messages.errors import FamilyError, UnknownFamily
from ..schedules.own_setters import COVERAGES
from .output import command, refuse

# Fields of a stack that name parts of its blocks, and what they are called.
PARTS = {
    "feed_forward": "feed-forward",
    "down_projection": "down-projection of a feed-forward that is no module of its own",
    "attention": "attention",
}


COLUMNS = ("family", "model_family", "class", "stacks", "feed-forward", "attention", "proven")


def row(family: Family) -> tuple[str, ...]:
    """The cells of one family in the support table."""
    classes = sorted({path.rpartition(".")[2] for path in family.classes})
    return (
        family.title,
        family.family,
        ", ".join(classes),
        "; ".join(
            [*map(_in_short, family.stacks), *(["units one by one"] if family.units else [])]
        ),
        _of_stacks(family.stacks, "feed_forward"),
        _of_stacks(family.stacks, "attention"),
        _proof(family),
    )


def _in_short(stack: Stack) -> str:
    if stack.per_block:
        return f"{stack.path}: per-block"
    return f"{stack.path}: segments" + (", cut" if stack.cut else "")


def _of_stacks(stacks: Sequence[Stack], field: str) -> str:
    """Whether the blocks of all, some or none of the stacks have such a submodule."""
    having = [stack for stack in stacks if getattr(stack, field)]
    if not having:
        return "no"
    return "yes" if len(having) == len(stacks) else "some stacks"


def _proof(family: Family) -> str:
    if not family.tiny:
        return "from facts: no class in diffusers"
    needs = [need for tiny in family.tiny for need in tiny.needs]
    return f"needs {', '.join(needs)}" if needs else "yes"


def page(family: Family) -> list[str]:
    """All that is known of one family, in lines of Markdown."""
    lines = [f"## {family.title}", "", f"- `model_family`: `{family.family}`"]
    if family.flavours:
        lines.append(f"- flavours: {', '.join(family.flavours)}")
    lines += [f"- class: `{path}`" for path in family.classes]
    if family.keyword_loop:
        lines.append(f"- the blocks' own calls are intercepted: {family.keyword_loop}")
    for stack in family.stacks:
        lines += ["", f"### `{stack.path}`, blocks of {stack.block}", ""]
        if stack.per_block:
            lines.append(f"- one by one: {stack.per_block}")
        elif stack.cut:
            lines.append(f"- segments are cut {stack.cut}")
        else:
            lines.append("- segments of any width")
        carried = ", ".join(f"`{name}` from {source}" for name, source in stack.carried.items())
        lines.append(f"- carried from block to block: {carried or 'nothing'}")
        for field, label in PARTS.items():
            parts = ", ".join(f"`{part}`" for part in getattr(stack, field))
            if parts or field != "down_projection":
                lines.append(f"- {label}: {parts or 'not separable'}")
    if family.units:
        patterns = ", ".join(f"`{pattern}`" for pattern in family.units)
        lines += ["", f"Units, recomputed one by one in execution order: {patterns}"]
    for heading, entries in (
        ("Block by block while one of these arguments is given", _conditions(family)),
        ("Left out", [f"`{entry.path}`: {entry.reason}" for entry in family.left_out]),
        ("Classes of other packages", _implementations(family)),
        ("What SimpleTuner's own class does with `--native`", _native(family)),
    ):
        if entries:
            lines += ["", f"{heading}:", "", *(f"- {entry}" for entry in entries)]
    return lines


def _conditions(family: Family) -> list[str]:
    return [
        f"`{c.argument}` (in {', '.join(c.stacks) or 'all stacks'}): {c.reason}"
        for c in family.conditions
    ]


def _implementations(family: Family) -> list[str]:
    found = []
    for own in family.implementations:
        found += [f"{own.trainer}: `{path}`" for path in own.classes]
        found += [f"its loop runs `{s.path}` by {s.called_by}()" for s in own.stacks if s.called_by]
    return found


def _native(family: Family) -> list[str]:
    native = family.native
    if native is None:
        return []
    lines = [f"an interval above 1: {SEGMENTS[native.segments]}"]
    if native.fallback:
        lines.append(f"where it goes block by block, it covers {COVERAGES[native.fallback]}")
    if native.fault:
        lines.append(f"**{native.fault}**")
    if native.counted_on:
        lines.append("the blocks of one stack are counted on from those of the one before")
    lines += [f"`{p}` block by block: {COVERAGES[c]}" for p, c in native.block_by_block.items()]
    lines.append(f"backends: {', '.join(native.backends) or 'none'}")
    if native.feed_forward:
        lines.append(f"backends that end in -ffn cover {COVERAGES[native.feed_forward]}")
    lines.append(f"attention offload: {'yes' if native.attention_offload else 'no'}")
    return [*lines, *native.notes]


NATIVE_COLUMNS = (
    "family",
    "interval above 1",
    "covers block by block",
    "-ffn covers",
    "backends",
    "offload",
    "and",
)


# How SimpleTuner's class of a family carries out an interval above 1.
SEGMENTS = {
    "whole-block": "segments",
    "per-block": "block by block",
    "every-nth": "every n-th block",
    "ignored": "ignored",
    "broken": "breaks",
}


NATIVE = """
## SimpleTuner's own classes

A class of SimpleTuner's gets its schedule from this package, as any other does, and the keys mean
the same on all of them ([measured side by side](trainers/simpletuner-classes.md)). This table is
about `--native` and `native=True`: what the classes of SimpleTuner 4.10.1 do with its keys where
they are left to carry them out. Most were built small and run on a
CPU in November 2026: gradients compared with those of no checkpointing, calls of blocks and
feed-forwards counted. *Covers block by block*: which blocks are recomputed where the class runs no
segments, because it has none or because something forces it to (block swapping, captured states,
ControlNet, TREAD, an interval of 1). *all*: every block, interval and stride ignored.
*every-nth*: every n-th block, stride ignored. *windows*: every n-th block, and with a stride the
blocks in its windows. With an interval of 1 a stride is ignored everywhere. A backend that is not
listed: those in -ffn mostly raise an error at load (notes say where not), `unsloth` is accepted and
`torch` runs. The offload of attention raises an error where it says no.
"""


def native_row(family: Family) -> tuple[str, ...]:
    """The cells of one family in the table of SimpleTuner's own classes; empty without facts."""
    native = family.native
    if native is None:
        return ()
    notes = [f"**{native.fault}**"] if native.fault else []
    notes += [f"`{path}`: {coverage}" for path, coverage in native.block_by_block.items()]
    if native.counted_on:
        notes.append("blocks are counted on from one stack to the next")
    return (
        f"{family.title} (`{family.family}`)",
        SEGMENTS[native.segments],
        native.fallback or ("windows" if native.segments == "per-block" else ""),
        native.feed_forward or "",
        ", ".join(native.backends) or "none",
        "yes" if native.attention_offload else "no",
        "; ".join([*notes, *(note.removesuffix(".") for note in native.notes)]),
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def document(families: Iterable[Family]) -> str:
    """Both tables and every page, as the Markdown of docs/families.md."""
    ordered = sorted(families, key=lambda family: (family.title.lower(), family.classes))
    lines = [
        "# Model families",
        "",
        "Generated from `model_families/` by `segckpt families --markdown`.",
        "",
        "*Segments*: consecutive blocks share a checkpoint call. *Per-block*: the blocks cannot",
        "run together, so the same blocks are recomputed one by one. *Units*: modules outside",
        "any stack, recomputed one by one. *Proven*: `segckpt check` trains the class in small.",
        "",
        *_table(COLUMNS, map(row, ordered)),
        *NATIVE.splitlines(),
        "",
        *_table(NATIVE_COLUMNS, filter(None, map(native_row, ordered))),
    ]
    for family in ordered:
        lines += ["", *page(family)]
    return "\n".join(lines) + "\n"


def print_table(families: Iterable[Family]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*COLUMNS)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for family in sorted(families, key=lambda family: family.title.lower()):
        table.add_row(*(Text(cell) for cell in row(family)))
    # In a pipe, nothing is cut.
    Console(markup=False, width=None if sys.stdout.isatty() else 250).print(table)


@command("families")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="segckpt families", description="Show which model families are supported, and how."
    )
    parser.add_argument("name", nargs="?", metavar="FAMILY", help="one family's page")
    parser.add_argument("--families", action="append", default=[], metavar="DIR")
    parser.add_argument("--markdown", action="store_true", help="the document of docs/families.md")
    options = parser.parse_args(arguments)
    try:
        registry = FamilyRegistry.default(options.families)
        if options.name:
            print("\n".join("\n".join(page(family)) for family in registry.named(options.name)))
            return 0
    except (FamilyError, UnknownFamily) as error:
        return refuse("families", str(error))
    if options.markdown:
        print(document(registry), end="")
    else:
        print_table(registry)
    return 0
