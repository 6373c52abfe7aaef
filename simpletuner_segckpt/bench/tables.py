"""The results as tables: in the form in which such sweeps are published, and with the details."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..messages.units import Unit, unit_of
from .cells import Cell, slower_for_keeping, without_effect
from .prediction import Prediction

WIDTH = 160  # columns that the table may take, also where no terminal says how many there are


DOUBT = "option without effect?"


LEGEND = (
    "Each measured cell is seconds of a step without warm-up (median) / peak {}. OOM ran out of "
    "memory, failed did not get through the measured steps, unsupported cannot be carried out on "
    "this model, not run was not asked for."
)


@dataclass(frozen=True)
class Results:
    """All there is to show. ``cells`` has every mode, those that were not run as well."""

    title: str
    device: str
    precision: str
    how: str  # for example "5 steps after 3 of warm-up"
    cells: Sequence[Cell]
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def unit(self) -> Unit:
        """In which peaks are shown."""
        peaks: list[float] = [cell.peak_bytes for cell in self.cells]
        peaks += [prediction.peak for prediction in self.predictions.values()]
        return unit_of(max(peaks, default=0), "MiB")

    def peak(self, amount: float) -> str:
        """``amount`` bytes in that unit, without it."""
        value = amount / self.unit.bytes
        return f"{value:.{decimals(value, 2)}f}"


def decimals(value: float, least: int) -> int:
    """How many decimals show three digits of a small value; ``least`` for others."""
    return max(least, 2 - math.floor(math.log10(value))) if value > 0 else least


def seconds(value: float) -> str:
    return f"{value:.{decimals(value, 3)}f}"


def with_spread(cell: Cell) -> str:
    return f"{seconds(cell.median)} ± {cell.spread:.{decimals(cell.median, 3)}f}"


def published(found: Results) -> list[str]:
    """A Markdown table in the form of SimpleTuner's published sweep."""
    return [
        f"| Precision | Mode | {_escaped(found.device)} |",
        "| --- | --- | ---: |",
        *(f"| {found.precision} | {cell.mode} | {_figures(found, cell)} |" for cell in found.cells),
    ]


def _figures(found: Results, cell: Cell) -> str:
    if not cell.measured:
        return cell.status
    return f"{seconds(cell.median)} / {found.peak(cell.peak_bytes)}"


def columns(found: Results) -> list[str]:
    names = ["mode", "s/step", f"peak {found.unit.name}", "time/none", "memory/none", "recomputed"]
    if found.predictions:
        names.append(f"predicted {found.unit.name}")
        if any(prediction.seconds for prediction in found.predictions.values()):
            names.append("predicted s/step")
    return [*names, "status"]


def rows(found: Results) -> list[list[str]]:
    """A row of ``columns`` for each mode."""
    none = next((cell for cell in found.cells if cell.mode == "none" and cell.measured), None)
    alike = same_as(found.cells)
    timed = "predicted s/step" in columns(found)
    made = []
    for cell in found.cells:
        row = [cell.mode, *[""] * 5]
        if cell.measured:
            row[1:3] = with_spread(cell), found.peak(cell.peak_bytes)
            if none:
                row[3] = f"{cell.median / none.median:.2f}"
                row[4] = f"{cell.peak_bytes / none.peak_bytes:.2f}"
            row[5] = f"{cell.recomputed} of {cell.blocks}"
        if found.predictions:
            prediction = found.predictions.get(cell.mode)
            row.append(found.peak(prediction.peak) if prediction else "")
            if timed:
                there = prediction and prediction.seconds
                row.append(seconds(there) if there else "")
        made.append([*row, DOUBT if cell.mode in alike else cell.status])
    return made


def same_as(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """By mode, those before it that have the same figures."""
    found: dict[str, list[str]] = {}
    for one, other in without_effect(cells):
        found.setdefault(other, []).append(one)
    return found


def reasons(cells: Sequence[Cell]) -> list[str]:
    """Why modes were not measured, which of them look alike, and what the plugin warned of."""
    lines = [
        f"{cell.mode}: {cell.status}: {cell.reason}"
        for cell in cells
        if cell.reason and cell.status != "not run"
    ]
    lines += [
        f"{mode}: {DOUBT} its figures are those of {', '.join(others)}, within noise"
        for mode, others in same_as(cells).items()
    ]
    lines += [
        f"{mode}: takes longer than {other}, which recomputes what it keeps: such a step is bound "
        "by the host, to which each operator inside a kept block is work, and gains nothing by it"
        for mode, other in slower_for_keeping(cells)
    ]
    warned: dict[str, list[str]] = {}
    for cell in cells:
        for remark in cell.remarks:
            warned.setdefault(remark, []).append(cell.mode)
    return [*lines, *(f"{', '.join(modes)}: {remark}" for remark, modes in warned.items())]


def markdown(found: Results, picture: str = "") -> str:
    """The document ``results.md``."""
    lines = [f"# {found.title}", "", f"{found.device}, {found.how}.", ""]
    lines += [*published(found), "", LEGEND.format(found.unit.name), ""]
    names = columns(found)
    lines += [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    lines += [f"| {' | '.join(map(_escaped, row))} |" for row in rows(found)]
    lines += ["", "± is half of the range that the middle half of the steps lies in.", ""]
    if picture:
        lines += [f"![memory against step time]({picture})", ""]
    lines += [f"- {_escaped(line)}" for line in (*reasons(found.cells), *found.notes)]
    ran = [f"- {cell.mode}: {_escaped(cell.ran)}" for cell in found.cells if cell.ran]
    if ran:
        lines += ["", "What the last step of each mode did:", "", *ran]
    return "\n".join(lines).rstrip() + "\n"


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def print_text(found: Results) -> None:
    """The details, then what is to be said of them."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, emoji=False, markup=False, width=WIDTH)
    console.print(f"{found.title}\n{found.device}, {found.how}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns(found):
        justify = "left" if name in ("mode", "status") else "right"
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for cell, row in zip(found.cells, rows(found), strict=True):
        if cell.status != "not run":
            table.add_row(*row)
    console.print(table)
    missing = [cell.mode for cell in found.cells if cell.status == "not run"]
    lines = [*reasons(found.cells), *found.notes]
    if missing:
        lines.insert(0, f"not run: {', '.join(missing)}")
    for line in lines:
        console.print(f"note: {line}", soft_wrap=True)
