"""The results of a bench beside what the estimator says of the same model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.settings import load_settings
from ..costs.records import GIB
from ..estimator.predict.modes import predict_mode
from ..estimator.profile.profile import profile
from ..estimator.workload.workload import Workload
from ..families.registry import FamilyRegistry
from ..messages.errors import WorkloadError
from .runner import read_results


def table_of(path: Path, registry: FamilyRegistry) -> str:
    """Markdown: each measured mode with its peak, the predicted one and the error.

    Raises ``WorkloadError`` for a file that holds no results, or those of a tiny model.
    """
    identity, cells = read_results(path)
    if identity is None:
        raise WorkloadError(f"{path} holds no results of segckpt bench")
    work = _workload(identity["workload"], registry, path)
    settings = load_settings(identity["config"])
    measured = profile(work)
    lines = [
        f"## {path}",
        "",
        f"{work.family.title}, {work.width}x{work.height} pixels, {work.frames} frames, batch "
        f"{work.batch}, on {identity['device']}, torch {identity['torch']}.",
        "",
        "| mode | measured GiB | predicted GiB | error |",
        "| --- | ---: | ---: | ---: |",
    ]
    for cell in cells.values():
        made = predict_mode(measured, work.family, settings, cell.mode, cell.keys)
        if cell.measured and made.step is not None:
            predicted = made.step.peak / GIB
            error = predicted / cell.gib - 1
            lines.append(
                f"| {cell.mode} | {cell.gib:.2f} | {predicted:.2f} | {100 * error:+.1f}% |"
            )
        else:
            lines.append(f"| {cell.mode} | {cell.status} | | |")
    return "\n".join([*lines, ""])


def _workload(entries: Mapping[str, Any], registry: FamilyRegistry, path: Path) -> Workload:
    """The workload of a bench's first line."""
    if entries.get("tiny"):
        raise WorkloadError(f"{path} holds the figures of a tiny model, which are not predicted")
    values = {key: value for key, value in entries.items() if key not in ("family", "tiny")}
    fitting = [f for f in registry.named(entries["family"]) if values["model_class"] in f.classes]
    try:
        return Workload(fitting[0], **values)
    except (IndexError, TypeError) as error:
        raise WorkloadError(
            f"{path}: written by another version of this package ({error})"
        ) from None
