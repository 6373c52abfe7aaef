"""``segckpt bench``: measure schedules with real training steps on the device at hand.

Each mode runs in a process of its own. What is done stands in a file, line by line, so that the
same command goes on where it was stopped. Exit codes: 0 measured, 1 errors in the config, or no
mode could be measured, 2 could not run, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.settings import Settings, load_settings
from ..config_schema import CheckpointingConfig
from ..costs.cards import card
from ..estimator.predict.modes import MODES, OWN, keys_of
from ..families.registry import FamilyRegistry
from ..messages.errors import (
    ConfigError,
    FamilyError,
    UnknownFamily,
    UsageError,
    WorkloadError,
    reason_of,
)
from ..messages.units import readable
from .output import command, refuse
from .printing import print_findings
from .workload_options import add_workload_options, modes_in, overrides_of

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ..bench.cells import Cell, Point
    from ..bench.prediction import Predicted
    from ..bench.runner import Bench
    from ..bench.tables import Results
    from ..bench.trial import Trial


ALL = (OWN, *MODES)


PICTURE = "results.png"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="segckpt bench",
        description="Measure the step time and the peak memory of schedules with real training "
        "steps, each schedule in a process of its own. The same command goes on where it stopped.",
        epilog="exit codes: 0 measured, 1 errors in the config or nothing measured, 2 could not "
        "run, 130 interrupted",
    )
    add_workload_options(made)
    made.add_argument(
        "--modes", default=",".join(ALL), metavar="A,B", help=f"out of {', '.join(ALL)}"
    )
    made.add_argument("--tiny", action="store_true", help="the small model of the family file")
    made.add_argument("--steps", type=_count, default=5, metavar="N", help="measured steps (5)")
    made.add_argument(
        "--warmup", type=_count, default=3, metavar="N", help="steps before those (3)"
    )
    made.add_argument("--device", metavar="NAME", help="cpu, cuda:1 and the like")
    made.add_argument("--out", metavar="DIR", help="folder of the results (runs/bench-NAME)")
    made.add_argument("--redo", action="store_true", help="measure again what is in the file")
    made.add_argument(
        "--timeout", type=_count, default=3600, metavar="S", help="seconds for a mode (3600)"
    )
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


@command("bench")
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return _bench(options)
    except ConfigError as error:
        return print_findings(options.config, error)
    except (UnknownFamily, FamilyError, WorkloadError, UsageError) as error:
        return refuse("bench", str(error))
    except KeyboardInterrupt:
        print("segckpt bench: interrupted before anything was measured", file=sys.stderr)
        return 130


def _bench(options: argparse.Namespace) -> int:
    asked = modes_in(options.modes)
    if not asked:
        raise UsageError("--modes names no mode")
    settings = load_settings(options.config)
    on = card(options.gpu) if options.gpu else None
    registry = FamilyRegistry.default(options.families)

    from ..bench.child import limit_threads, name_of
    from ..bench.prediction import card_of, predict
    from ..bench.tables import Results
    from ..bench.trial import trial_of

    limit_threads(options.tiny)

    trial = trial_of(settings, registry, overrides_of(options), options.tiny)
    device = _device(options.device)
    keys = {mode: _keys(mode, settings) for mode in ALL}
    modes = {mode: keys[mode] for mode in ALL if mode in asked}
    with _console().status("predicting"):
        predicted = predict(trial, settings, modes, on or card_of(name_of(device)))
    bench = _prepared(options, settings, trial, device, modes, predicted)
    done = _run(bench, options.redo)
    found = Results(
        trial.title,
        name_of(device),
        trial.precision,
        f"torch {bench.identity['torch']}, {options.steps} steps after {options.warmup} of warm-up",
        _all_cells(bench, keys, done),
        predicted.modes,
        [*trial.notes, *([predicted.note] if predicted.note else []), *_about(done)],
    )
    _show(found, bench.out)
    missing = [mode for mode in modes if mode not in done]
    if missing:
        there = f"{len(done)} of {len(modes)} modes are in {bench.out}"
        print(f"interrupted: {there}; the same command goes on with {missing[0]}", file=sys.stderr)
        return 130
    return int(not any(cell.measured for cell in done.values()))


def _prepared(
    options: argparse.Namespace,
    settings: Settings,
    trial: "Trial",
    device: "torch.device",
    modes: Mapping[str, Mapping[str, Any]],
    predicted: "Predicted",
) -> "Bench":
    import torch

    from ..bench.child import name_of
    from ..bench.runner import Bench
    from ..bench.trial import without_schedule

    values = _plain(settings.file.values)
    rest = without_schedule(values)
    stem = "stdin" if settings.file.name == "<stdin>" else Path(settings.file.name).stem
    return Bench(
        out=Path(options.out) if options.out else Path("runs") / f"bench-{stem}",
        modes=modes,
        configs={mode: values if mode == OWN else rest | keys_of(mode) for mode in modes},
        identity={
            "device": name_of(device),
            "torch": torch.__version__,
            "segckpt": version("simpletuner-segckpt"),
            "steps": options.steps,
            "warmup": options.warmup,
            "workload": _plain(trial.identity),
            "config": rest,
        },
        request={
            "file": settings.file.name,
            "overrides": asdict(overrides_of(options)),
            "families": options.families,
            "tiny": options.tiny,
            "steps": options.steps,
            "warmup": options.warmup,
            "device": str(device),
        },
        impossible=predicted.impossible,
        timeout=options.timeout,
    )


def _plain(values: Any) -> Any:
    """JSON types. A date in a TOML file becomes text."""
    import json

    return json.loads(json.dumps(values, default=str))


def _keys(mode: str, settings: Settings) -> dict[str, Any]:
    """All checkpointing keys of a mode, as JSON types."""
    config = settings.checkpointing
    if mode != OWN:
        config = CheckpointingConfig.model_validate(keys_of(mode))
    return config.model_dump(mode="json", by_alias=True)


def _device(name: str | None) -> "torch.device":
    """The device of that name, without touching it; else the accelerator; else the CPU."""
    import torch

    there = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return there or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: torch knows no such device") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if there is None or there.type != device.type:
        others = f"{there.type} or cpu" if there else "cpu"
        raise UsageError(f"--device {name}: there is none here; write {others}")
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise UsageError(f"--device {name}: there are {count} here, counted from 0")
    return device


def _run(bench: "Bench", redo: bool) -> "dict[str, Cell]":
    """Measure, saying what comes of each mode. What is done when Ctrl-C is pressed."""
    from ..bench.runner import run
    from ..bench.tables import seconds

    done: dict[str, Cell] = {}
    console = _console()
    names = list(bench.modes)
    cells = run(bench, redo)
    try:
        while len(done) < len(names):
            mode = names[len(done)]
            with console.status(f"{mode} ({len(done) + 1} of {len(names)})"):
                cell, there = next(cells)
            done[mode] = cell
            told = f"{cell.status} {cell.reason}".strip()
            if cell.measured:
                told = f"{seconds(cell.median)} s/step, {readable(cell.peak_bytes)}"
            console.print(f"{mode}: {told}{' (in the file already)' if there else ''}")
    except KeyboardInterrupt:
        cells.close()
    return done


def _console() -> "Console":
    """Standard error: what is going on."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False, markup=False, soft_wrap=True)


def _all_cells(
    bench: "Bench", keys: Mapping[str, Mapping[str, Any]], done: "Mapping[str, Cell]"
) -> "list[Cell]":
    """A cell for every mode: what was measured now or before, or that it was not."""
    from ..bench.cells import Cell
    from ..bench.runner import FILE, read_results

    _, known = read_results(bench.out / FILE)
    before = {mode: cell for mode, cell in known.items() if cell.keys == keys.get(mode)}
    return [done.get(mode) or before.get(mode) or Cell(mode=mode) for mode in ALL]


def _about(done: "Mapping[str, Cell]") -> list[str]:
    """What the figures are."""
    lines = []
    if any(cell.memory == "allocator" for cell in done.values()):
        lines.append("peaks are what torch's allocator had given out at most")
    if any(cell.memory == "counted" for cell in done.values()):
        lines.append(
            "peaks are counted operator by operator in one more step, weights and optimizer "
            "included: this device's allocator does not tell"
        )
    return lines


def _show(found: "Results", out: Path) -> None:
    """Write the table and the picture, and print them. Raises ``UsageError``."""
    from ..bench.cells import points_of
    from ..bench.picture import draw, terminal
    from ..bench.tables import markdown, print_text

    measured = points_of(found.cells)
    predicted = _predicted_points(found)
    try:
        drawn = bool(measured) and draw(measured, predicted, found.title, out / PICTURE)
        (out / "results.md").write_text(markdown(found, PICTURE if drawn else ""), "utf-8")
    except OSError as error:
        raise UsageError(f"{out}: table and picture: {reason_of(error)}") from None
    written = [f"{out / 'results.md'}"]
    print_text(found)
    if drawn:
        written.append(f"{out / PICTURE}")
    elif measured:
        print("\n".join(["", *terminal(measured, predicted)]))
        print("matplotlib draws this as a PNG: pip install 'simpletuner-segckpt[plot]'")
    print(f"written: {', '.join(written)}")


def _predicted_points(found: "Results") -> "list[Point]":
    """Predictions of the measured modes; those without a time stand at the measured one."""
    from ..bench.cells import Point

    return [
        Point(cell.mode, prediction.seconds or cell.median, prediction.peak)
        for cell in found.cells
        if cell.measured and (prediction := found.predictions.get(cell.mode))
    ]
