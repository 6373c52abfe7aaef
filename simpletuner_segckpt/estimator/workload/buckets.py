"""The sizes of samples that a trainer's data sets are sorted into, each a workload of its own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...config.settings import Settings, read_keys
from ...config_schema import TrainingKeys
from ...families.registry import FamilyRegistry
from .parse import Overrides, ParsedWorkload, data_sets, edge_of, parse_workload, side_of


@dataclass(frozen=True)
class Bucket:
    """Samples of one size. name: of their data set. share: of the steps that are of them."""

    name: str
    share: float
    read: ParsedWorkload

    @property
    def size(self) -> str:
        """For example ``832x480, 81 frames``."""
        work = self.read.workload
        return f"{work.width}x{work.height}" + (
            f", {work.frames} frames" if work.frames > 1 else ""
        )


def parse_buckets(
    settings: Settings, registry: FamilyRegistry, overrides: Overrides = Overrides()
) -> list[Bucket]:
    """The buckets of all data sets of a config; the workload of a config without any is one.

    A data set counts as often as its ``probability`` and ``repeats`` say, since how large it is is
    not known. Raises what ``parse_workload`` does.
    """
    keys = read_keys(TrainingKeys, settings.file)
    assumed: list[str] = []
    sizes: dict[tuple[str, int, int, int | None], float] = {}
    for number, entry in enumerate(data_sets(keys, Path(settings.file.name).parent, assumed)):
        name = str(entry.get("id", number))
        often = _number(entry, "probability", 1) * (_number(entry, "repeats", 0) + 1)
        for width, height, part in _aspects(entry, name, assumed):
            size = name, width, height, _frames(entry)
            if often * part:
                sizes[size] = sizes.get(size, 0) + often * part
    if not sizes:
        return [Bucket("config", 1.0, parse_workload(settings, registry, overrides))]
    total = sum(sizes.values())
    found = []
    for (name, width, height, frames), often in sizes.items():
        sample = replace(
            overrides,
            width=overrides.width or width,
            height=overrides.height or height,
            frames=overrides.frames or frames,
        )
        read = parse_workload(settings, registry, sample)
        found.append(Bucket(name, often / total, replace(read, assumed=[*read.assumed, *assumed])))
    return found


def _aspects(
    entry: Mapping[str, Any], name: str, assumed: list[str]
) -> Iterator[tuple[int, int, float]]:
    """Width and height in pixels of what a data set is cropped to, and the share of each."""
    kind = entry.get("resolution_type", "pixel")
    try:
        side = side_of(float(entry["resolution"]), kind)
    except (TypeError, ValueError, OverflowError):
        assumed.append(f"nothing of the data set {name}, whose resolution is no number")
        return
    aspects = _cropped_to(entry)
    if not aspects:
        if not entry.get("crop") or entry.get("crop_aspect") == "preserve":
            assumed.append(f"square samples of {name}, whose own aspects are not known")
        aspects = {1.0: 1.0}
    for aspect, weight in aspects.items():
        stretch = max(aspect, 1 / aspect) if kind == "pixel" else 1.0  # the shorter edge is given
        width = edge_of(side * (aspect * stretch) ** 0.5)
        height = edge_of(side * (stretch / aspect) ** 0.5)
        yield width, height, weight / sum(aspects.values())


def _cropped_to(entry: Mapping[str, Any]) -> dict[float, float]:
    """Aspects, width by height, and their weights, where a data set names any."""
    given = entry.get("crop_aspect_buckets")
    if not entry.get("crop") or entry.get("crop_aspect") not in ("closest", "random"):
        return {}
    found: dict[float, float] = {}
    for bucket in given if isinstance(given, list) else ():
        weight = 1.0
        if isinstance(bucket, dict):
            weight = _number(bucket, "weight", 1)
            bucket = bucket.get("aspect_bucket")
        if isinstance(bucket, int | float) and 0.1 < bucket < 10 and weight > 0:
            found[float(bucket)] = found.get(float(bucket), 0) + weight
    return found


def _frames(entry: Mapping[str, Any]) -> int | None:
    """Frames of a sample; None where the data set leaves them to the trainer."""
    video = entry.get("video")
    if isinstance(video, dict) and "num_frames" in video:
        return max(1, int(_number(video, "num_frames", 1)))
    return None if entry.get("dataset_type") == "video" else 1


def _number(entry: Mapping[str, Any], key: str, default: float) -> float:
    """What ``entry`` holds at ``key``, where that is a number from 0 on."""
    value = entry.get(key, default)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e9 else default
