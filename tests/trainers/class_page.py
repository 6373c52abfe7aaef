"""The page that shows what a run over a trainer's classes found."""

from collections.abc import Iterable, Iterator, Sequence

from class_runner import Measured, Outcome

SHARED = ("layer", "interval 2", "2 of 3", "unsloth", "torch-ffn", "offload")
OURS = ("keep attention", "keep attention, ffn", "keep_last 2")


def page(outcomes: Sequence[Outcome], introduction: str, notes: str) -> str:
    """Markdown: what runs in segments, then each mode beside that of the class."""
    ran = [outcome for outcome in outcomes if outcome.ours]
    served = [o for o in ran if o.ours["interval 2"].segments.startswith("segments")]
    right = sum(not m.wrong and not m.refused for o in ran for m in o.ours.values())
    steps = sum(not m.refused for o in ran for m in o.ours.values())
    return "\n".join(
        [
            introduction.strip(),
            "",
            f"{len(ran)} of {len(outcomes)} classes ran, {len(served)} of them wholly in segments. "
            f"With the engine of this package {right} of {steps} combinations of class and keys "
            "gave the loss, the gradients and the random state of the plain step, bit by bit.",
            "",
            "## Segments",
            "",
            *_table(("family", "class", "blocks", "interval 2"), map(_segments, outcomes)),
            "",
            "## The keys that both know",
            "",
            *_table(("family", *SHARED), (_cells(o, SHARED) for o in ran)),
            "",
            "## The keys of this package",
            "",
            *_table(("family", *OURS), (_cells(o, OURS) for o in ran)),
            "",
            notes.strip(),
            "",
        ]
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _segments(outcome: Outcome) -> tuple[str, ...]:
    name = f"`{outcome.row.model_class.rpartition('.')[2]}`"
    if outcome.row.cannot:
        return outcome.title, name, "", f"not run: {outcome.row.cannot}"
    beside = ""
    if outcome.row.beside:
        also = ", ".join(f"`{path}`" for path in outcome.row.beside)
        worth = f"{outcome.beside / 1000:.0f} kB of what `layer` keeps with ours"
        beside = f" (its own class also recomputes {also}: {worth})"
    said = outcome.ours["interval 2"].segments.replace("|", "\\|")
    return outcome.title, name, str(outcome.blocks), said + beside


def _cells(outcome: Outcome, modes: Sequence[str]) -> tuple[str, ...]:
    return outcome.title, *(
        " · ".join(_cell(found[mode]) for found in (outcome.ours, outcome.theirs) if mode in found)
        for mode in modes
    )


def _cell(found: Measured) -> str:
    if found.refused.startswith(("ConfigError", "UnsupportedModel")):
        return "-"
    if found.refused:
        return f"**{found.refused.partition(':')[0]}**"
    if found.wrong:
        return "**wrong**"
    return f"{found.again} / {found.alive / 1000:.0f}"
