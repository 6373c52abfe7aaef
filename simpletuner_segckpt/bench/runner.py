"""Start a process for each mode, one after another, and keep what each found in a file."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..messages.errors import UsageError, reason_of
from ..messages.findings import printable
from .cells import Cell

FILE = "results.jsonl"


RECORD = "record.part"


@dataclass(frozen=True)
class Bench:
    """What is measured, and where the results go.

    modes: by name, the checkpointing keys, all of them with their defaults. configs: by mode, the
    config that asks for it. identity: what the figures depend on, as the first line of the file
    has it. request: what every child is told besides. impossible: modes that cannot be carried
    out, with the reason. timeout: seconds for a mode.
    """

    out: Path
    modes: Mapping[str, Mapping[str, Any]]
    configs: Mapping[str, Mapping[str, Any]]
    identity: Mapping[str, Any]
    request: Mapping[str, Any]
    impossible: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None

    def measure(self, mode: str) -> Cell:
        """One mode in a process of its own. Returns when that has ended, or been ended."""
        keys = dict(self.modes[mode])
        if mode in self.impossible:
            reason = printable(self.impossible[mode])
            return Cell(mode=mode, keys=keys, status="unsupported", reason=reason)
        record, log = self.out / RECORD, self.out / f"{mode}.log"
        record.unlink(missing_ok=True)
        request = {
            **self.request,
            "mode": mode,
            "keys": keys,
            "values": self.configs[mode],
            "record": str(record),
        }
        try:
            with log.open("wb") as output:
                ended = _run(json.dumps(request), output, self.timeout)
        except BaseException:  # above all Ctrl-C
            log.unlink(missing_ok=True)
            raise
        found = _read(record) or _without_record(mode, keys, ended, self.timeout, log)
        record.unlink(missing_ok=True)
        if found.measured:
            log.unlink()
        return found


def _run(request: str, output: Any, timeout: float | None) -> int | None:
    """The exit code of a child, or None when it took longer than ``timeout`` seconds."""
    child = subprocess.Popen(
        [sys.executable, "-m", "simpletuner_segckpt.bench.child"],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for the parent, which then ends the child
    )
    assert child.stdin is not None
    try:
        # Left open: the child ends when this process does, however it does.
        child.stdin.write(request.encode() + b"\n")
        child.stdin.flush()
        return child.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    except BrokenPipeError:  # it ended before it had read anything
        return child.wait()
    finally:
        child.kill()
        child.wait()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()


def _read(record: Path) -> Cell | None:
    try:
        return Cell.model_validate_json(record.read_bytes())
    except (OSError, ValidationError):
        return None


def _without_record(
    mode: str, keys: dict[str, Any], ended: int | None, timeout: float | None, log: Path
) -> Cell:
    """A child that ended before it could say why."""
    if ended is None:
        return Cell(
            mode=mode, keys=keys, status="failed", reason=f"timeout: not done in {timeout:g} s"
        )
    if ended == -signal.SIGKILL:
        reason = "its process was killed, as systems do when CPU memory runs out"
        return Cell(mode=mode, keys=keys, status="OOM", reason=reason)
    last = log.read_text("utf-8", "replace").strip().rpartition("\n")[2]
    how = f"signal {signal.Signals(-ended).name}" if ended < 0 else f"exit code {ended}"
    reason = printable(f"its process ended with {how}{': ' if last else ''}{last}")
    return Cell(mode=mode, keys=keys, status="failed", reason=reason)


def run(bench: Bench, redo: bool = False) -> Generator[tuple[Cell, bool]]:
    """Each mode's cell, and whether it was in the file already.

    Raises ``UsageError`` when the file holds results of something else, or cannot be used.
    """
    path = bench.out / FILE
    try:
        bench.out.mkdir(parents=True, exist_ok=True)
        known = _opened(path, bench.identity, redo)
        path.open("a").close()  # before anything is measured
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {reason_of(error)}") from None
    for mode, keys in bench.modes.items():
        cell = known.get(mode)
        there = cell is not None and cell.keys == keys and not redo
        if cell is None or not there:
            cell = bench.measure(mode)
            _append(path, cell.model_dump(mode="json"))
        yield cell, there


def read_results(path: Path) -> tuple[Mapping[str, Any] | None, dict[str, Cell]]:
    """What a file of results holds: what was measured, and by mode the last cell of each.

    Raises ``UsageError`` when a line but the last is no such thing.
    """
    header, cells, _ = _lines(path)
    return header, cells


def _opened(path: Path, identity: Mapping[str, Any], redo: bool) -> dict[str, Cell]:
    """Make ``path`` a file that lines can be appended to; what it holds already."""
    header, known, whole = _lines(path)
    wanted = json.loads(json.dumps(identity))
    if header is None:
        path.write_bytes(b"")
        _append(path, {"identity": wanted})
        return {}
    found = difference(header, wanted)
    if found and not redo:
        raise UsageError(f"{path} {found}; pass --redo to measure again, or another --out")
    if found:
        path.replace(path.with_suffix(".jsonl.old"))
        return _opened(path, identity, redo=False)
    if whole < path.stat().st_size:  # a line that was being written when the power went
        os.truncate(path, whole)
    return known


def _lines(path: Path) -> tuple[Mapping[str, Any] | None, dict[str, Cell], int]:
    """The identity and the cells in a file, and the bytes that its whole lines take.

    Raises ``UsageError`` when a line but the last is no such thing.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None, {}, 0
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {reason_of(error)}") from None
    lines = data.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    header: Mapping[str, Any] | None = None
    cells: dict[str, Cell] = {}
    whole = 0
    for number, line in enumerate(lines, 1):
        try:
            if header is None:
                header = dict(json.loads(line)["identity"])
            else:
                cell = Cell.model_validate_json(line)
                cells[cell.mode] = cell
        except (ValueError, KeyError, TypeError, RecursionError):
            if number == len(lines) > 1:
                break
            raise UsageError(
                f"{path}, line {number}: is not what bench writes; pass another --out"
            ) from None
        whole += len(line)
    return header, cells, whole


def difference(before: Any, now: Any, name: str = "") -> str:
    """Which entry of two identities is not the same, as the rest of a sentence; empty if none."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in (*before, *(key for key in now if key not in before)):
            found = difference(before.get(key), now.get(key), f"{name}.{key}" if name else key)
            if found:
                return found
        return ""
    if before == now:
        return ""
    return printable(f"was measured with {name} {_shown(before)}, now it is {_shown(now)}")


def _shown(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def _append(path: Path, line: Any) -> None:
    """Write a line so that it survives whatever comes next. Raises ``UsageError``."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {reason_of(error)}") from None
