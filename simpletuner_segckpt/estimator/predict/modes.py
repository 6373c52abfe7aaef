"""The schedules that are compared: by name, as keys of a config."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...config.settings import Settings
from ...config_schema import PREFIX, CheckpointingConfig
from ...costs.cards import DEFAULT_CARD, Card, card
from ...costs.records import GIB
from ...families.schema import Family
from ...schedules.problems import problems
from ...schedules.report import UNITS, Report, make_report
from ..profile.records import Profile
from .peak import Composed, compose, spans_of
from .usable import in_bytes, margin_beside, usable
from .within import drawn, within

OWN = "config"  # the name of the mode that a config itself asks for


# Keys without the prefix. The published sweep has the names `none`, `layer`, `interval2` and
# `seg2-stride4`, and those with unsloth; see `published.SAME_AS` for its others.
MODES: Mapping[str, Mapping[str, Any]] = {
    "none": {"": False},
    "layer": {},
    "interval2": {"interval": 2},
    "interval4": {"interval": 4},
    "seg2-stride4": {"interval": 2, "segment_stride": 4},
    "layer+keep-last1": {"keep_last": 1},
    "layer+keep-attention": {"keep": ["attention"]},
    "layer+keep-attentions": {"keep": ["attention", "cross-attention"]},
    "layer+keep-both": {"keep": ["attention", "ffn"]},
    "layer+unsloth": {"backend": "unsloth"},
    "seg2-stride4+unsloth": {"interval": 2, "segment_stride": 4, "backend": "unsloth"},
    "torch-ffn": {"backend": "torch-ffn"},
    "torch-ffn+offload": {"backend": "torch-ffn", "offload_attention": True},
    "unsloth-ffn": {"backend": "unsloth-ffn"},
    "seg2-stride4+offload": {"interval": 2, "segment_stride": 4, "offload_attention": True},
}


NOTHING_FITS = (
    "nothing fits within {}, of which the peak may reach {:.2f} GiB: every block is recomputed"
)


def keys_of(mode: str) -> dict[str, Any]:
    """The keys of a mode as they stand in a config."""
    return {f"{PREFIX}_{key}".rstrip("_"): value for key, value in MODES[mode].items()}


def settings_with(settings: Settings, keys: Mapping[str, Any]) -> Settings:
    """``settings`` with these checkpointing keys; the trainer's other keys stay."""
    return replace(settings, checkpointing=CheckpointingConfig.model_validate(dict(keys)))


def planned(profile: Profile, family: Family, settings: Settings) -> Report:
    """The schedule of every stack of a measured model.

    Of units it is known here what they keep, since they have run.
    """
    report = make_report(settings, family, profile.counts)
    kept = settings.checkpointing.keep
    stacks = (
        replace(stack, schedule=stack.schedule.keeping(kept)) if stack.path == UNITS else stack
        for stack in report.stacks
    )
    return replace(report, stacks=tuple(stacks))


def refused(settings: Settings, family: Family, report: Report) -> str:
    """Why ``apply`` would not install a report; empty where it would."""
    found = problems(settings, family, family.title, report)
    return next((finding.message for finding in found if finding.severity == "error"), "")


@dataclass(frozen=True)
class ModePrediction:
    """A mode that was composed, or why it cannot be carried out."""

    mode: str
    keys: Mapping[str, Any]
    report: Report
    step: Composed | None
    impossible: str = ""
    remark: str = ""

    @property
    def plan(self) -> dict[str, str]:
        """By the path of a stack, the plan for each block of it, where a budget makes that."""
        if self.step is None or self.report.budget is None:
            return {}
        return drawn(self.report)


def predict_mode(
    profile: Profile,
    family: Family,
    settings: Settings,
    mode: str,
    keys: Mapping[str, Any],
    on: Card | None = None,
) -> ModePrediction:
    """One mode on a measured model, under the conditions that the trainer's config brings.

    on: the card that a budget is of, and on which its plan is the fastest.
    """
    changed = settings_with(settings, keys)
    report = planned(profile, family, changed)
    if reason := refused(changed, family, report):
        return ModePrediction(mode, keys, report, None, reason)
    if report.budget is None:
        step = compose(profile, spans_of(profile, report.stacks))
        return ModePrediction(mode, keys, report, step)
    total = in_bytes(report.budget, on)
    if total is None:
        said = f"the budget is {report.budget} of a device, and none is named"
        return ModePrediction(mode, keys, report, None, said)
    reach = usable(total, margin_beside(report.budget))
    found = within(profile, report, reach, on or card(DEFAULT_CARD))
    remark = "" if found.fits else NOTHING_FITS.format(report.budget, reach / GIB)
    return ModePrediction(mode, keys, found.report, found.step, remark=remark)
