"""``segckpt estimate``: peak memory and step time of schedules for the real model, without a GPU.

Exit codes: 0 estimated, 1 errors in the config, 2 could not run.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..costs.cards import card
from ..costs.records import GIB
from ..estimator.predict.estimate import Estimates, ModeRow, estimate_config
from ..estimator.predict.modes import MODES, OWN
from ..estimator.predict.usable import usable
from ..estimator.workload.parse import describe
from ..families.registry import FamilyRegistry
from ..messages.errors import ConfigError, FamilyError, UnknownFamily, WorkloadError
from ..messages.findings import printable
from .output import command, refuse
from .printing import print_findings
from .workload_options import add_workload_options, modes_in, overrides_of

WIDTH = 120  # columns that the table needs, also where no terminal says how many there are


def print_text(found: Estimates) -> None:
    """What is trained, a row for each mode, and what was assumed."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=WIDTH, highlight=False, emoji=False, markup=False)
    console.print(describe(found.read))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("mode", "peak GiB", "weights", "gradients", "optimizer", "kept", "working"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    table.add_column("recomputed", justify="right", no_wrap=True)
    if found.card:
        table.add_column("time/none", justify="right", no_wrap=True)
        table.add_column("fits", justify="right", no_wrap=True)
    if any(row.traced for row in found.rows):
        table.add_column("traced GiB", justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*_cells(row, found))
    console.print(table)
    for row in found.rows:
        for path, plan in row.estimate.plan.items():
            console.print(f"{row.estimate.mode}: {path}: {plan}", soft_wrap=True)
    for line in remarks(found):
        console.print(f"note: {printable(line)}", soft_wrap=True)


def _cells(row: ModeRow, found: Estimates) -> list[str]:
    step = row.estimate.step
    if step is None:
        return [row.estimate.mode, "-"]
    parts = (step.peak, step.weights, step.gradients, step.states, step.kept, step.working)
    cells = [row.estimate.mode, *(f"{part / GIB:.2f}" for part in parts)]
    cells.append(f"{100 * step.recomputed_share:.0f}%")
    if found.card:
        cells.append(f"{row.against_none:.2f}" if row.against_none else "")
        cells.append("yes" if step.peak <= usable(found.card.memory * GIB) else "no")
    if row.traced:
        cells.append(f"{row.traced / GIB:.2f}")
    return cells


def remarks(found: Estimates) -> list[str]:
    """What the numbers rest on, and what they leave out."""
    lines = [f"assumed: {line}" for line in found.read.assumed]
    lines += [f"not modelled: {line}" for line in found.read.ignored]
    lines += [
        f"{row.estimate.mode}: {row.estimate.impossible}"
        for row in found.rows
        if row.estimate.impossible
    ]
    lines += [f"{r.estimate.mode}: {r.estimate.remark}" for r in found.rows if r.estimate.remark]
    lines += [f"{c}" for row in found.rows[:1] for c in row.estimate.report.conditions]
    if found.card:
        bound = [row.estimate.mode for row in found.rows if row.time and row.time.launch_bound]
        if bound:
            names = "all modes" if len(bound) == len(found.rows) else ", ".join(bound)
            lines.append(
                f"on {found.card.title} launching the kernels takes longer than running them, so "
                f"the times of {names} come from the number of kernels, not from FLOPs"
            )
        lines.append(
            f"times are predictions for {found.card.title}, not measurements; what fits leaves 5% "
            "of it and half a GiB for the CUDA context free"
        )
    lines.append(
        "the model, its adapter and what a step needs; not text encoder, VAE, CUDA context (about "
        "half a GiB) and fragmentation. docs/estimator.md has the errors against measurements"
    )
    return lines


def print_json(found: Estimates) -> None:
    """``{"workload", "card", "assumed", "not_modelled", "modes": [...]}``; bytes and seconds."""
    modes = []
    for row in found.rows:
        entry: dict[str, Any] = {"mode": row.estimate.mode, "keys": dict(row.estimate.keys)}
        if row.estimate.step is None:
            entry["impossible"] = row.estimate.impossible
        else:
            share = row.estimate.step.recomputed_share
            entry |= asdict(row.estimate.step) | {"recomputed_share": share}
            if row.time:
                entry["time"] = asdict(row.time) | {
                    "total": row.time.total,
                    "launch_bound": row.time.launch_bound,
                    "against_none": row.against_none,
                }
            if row.traced:
                entry["traced"] = row.traced
            if row.estimate.plan:
                entry["plan"] = row.estimate.plan
        modes.append(entry)
    document = {
        "workload": describe(found.read),
        "card": found.card.title if found.card else None,
        "assumed": found.read.assumed,
        "not_modelled": found.read.ignored,
        "modes": modes,
    }
    print(json.dumps(document, indent=2))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="segckpt estimate",
        description="Predict the peak memory and the recompute of schedules for the real model, "
        "without weights and without a GPU.",
        epilog="exit codes: 0 estimated, 1 errors in the config, 2 could not run",
    )
    add_workload_options(made)
    made.add_argument(
        "--modes", default=",".join(MODES), metavar="A,B", help=f"out of {', '.join(MODES)}"
    )
    made.add_argument(
        "--trace",
        nargs="?",
        const=OWN,
        default="",
        metavar="A,B",
        help="run a whole step of these modes as the check; without names, of the config's own",
    )
    made.add_argument("--output-format", choices=("text", "json"), default="text")
    return made


@command("estimate")
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        found = estimate_config(
            options.config,
            registry=FamilyRegistry.default(options.families),
            overrides=overrides_of(options),
            modes=[mode for mode in modes_in(options.modes) if mode != OWN],
            on=card(options.gpu) if options.gpu else None,
            traced=modes_in(options.trace),
        )
    except ConfigError as error:
        return print_findings(options.config, error, options.output_format)
    except (UnknownFamily, FamilyError, WorkloadError) as error:
        return refuse("estimate", str(error))
    (print_json if options.output_format == "json" else print_text)(found)
    return 0
