"""Every pair of keys, and every key beside what forces per-block: none of them may do nothing in
silence."""

import itertools
import json

import pytest
from training import REGISTRY

from simpletuner_segckpt.commands.printing import report_document
from simpletuner_segckpt.config.file import parse_config
from simpletuner_segckpt.schedules.checked_file import check_file

P = "gradient_checkpointing"
VALUES = [
    (f"{P}_interval", 2),
    (f"{P}_segment_stride", 4),
    (f"{P}_segment_stride", 40),
    (f"{P}_keep_last", 1),
    (f"{P}_keep_last", 2),
    (f"{P}_keep_last", 99),
    (f"{P}_backend", "unsloth"),
    (f"{P}_backend", "torch-ffn"),
    (f"{P}_backend", "unsloth-ffn"),
    (f"{P}_keep", "attention"),
    (f"{P}_keep", ["ffn"]),
    (f"{P}_offload_attention", True),
    (f"{P}_offload_prefetch", True),
    (f"{P}_offload_pin_memory_max_buckets", 3),
    (f"{P}_budget", "90%"),
    (P, False),
    ("musubi_blocks_to_swap", 4),
    ("crepa_enabled", True),
    ("enable_group_offload", True),
    ("activation_memory_budget", 0.5),
]
# What is said of conditions is not a finding: the report has it, `because of ...`.
TOLD_BY_THE_REPORT = {"musubi_blocks_to_swap", "crepa_enabled", "enable_group_offload", P}


def checked(config):
    return check_file(parse_config(json.dumps(config).encode(), "config.json"), REGISTRY)


def plan(config, key):
    """What becomes of every block, and for the keys about buffers whether they have anything."""
    report = checked(config).report
    if report is None:  # refused without the key
        return None
    told = report_document(report)
    stacks = told["stacks"]
    planned = [{k: v for k, v in s.items() if k not in ("strategy", "reason")} for s in stacks]
    if key in (f"{P}_offload_prefetch", f"{P}_offload_pin_memory_max_buckets"):
        return [key in config and (s["inputs_on_cpu"] or s["offloaded"] != []) for s in planned]
    return planned, told["budget"]


@pytest.mark.parametrize("family", ["flux", "hidream", "sd1x"])
def test_a_key_that_changes_nothing_is_named(family):
    for pair in itertools.combinations(VALUES, 2):
        config = dict(pair) | {"model_family": family}
        result = checked(config)
        told = {finding.key: finding for finding in result.findings}
        assert all(f.code != "SEG304" or f.severity == "warning" for f in result.findings)
        if result.exit_code:
            continue
        conditions = {condition.name for condition in result.report.conditions}
        for key in config.keys() - {"model_family"}:
            fewer = {k: v for k, v in config.items() if k != key}
            without = plan(fewer, key)
            same = without == plan(config, key)
            if key in conditions:
                assert key in TOLD_BY_THE_REPORT
            elif key == "activation_memory_budget":
                assert (key in told) == (config.get(P) is not False)
            elif (family, key) != ("sd1x", f"{P}_keep"):  # units: not known before they run
                assert not same or key in told, (config, key)
            if key in told and told[key].code == "SEG304" and without is not None:
                assert same, (config, key)


@pytest.mark.parametrize(
    ("config", "key", "said"),
    [
        (
            {f"{P}_backend": "torch-ffn", f"{P}_interval": 2},
            f"{P}_interval",
            "SEG304 warning: `gradient_checkpointing_interval` has no effect: the same blocks are "
            "recomputed either way, one by one (torch-ffn recomputes each feed-forward by itself); "
            "only a gradient_checkpointing_segment_stride above it leaves blocks out",
        ),
        (
            {"model_family": "wan", f"{P}_backend": "unsloth", f"{P}_keep_last": 99},
            f"{P}_backend",
            "SEG304 warning: `gradient_checkpointing_backend` has no effect: no block is "
            "recomputed, since gradient_checkpointing_keep_last keeps all that could be",
        ),
        (
            {"fsdp_enable": True, "fsdp_activation_checkpointing": True, f"{P}_interval": 2},
            f"{P}_interval",
            "has no effect: fsdp_activation_checkpointing: FSDP recomputes the blocks itself",
        ),
        (
            {"model_family": "flux", f"{P}_backend": "torch-ffn", f"{P}_keep_last": 38},
            f"{P}_keep_last",
            "has no effect: the last 38 blocks run normally in any case",
        ),
        (
            {"model_family": "wan", f"{P}_interval": 30, f"{P}_segment_stride": 31},
            f"{P}_segment_stride",
            "has no effect: no block that could be recomputed stands beyond the first 30",
        ),
        (
            {"activation_memory_budget": 0.5},
            "activation_memory_budget",
            "SEG402 warning: `activation_memory_budget` is 0.5: torch.compile recomputes by it",
        ),
        (
            {
                "enable_group_offload": True,
                "group_offload_blocks_per_group": 2,
                f"{P}_segment_stride": 4,
                f"{P}_interval": 4,
            },
            "group_offload_blocks_per_group",
            "SEG402 error: `group_offload_blocks_per_group` is 2: group offloading moves 2 blocks",
        ),
        (
            {
                "enable_group_offload": True,
                "group_offload_type": "leaf_level",
                "group_offload_blocks_per_group": 2,
                f"{P}_segment_stride": 4,
                f"{P}_interval": 2,
            },
            "enable_group_offload",
            "SEG402 error: `enable_group_offload` is on: group offloading takes the weights away "
            "that the backward of some blocks needs, since they are not recomputed as a whole",
        ),
    ],
)
def test_what_is_said(config, key, said):
    [finding] = [f for f in checked(config).findings if f.key == key]
    assert said in str(finding)


@pytest.mark.parametrize("family", [None, "wan", "z_image"])
@pytest.mark.parametrize(
    "config",
    [
        {f"{P}_interval": 2, f"{P}_segment_stride": 4, f"{P}_keep_last": 2},
        {f"{P}_interval": 2, f"{P}_offload_attention": True, f"{P}_keep_last": 1},
        {f"{P}_backend": "unsloth", f"{P}_keep_last": 3, f"{P}_offload_prefetch": True},
        {f"{P}_interval": 2, "enable_group_offload": True, "group_offload_type": "leaf_level"},
        {"enable_group_offload": True},
        {"activation_memory_budget": 1},
    ],
)
def test_what_does_something_is_right(config, family):
    """Also where nobody knows how many blocks there are."""
    assert checked(config | ({"model_family": family} if family else {})).findings == []


def test_group_offloading_by_blocks_is_a_condition():
    config = {"model_family": "wan", f"{P}_interval": 2, "enable_group_offload": True}
    result = checked(config)
    assert result.report.strategy == "per-block"
    assert [condition.name for condition in result.report.conditions] == ["enable_group_offload"]
