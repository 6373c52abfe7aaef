"""One config file, checked: its findings, and what would happen to every block of its model.

No torch is imported.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.file import ConfigFile
from ..config.settings import Settings, check_settings, written
from ..config_schema import OWN_KEYS, PREFIX, word
from ..families.registry import FamilyRegistry
from ..families.schema import Family, Stack
from ..messages.errors import UnknownFamily, UsageError, reason_of
from ..messages.findings import Finding
from .own_setters import differences, native_problems, native_report
from .problems import problems
from .report import MOST_BLOCKS, UNITS, Report, make_report


@dataclass
class Checked:
    """One checked file: its findings, and the report when nothing forbids one."""

    file: str
    findings: list[Finding]
    report: Report | None = None
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.findings.sort(key=lambda finding: (finding.line, finding.column))

    @property
    def exit_code(self) -> int:
        if any(finding.rule == "unreadable" for finding in self.findings):
            return 2
        return int(any(finding.severity == "error" for finding in self.findings))


# For what can be said of keys whatever the model: it has one stack, and every part in its blocks.
ANY_MODEL = Family(
    family="unknown",
    title="the model",
    stacks=(
        Stack(
            path="blocks", block="Block", feed_forward=("feed_forward",), attention=("attention",)
        ),
    ),
)


# From the settings, the family and the engine's report to the report that is shown, and findings.
ReportMaker = Callable[[Settings, Family, Report], tuple[Report, list[Finding]]]


def engine_plan(settings: Settings, family: Family, report: Report) -> tuple[Report, list[Finding]]:
    """What this package does."""
    return report, list(problems(settings, family, family.title, report))


def native_plan(settings: Settings, family: Family, report: Report) -> tuple[Report, list[Finding]]:
    """What SimpleTuner's own class of the family does, where its facts are known."""
    if family.native is None:
        message = "has no facts about a class of SimpleTuner's; this package's schedule is shown"
        found = settings.finding("unknown-family", message, "model_family", "warning")
        report, findings = engine_plan(settings, family, report)
        return report, [found, *findings]
    findings = list(native_problems(settings, family, f"SimpleTuner's {family.title}", report))
    value = settings.file.values.get(written(settings.file, PREFIX))
    if isinstance(value, str) and value.lower() == "false" and not settings.file.names:
        message = "is a text, which SimpleTuner leaves out: its default, on, stays; write false"
        findings.append(settings.finding("wrong-type", message, PREFIX))
    told = {finding.key for finding in settings.findings}
    for key in OWN_KEYS:
        name = written(settings.file, key)
        if name not in settings.file.values or name in told:
            continue
        if settings.file.called(name) == name:
            message = (
                "is an option that SimpleTuner does not know and refuses; leave it out, "
                "or train with segckpt launch and without --native"
            )
            findings.append(settings.finding("unsupported-option", message, key))
        else:
            message = "is a variable that SimpleTuner does not read"
            findings.append(settings.finding("no-effect", message, key, "warning"))
    remarks = tuple(differences(settings.checkpointing, family.native))
    return replace(native_report(settings.checkpointing, family, report), remarks=remarks), findings


def check_file(
    file: ConfigFile,
    registry: FamilyRegistry,
    family: str | None = None,
    model_config: Mapping[str, Any] | None = None,
    blocks: Mapping[str, int] | None = None,
    plan: ReportMaker = engine_plan,
) -> Checked:
    """Check one file. ``plan`` says what becomes of the schedule: by default what the engine does.

    The family is ``family``, else the file's ``model_family``, else the one whose class a
    model's config names. Blocks per stack come from ``blocks``, from ``model_config``, or
    from the published size of the file's ``model_flavour``.
    """
    settings, findings = check_settings(file)
    key = written(file, "model_family")
    value = file.values.get(key)
    name = family or (word(value) if isinstance(value, str) else None)
    flavour = settings.trainer.model_flavour if settings else None
    try:
        found = registry.find(name, flavour) if name else None
    except UnknownFamily as error:
        near = f"; did you mean {error.nearest}?" if error.nearest else ""
        message = f"is {error.name}, which no family file describes{near}"
        findings.append(file.finding("unknown-family", message, key))
        return Checked(file.name, findings)
    if settings is None:
        return Checked(file.name, findings)
    if model_config is not None:
        of_class = registry.for_class_name(str(model_config.get("_class_name")), name)
        if found and of_class and of_class.family != found.family:
            raise UsageError(
                f"--model: {model_config['_class_name']} belongs to {of_class.family}, "
                f"not to {found.family}"
            )
        found = found or of_class
    if found is None:
        if plan is engine_plan:
            findings += engine_plan(settings, ANY_MODEL, make_report(settings, ANY_MODEL, {}))[1]
        return Checked(file.name, findings, notes=["no model_family: pass --family to see blocks"])
    counts, origin = _counts(found, flavour, model_config, blocks or {})
    missing = [
        stack.path
        for stack in found.stacks
        if not stack.optional and not any(stack.describes(path) for path in counts)
    ]
    if missing:
        message = (
            f"the number of blocks in {', '.join(missing)} is not known; "
            f"pass --model DIR or --blocks {missing[0]}=N"
        )
        findings.append(file.finding("unknown-blocks", message, severity="warning"))
    left_out = [(entry.path, entry.reason) for entry in found.left_out]
    report = make_report(settings, found, counts, left_out)
    report, said = plan(settings, found, report)
    findings += said
    if any(finding.severity == "error" for finding in findings):
        return Checked(file.name, findings)
    notes = [*([origin] if origin else []), *_notes(settings, report)]
    return Checked(file.name, findings, report, notes)


def _counts(
    family: Family,
    flavour: str | None,
    model_config: Mapping[str, Any] | None,
    blocks: Mapping[str, int],
) -> tuple[dict[str, int], str]:
    """Blocks per stack in execution order, and where the numbers come from, if there are any."""
    size = family.size(flavour)
    if model_config is not None:
        origin, known = "block counts from the model's config.json", family.counts(model_config)
    elif size is not None:
        origin, known = f"block counts of the published size {size}", family.counts_of_size(size)
    else:
        origin, known = "", {}
    if blocks:
        given = f"those of {', '.join(blocks)} as given"
        origin = f"{origin}; {given}" if origin else "block counts as given"
    known |= blocks
    unknown = [p for p in blocks if p != UNITS and not any(s.describes(p) for s in family.stacks)]
    if unknown:
        paths = ", ".join(stack.path for stack in family.stacks)
        raise UsageError(f"--blocks: {family.family} has no stack {min(unknown)}; it has {paths}")
    for path, count in known.items():
        if not 1 <= count <= MOST_BLOCKS:
            raise UsageError(f"{path} has {count} blocks; that must be 1 to {MOST_BLOCKS}")
    return known, origin


def _notes(settings: Settings, report: Report) -> list[str]:
    config = settings.checkpointing
    notes: list[str] = []
    if not settings.checkpointing.enabled:
        return notes
    if report.strategy == "segmented" and config.stride in (None, config.interval):
        notes.append(
            "wider segments save no time: each covered block is recomputed once either way; "
            "only kept blocks (stride > interval, keep_last) and kept operators (keep) do"
        )
    notes += [
        f"the interval of {config.interval} is more than the {stack.blocks} blocks of "
        f"{stack.path}: one segment, whose recompute holds all of them at once"
        for stack in report.stacks
        if stack.strategy == "segmented" and config.interval > stack.blocks
    ]
    return notes


def read_model_config(path: str) -> dict[str, Any]:
    """The ``config.json`` of a diffusers model or pipeline folder. Raises ``UsageError``."""
    for folder in (".", "transformer", "unet"):  # the latter two of a pipeline
        file = Path(path, folder, "config.json")
        try:
            config = json.loads(file.read_bytes())
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except (ValueError, RecursionError, OSError) as error:
            raise UsageError(f"--model: {file}: {reason_of(error)}") from None
        if not isinstance(config, dict):
            raise UsageError(f"--model: {file} holds no object")
        return config
    raise UsageError(f"--model: {path} holds no config.json, transformer/ or unet/ folder")
