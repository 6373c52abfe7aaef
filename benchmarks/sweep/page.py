"""The published sweep beside predictions, as the Markdown of docs/estimator.md."""

from collections.abc import Iterable, Sequence
from statistics import median

from simpletuner_segckpt.messages.errors import WorkloadError

from .predicted import Compared, Comparison, median_error
from .published import published

COLUMNS = (
    "precision",
    "mode",
    "published GiB",
    "predicted GiB",
    "error",
    "published s",
    "predicted s",
    "[why](#why)",
)


def page(comparisons: Sequence[Comparison]) -> str:
    """Markdown. Of all examples on an H100, the generated part of ``docs/estimator.md``."""
    parts = [summary(comparisons), *map(section, comparisons), why()]
    if len(comparisons) == len(published().examples):
        parts.append(left_out())
    return "\n".join(parts)


def summary(comparisons: Sequence[Comparison]) -> str:
    """How far off the peaks are, and how well the order of step times is met."""
    taus = [found.tau for found in comparisons if found.tau is not None]
    cells = [cell for found in comparisons for cell in found.cells if cell.built_for]
    if not cells or not taus:
        return "## In short\n\nToo few of these cells were measured to sum them up.\n"
    near = sum(abs(cell.error) < 0.05 for cell in cells)
    error = f"{100 * median_error(comparisons):.1f}%"
    return (
        "## In short\n\n"
        f"{len(cells)} cells of {len(comparisons)} examples, bf16, `none`, `layer`, `interval2` "
        f"and `seg2-stride4`: the median error of the peak is {error}, and {near} are off by less "
        "than 5%. Kendall's tau between predicted and published step times, median over the "
        f"examples: {median(taus):.2f}.\n"
    )


def section(found: Comparison) -> str:
    """One example: what was assumed, and a row for each cell."""
    lines = [f"## {found.example.title}", "", f"`{found.name}`. Assumed:", ""]
    lines += [f"- {line}" for line in found.example.assumed]
    if found.tau is not None:
        bound = any(cell.launch_bound for cell in found.cells if cell.built_for)
        lines += [
            "",
            f"Order of step times: tau {found.tau:.2f}."
            + (
                " Launching the kernels takes longer than running them here, so times come from "
                "the number of kernels, not from FLOPs."
                if bound
                else ""
            ),
        ]
    lines += [
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"| --- | --- |{' ---: |' * 5} --- |",
        *map(_row, found.cells),
        "",
    ]
    return "\n".join(lines)


def _row(cell: Compared) -> str:
    row = cell.row
    mode = f"{row.mode} ({row.variant})" if row.variant else row.mode
    published_seconds = f"{row.seconds:.3f}" if row.seconds else ""
    predicted = f"{cell.seconds:.3f}" if cell.seconds else ""
    number = f"[{at}](#why)" if (at := _number(cell)) else ""
    return (
        f"| {row.precision} | {mode} | {row.gib:.2f} | {cell.gib:.2f} | {100 * cell.error:+.1f}% | "
        f"{published_seconds} | {predicted} | {number} |"
    )


def _number(cell: Compared) -> int:
    """The number of the reason why a row is off by more than 5%; 0 without one."""
    reason = published().reason(cell.row) if abs(cell.error) >= 0.05 else ""
    return list(_reasons()).index(reason) + 1 if reason else 0


def _reasons() -> dict[str, None]:
    return {entry.reason: None for entry in published().reasons if entry.reason}


def why() -> str:
    """Why rows are off."""
    return "\n".join(["## Why", "", *(f"{at}. {r}" for at, r in enumerate(_reasons(), 1)), ""])


def left_out() -> str:
    """The examples of the sweep that are not compared."""
    lines = [f"- `{name}`: {reason}" for name, reason in published().left_out.items()]
    return "\n".join(["## Not compared", "", *lines, ""])


def chosen(names: Iterable[str]) -> list[str]:
    """The examples that contain one of ``names``; all without any."""
    known = list(published().examples)
    found = []
    for name in names:
        having = [example for example in known if name.lower() in example]
        if not having:
            raise WorkloadError(f"no example is called {name}; they are {', '.join(known)}")
        found += having
    return list(dict.fromkeys(found)) or known
