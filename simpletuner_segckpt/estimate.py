"""``segckpt estimate``: peak memory and step time of schedules for the real model, without a GPU.

Exit codes: 0 estimated, 1 errors in the config, 2 could not run.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import ConfigError, FamilyError, UnknownFamily, WorkloadError
from .estimator.cards import Card, card, cards
from .estimator.modes import MODES, OWN, Estimate, estimate, keys_of
from .estimator.reading import Overrides, Read, read_workload
from .estimator.records import GIB, Profile
from .estimator.timing import Time, time_of
from .output import command, refuse
from .registry import FamilyRegistry
from .settings import ConfigSource, load_settings
from .validate import print_findings, printable

CONTEXT = 0.5 * GIB  # bytes that a CUDA context and its libraries take of the card
MARGIN = 0.05  # of the card: twice the estimator's median error, see docs/estimator.md
WIDTH = 120  # columns that the table needs, also where no terminal says how many there are


@dataclass(frozen=True)
class Row:
    """One mode. ``time`` and ``against_none`` are None without a card, ``traced`` without a trace.

    against_none: step time as a multiple of that of ``none``. traced: bytes at the peak of a whole
    step that was run without memory.
    """

    estimate: Estimate
    time: Time | None = None
    against_none: float | None = None
    traced: int | None = None


@dataclass(frozen=True)
class Estimates:
    """What ``segckpt estimate`` prints."""

    read: Read
    profile: Profile
    card: Card | None
    rows: list[Row] = field(default_factory=list)


def estimate_config(
    config: ConfigSource,
    *,
    registry: FamilyRegistry | None = None,
    overrides: Overrides = Overrides(),
    modes: Sequence[str] = tuple(MODES),
    on: Card | None = None,
    traced: Sequence[str] = (),
) -> Estimates:
    """Every mode of the model that ``config`` trains; the config's own comes first.

    ``config`` is what ``apply`` takes. ``traced`` names modes of which a whole step is run as the
    check. Raises ``ConfigError``, ``UnknownFamily``, ``FamilyError`` and ``WorkloadError``.
    """
    from .estimator.profiling import profile

    settings = load_settings(config)
    read = read_workload(settings, registry or FamilyRegistry.default(), overrides)
    found = Estimates(read, profile(read.workload), on)
    family = read.workload.family

    plain = estimate(found.profile, family, settings, "none", keys_of("none")).step
    none = time_of(plain, on) if on and plain else None

    def row(name: str, keys: Mapping[str, Any]) -> Row:
        made = estimate(found.profile, family, settings, name, keys)
        if made.step is None:
            return Row(made)
        time = time_of(made.step, on) if on else None
        return Row(
            made,
            time,
            time.total / none.total if time and none else None,
            _traced(read, keys) if name in traced else None,
        )

    own = settings.checkpointing.model_dump(by_alias=True, exclude_defaults=True)
    found.rows.append(row(OWN, own))
    asked = dict.fromkeys([*modes, *(name for name in traced if name != OWN)])
    found.rows.extend(row(name, keys_of(name)) for name in asked)
    return found


def _traced(read: Read, keys: Mapping[str, Any]) -> int:
    from .estimator.tracing import trace

    return trace(read.workload, keys)


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
    for line in remarks(found):
        console.print(f"note: {printable(line)}", soft_wrap=True)


def _cells(row: Row, found: Estimates) -> list[str]:
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


def usable(budget: float, margin: float = MARGIN) -> float:
    """What of a card's memory the peak may reach, in bytes: without margin and CUDA context."""
    return budget * (1 - margin) - CONTEXT


def describe(read: Read) -> str:
    """The workload in a line: ``Wan 2.1 / 2.2, 832x480 pixels, 81 frames, batch 1, LoRA ...``."""
    work = read.workload
    sample = f"{work.width}x{work.height} pixels"
    if work.frames > 1:
        sample += f", {work.frames} frames"
    trained = {
        "lora": f"LoRA of rank {work.rank}, dropout {work.dropout:g}",
        "lycoris": f"LyCORIS {work.lycoris.get('algo', '')}".strip(),
        "full": "all weights trained",
    }[work.adapter]
    name = f"{work.family.title} {work.size}".strip()
    return f"{name}: {sample}, batch {work.batch}, {trained}, {work.dtype}"


def remarks(found: Estimates) -> list[str]:
    """What the numbers rest on, and what they leave out."""
    lines = [f"assumed: {line}" for line in found.read.assumed]
    lines += [f"not modelled: {line}" for line in found.read.ignored]
    lines += [
        f"{row.estimate.mode}: {row.estimate.impossible}"
        for row in found.rows
        if row.estimate.impossible
    ]
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
        modes.append(entry)
    document = {
        "workload": describe(found.read),
        "card": found.card.title if found.card else None,
        "assumed": found.read.assumed,
        "not_modelled": found.read.ignored,
        "modes": modes,
    }
    print(json.dumps(document, indent=2))


def add_workload_options(made: argparse.ArgumentParser) -> None:
    """The options that say what the config does not: for every command that builds a workload."""
    made.add_argument("config", metavar="CONFIG", help="JSON, TOML or env; - for standard input")
    made.add_argument("--family", help="model family, instead of the file's model_family")
    made.add_argument("--size", help="published size, instead of that of the model_flavour")
    made.add_argument(
        "--model", metavar="DIR", help="diffusers folder with the model's config.json"
    )
    made.add_argument("--batch", type=_positive, metavar="N", help="samples in a batch")
    made.add_argument("--resolution", type=_pixels, metavar="WxH", help="pixels, as 832x480 or 512")
    made.add_argument("--frames", type=_positive, metavar="N", help="frames of a sample")
    made.add_argument("--text", type=_positive, metavar="N", help="text tokens")
    made.add_argument("--rank", type=_positive, metavar="N", help="rank of the LoRA")
    made.add_argument("--gpu", metavar="CARD", help=f"predict times on one of {', '.join(cards())}")
    made.add_argument(
        "--families", action="append", default=[], metavar="DIR", help="folder of family files"
    )


def overrides_of(options: argparse.Namespace) -> Overrides:
    """What the options of ``add_workload_options`` say."""
    width, height = options.resolution or (None, None)
    return Overrides(
        family=options.family,
        size=options.size,
        model=options.model,
        batch=options.batch,
        width=width,
        height=height,
        frames=options.frames,
        text=options.text,
        rank=options.rank,
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _pixels(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    try:
        return _positive(width), _positive(height or width)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 832x480, or 512") from None


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


def modes_in(text: str) -> list[str]:
    """The modes in a list separated by commas. Raises ``WorkloadError`` for an unknown one."""
    import difflib

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in MODES and name != OWN:
            near = difflib.get_close_matches(name, MODES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"write some of {', '.join(MODES)}"
            raise WorkloadError(f"there is no mode {name}; {hint}")
    return names


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
        return refuse("estimate", printable(str(error)))
    (print_json if options.output_format == "json" else print_text)(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
