"""``plan --buckets``: the data sets of a config, and what each bucket of them gets."""

import json

import pytest
from workloads import REGISTRY

from simpletuner_segckpt.commands import estimate, plan
from simpletuner_segckpt.config.settings import load_settings
from simpletuner_segckpt.estimator.workload.buckets import parse_buckets
from simpletuner_segckpt.estimator.workload.parse import Overrides

GIB = 1 << 30
WAN = {"model_family": "wan", "model_flavour": "t2v-480p-1.3b-2.1"}


def buckets(*sets, **overrides):
    config = load_settings(WAN | {"data_backend_config": list(sets)})
    found = parse_buckets(config, REGISTRY, Overrides(**overrides))
    works = [bucket.read.workload for bucket in found]
    return [
        (b.name, w.width, w.height, w.frames, round(b.share, 3))
        for b, w in zip(found, works, strict=True)
    ]


CLIPS = {"id": "clips", "dataset_type": "video", "resolution": 512, "video": {"num_frames": 49}}


def test_each_data_set_is_a_bucket():
    stills = {"id": "stills", "resolution": 1.0, "resolution_type": "area"}
    others = [
        {"id": "off", "resolution": 960, "disabled": True},
        {"id": "text", "dataset_type": "text_embeds"},
        {"id": "never", "resolution": 960, "probability": 0},
        {"id": "endless", "resolution": float("inf")},
    ]
    assert buckets(CLIPS, stills, *others) == [
        ("clips", 512, 512, 49, 0.5),
        ("stills", 1024, 1024, 1, 0.5),
    ]
    assert buckets(CLIPS | {"repeats": 2}, stills | {"probability": 0.5}) == [
        ("clips", 512, 512, 49, 0.857),
        ("stills", 1024, 1024, 1, 0.143),
    ]
    del CLIPS["video"]  # then SimpleTuner decides
    assert buckets(CLIPS)[0][3] == 81
    CLIPS["video"] = {"num_frames": 49}
    assert buckets(CLIPS, frames=5, width=64, height=64) == [("clips", 64, 64, 5, 1)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"resolution_type": "pixel"}, [(896, 512, 0.25), (512, 512, 0.75)]),
        ({"resolution_type": "pixel_area"}, [(704, 384, 0.25), (512, 512, 0.75)]),
        ({"crop": False}, [(512, 512, 1)]),
        ({"crop_aspect": "square"}, [(512, 512, 1)]),
        ({"crop_aspect_buckets": "wide"}, [(512, 512, 1)]),
        ({"crop_aspect_buckets": [0.5, "wide", -1]}, [(512, 1024, 1)]),
    ],
)
def test_aspects_that_a_data_set_is_cropped_to(given, expected):
    aspects = [1.78, {"aspect_bucket": 1, "weight": 3}]
    cropped = {"crop": True, "crop_aspect": "closest", "crop_aspect_buckets": aspects}
    found = buckets(CLIPS | cropped | given)
    assert [(width, height, share) for _, width, height, _, share in found] == expected


def test_what_is_assumed_of_data_sets_is_said():
    config = load_settings(WAN | {"data_backend_config": [CLIPS, {"id": "b", "resolution": "x"}]})
    (bucket,) = parse_buckets(config, REGISTRY)
    assert "square samples of clips, whose own aspects are not known" in bucket.read.assumed
    assert "nothing of the data set b, whose resolution is no number" in bucket.read.assumed
    (only,) = parse_buckets(load_settings(WAN | {"resolution": 256}), REGISTRY)
    assert (only.name, only.share, only.read.workload.width) == ("config", 1.0, 256)


@pytest.fixture
def config(tmp_path):
    """A config of the real width and four blocks, which trains on clips and stills."""
    family = REGISTRY.find("wan", "1.3b")
    model = family.config_of_size("1.3b") | {"num_layers": 4}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"_class_name": "WanTransformer3DModel"} | model)
    )
    sets = [CLIPS | {"id": "clips"}, {"id": "stills", "resolution": 256, "crop": True}]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(WAN | {"data_backend_config": sets}))
    return [str(path), "--model", str(tmp_path / "model")]


def test_what_each_bucket_gets(config, capsys):
    options = [*config, "--buckets", "--budget", "3GiB"]
    assert plan.main([*options, "--output-format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    clips, stills = found["buckets"]
    assert all(bucket["peak"] <= found["usable"] < 3 * GIB for bucket in (clips, stills))
    assert clips["keys"]["gradient_checkpointing_budget"] == "3 GiB"
    assert stills["plan"] == {"blocks": "0 1 2 3"}
    assert "[" in clips["plan"]["blocks"]
    assert found["seconds"] == pytest.approx((clips["seconds"] + stills["seconds"]) / 2)
    assert found["seconds"] < found["single"]["seconds"]
    assert stills["seconds"] < stills["single_seconds"]
    assert plan.main(options) == 0
    out = capsys.readouterr().out
    assert "512x512, 49 frames  2 [], 1 [a], 1 plain " in out
    assert "4 plain" in out
    assert 's with {"gradient_checkpointing_budget": "3 GiB"}' in out
    assert "the best single schedule that fits every bucket: " in out
    assert plan.main([*config, "--buckets", "--budget", "2GiB"]) == 1
    assert "over the mix: not every bucket fits within the budget" in capsys.readouterr().out


def test_keys_for_one_workload_are_not_written_for_all(config, capsys):
    assert plan.main([*config, "--buckets", "--budget", "4GiB", "--write"]) == 2
    assert "--write is for the keys of one workload; leave out --buckets" in capsys.readouterr().err


def test_what_a_plan_for_each_block_gains(config, capsys):
    options = [*config, "--resolution", "512", "--frames", "49", "--budget"]

    def planned(budget):
        assert plan.main([*options, budget, "--output-format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    found = planned("3GiB")
    within = found["within"]
    assert within["keys"] == {"gradient_checkpointing_budget": "3 GiB"}
    assert within["seconds"] <= 0.98 * found["found"]["seconds"]
    assert within["peak"] <= found["usable"]
    assert 0 < within["recomputed_share"] < 1 < within["against_none"]
    assert planned("4GiB")["within"] is None
    assert plan.main([*options, "3GiB"]) == 0
    out = capsys.readouterr().out
    assert "a plan for each block takes 2.2% less time; the way to have it:" in out
    assert f"  blocks: {within['plan']['blocks']}\n  recomputed in brackets; kept there: a " in out


def test_a_budget_in_the_config_is_estimated(tmp_path, config, capsys):
    path = tmp_path / "budget.json"
    path.write_text(json.dumps(WAN | {"gradient_checkpointing_budget": "3GiB"}))
    options = [str(path), *config[1:], "--resolution", "512", "--frames", "49", "--modes", "layer"]
    assert estimate.main([*options, "--output-format", "json"]) == 0
    own, layer = json.loads(capsys.readouterr().out)["modes"]
    assert own["keys"] == {"gradient_checkpointing_budget": "3 GiB"}
    assert own["recomputed_share"] < layer["recomputed_share"]
    assert estimate.main([*options, "--trace"]) == 0
    assert "config: a plan within a budget is not traced" in capsys.readouterr().out
    assert estimate.main(options) == 0
    assert f"config: blocks: {own['plan']['blocks']}\n" in capsys.readouterr().out
    assert "plan" not in layer
    path.write_text(json.dumps(WAN | {"gradient_checkpointing_budget": "1GiB"}))
    assert estimate.main(options) == 0
    assert "note: config: nothing fits within 1 GiB, of which" in capsys.readouterr().out
