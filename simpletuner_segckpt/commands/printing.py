"""Findings and reports as every command prints them: text, JSON, workflow commands."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..costs.records import GIB
from ..messages.errors import ConfigError
from ..messages.findings import printable
from ..schedules.checked_file import Checked
from ..schedules.report import Report


def print_text(checked: Sequence[Checked]) -> None:
    """Findings, then the schedule of each file, then the totals."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False, emoji=False, markup=False)
    for result in checked:
        for finding in result.findings:
            style = "red" if finding.severity == "error" else "yellow"
            text = Text(printable(str(finding)))
            text.highlight_words([f"{finding.code} {finding.severity}"], style)
            console.print(text)
        if result.report:
            console.print(Text(printable(result.file), "bold"))
            for line in [*result.report.lines(), *(f"note: {n}" for n in result.notes)]:
                console.print(Text(f"  {line}"))
        else:
            for note in result.notes:
                console.print(Text(printable(f"{result.file}: {note}")))
    findings = [finding for result in checked for finding in result.findings]
    errors = sum(finding.severity == "error" for finding in findings)
    if findings:
        warnings = len(findings) - errors
        console.print(f"{_count(errors, 'error')}, {_count(warnings, 'warning')}")
    else:
        console.print("All keys are right.")


def room_line(budget: float, usable: float) -> str:
    """A budget in bytes, and what of it a peak may reach."""
    return (
        f"budget {budget / GIB:.2f} GiB, of which the peak may reach {usable / GIB:.2f} "
        "(the rest is margin and CUDA context)"
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def print_json(checked: Sequence[Checked]) -> None:
    """One document: ``{"files": [{"file", "findings", "report", "notes"}]}``."""
    documents = [
        {
            "file": result.file,
            "findings": [{"code": f.code, **asdict(f)} for f in result.findings],
            "report": result.report and report_document(result.report),
            "notes": list(result.notes),
        }
        for result in checked
    ]
    print(json.dumps({"files": documents}, indent=2))


def report_document(report: Report) -> dict[str, Any]:
    """A report as JSON types; segments as lists of block indices."""
    return {
        "family": report.family,
        "strategy": report.strategy,
        "budget": str(report.budget) if report.budget else None,
        "conditions": [asdict(condition) for condition in report.conditions],
        "remarks": list(report.remarks),
        "stacks": [
            {
                "path": stack.path,
                "strategy": stack.strategy,
                "reason": stack.reason,
                "blocks": stack.blocks,
                "segments": [list(segment) for segment in stack.segments],
                "gap": list(stack.gap),
                "feed_forward": list(stack.feed_forward),
                "kept": list(stack.kept),
                "inputs_on_cpu": stack.inputs_on_cpu,
                "offloaded": list(stack.offloaded),
            }
            for stack in report.stacks
        ],
        "left_out": [{"path": path, "reason": reason} for path, reason in report.left_out],
    }


def print_github(checked: Sequence[Checked]) -> None:
    """Workflow commands that show each finding beside the line it is about."""
    for result in checked:
        for finding in result.findings:
            place = f"file={_escaped(finding.file, ',:')}"
            if finding.line:
                place += f",line={finding.line},col={finding.column}"
            key = f"`{finding.key}` " if finding.key else ""
            text = _escaped(key + finding.message)
            print(f"::{finding.severity} {place},title={finding.code}::{text}")


def _escaped(text: str, also: str = "") -> str:
    """``text`` as workflow commands want it: some characters as %XX."""
    shown = printable(text)
    for character in f"%{also}":
        shown = shown.replace(character, f"%{ord(character):02X}")
    return shown


PRINTERS = {"text": print_text, "json": print_json, "github": print_github}


def print_findings(config: str, error: ConfigError, form: str = "text") -> int:
    """Print what is wrong with a config as ``validate`` does; the exit code."""
    checked = Checked(config, list(error.findings))
    PRINTERS[form]([checked])
    return checked.exit_code
