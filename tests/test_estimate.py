"""``segckpt estimate``, ``plan`` and ``compare``: configs in, right values and sentences out."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import median

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from simpletuner_segckpt.config_schema import OWN_KEYS
from workloads import REGISTRY, workload

from simpletuner_segckpt.commands import compare, estimate, plan
from simpletuner_segckpt.config.settings import load_settings
from simpletuner_segckpt.costs.cards import card, cards
from simpletuner_segckpt.estimator.predict.modes import MODES, keys_of
from simpletuner_segckpt.estimator.predict.search import Search
from simpletuner_segckpt.estimator.profile.fake_tensors import without_memory
from simpletuner_segckpt.estimator.profile.profile import profile, trained_bytes
from simpletuner_segckpt.estimator.workload.build import build
from simpletuner_segckpt.estimator.workload.optimizers import optimizers
from simpletuner_segckpt.estimator.workload.parse import LOKR, Overrides, parse_workload
from simpletuner_segckpt.messages.errors import ConfigError, UnknownFamily, WorkloadError

GIB = 1 << 30
WAN = {"model_family": "wan", "model_flavour": "t2v-480p-1.3b-2.1"}
SMALL = ["--resolution", "64", "--frames", "5"]


def read(config, **overrides):
    return parse_workload(load_settings(config), REGISTRY, Overrides(**overrides))


def written(folder, config, name="config.json"):
    path = folder / name
    path.write_text(json.dumps(config), "utf-8")
    return str(path)


# -- what a config says -----------------------------------------------------------------------


def test_what_a_config_leaves_open_is_assumed_and_said():
    found = read(WAN)
    work = found.workload
    assert (work.width, work.height, work.frames, work.batch) == (832, 480, 81, 1)
    assert (work.adapter, work.rank, work.dropout, work.optimizer_bytes) == ("lora", 16, 0.1, 6)
    assert work.config["num_layers"] == 30
    said = "\n".join(found.assumed)
    for word in ("train_batch_size", "resolution", "num_frames", "lora_rank", "optimizer"):
        assert word in said


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"--train_batch_size": "4"}, {"batch": 4}),
        ({"resolution": 512}, {"width": 512, "height": 512}),
        ({"resolution": "1.0", "resolution_type": "area"}, {"width": 1024, "height": 1024}),
        ({"resolution": 500, "resolution_type": "pixel"}, {"width": 512, "height": 512}),
        ({"num_frames": 33}, {"frames": 33}),
        ({"lora_rank": 64, "lora_dropout": 0}, {"rank": 64, "dropout": 0.0}),
        ({"model_type": "full"}, {"adapter": "full"}),
        ({"mixed_precision": "no"}, {"dtype": "float32", "autocast": False}),
        ({"optimizer": "adamw"}, {"optimizer_bytes": 4, "stepping": 1}),
        ({"optimizer": "adamw", "mixed_precision": "no"}, {"optimizer_bytes": 8}),
        ({"optimizer": "bnb-adamw8bit"}, {"optimizer_bytes": 2, "stepping": 0}),
        ({"base_model_precision": "int8-sdnq"}, {"base_bytes": 1.0}),
        ({"base_model_precision": "nf4-bnb"}, {"base_bytes": 0.5}),
        ({"ramtorch": True}, {"weights_on_cpu": True}),
        ({"use_ema": "true", "gradient_accumulation_steps": 2}, {"ema": True, "accumulates": True}),
        ({"peft_lora_target_modules": '["to_q"]'}, {"targets": ("to_q",)}),
        ({"lora_type": "lycoris"}, {"adapter": "lycoris", "lycoris": LOKR}),
    ],
)
def test_what_a_config_says(config, expected):
    work = read(WAN | config).workload
    assert {name: getattr(work, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_flavour": "9b"}, "size 1.3b (model_flavour 9b is not known)"),
        ({"num_frames": 80}, "77 frames, since its VAE takes no 80"),
        ({"data_backend_config": "no.json"}, "whose file no.json cannot be read: No such file"),
        ({"peft_lora_target_modules": "all-linear"}, "whose file all-linear cannot be read"),
        ({"peft_lora_target_modules": {"a": 1}}, "peft_lora_target_modules holds no list"),
        ({"lora_type": "lycoris", "lycoris_config": [1]}, "lycoris_config holds no object"),
        ({"optimizer": "sophia"}, "optimizer sophia is not known"),
    ],
)
def test_what_is_not_understood_is_said(config, said):
    assert said in "\n".join(read(WAN | config).assumed)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"musubi_blocks_to_swap": 4}, "the weights of swapped blocks are counted"),
        ({"controlnet": True}, "not the ControlNet that is trained"),
        ({"mixed_precision": "fp16"}, "fp16 is taken as bf16"),
        ({"base_model_precision": "int8-sdnq"}, "its scales and workspaces"),
        ({"dynamo_backend": "inductor"}, "compiled blocks save other tensors"),
    ],
)
def test_what_is_not_modelled_is_said(config, said):
    assert said in "\n".join(read(WAN | config).ignored)


def test_options_come_before_the_config():
    work = read(WAN | {"resolution": 512, "lora_rank": 8}, width=832, height=480, rank=4).workload
    assert (work.width, work.height, work.rank) == (832, 480, 4)


def test_data_sets_and_adapters_in_files_of_their_own(tmp_path):
    (tmp_path / "data.json").write_text(
        json.dumps(
            [
                {"id": "text", "dataset_type": "text_embeds"},
                {"id": "a", "resolution": 480, "video": {"num_frames": 49}},
                {"id": "off", "resolution": 960, "disabled": True},
                {"id": "eval", "resolution": 960, "dataset_type": "eval"},
                {"id": "endless", "resolution": float("inf")},
                {"id": "b", "resolution": 256, "video": {"num_frames": 121}},
            ]
        )
    )
    (tmp_path / "lycoris.json").write_text('{"algo": "lokr", "factor": 4}')
    config = {
        "data_backend_config": "data.json",
        "lora_type": "lycoris",
        "lycoris_config": "lycoris.json",
    }
    work = read(written(tmp_path, WAN | config)).workload
    assert (work.width, work.frames) == (512, 49)  # the largest, to a multiple of 64
    assert work.lycoris == {"algo": "lokr", "factor": 4}


def test_a_folder_with_the_model(tmp_path):
    folder = tmp_path / "model" / "transformer"
    folder.mkdir(parents=True)
    tiny = workload("sd3").family.tiny[0].config
    config = {"_class_name": "SD3Transformer2DModel", "_diffusers_version": "0.42.1", **tiny}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"a": torch.zeros(8, 8, dtype=torch.float8_e4m3fn), "b": torch.zeros(8)}
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    path = written(tmp_path, {"pretrained_model_name_or_path": "model"})
    work = read(path).workload
    assert (work.family.family, work.config["num_layers"], work.base_bytes) == ("sd3", 5, 1.0)
    (folder / "diffusion_pytorch_model.safetensors").write_bytes(b"nothing of that kind")
    with pytest.raises(WorkloadError, match="not a safetensors file"):
        read(path)


@pytest.mark.parametrize(
    ("config", "overrides", "error", "said"),
    [
        ({}, {}, WorkloadError, "no model_family"),
        ({"model_family": "wann"}, {}, UnknownFamily, "did you mean `wan`"),
        ({"model_family": "heartmula"}, {}, WorkloadError, "--model DIR|\\[training\\]"),
        (WAN, {"size": "2b"}, WorkloadError, "has the sizes 1.3b, 14b"),
        (WAN, {"model": "nowhere"}, WorkloadError, "nowhere holds no config.json"),
        (WAN | {"train_batch_size": 0}, {}, ConfigError, "train_batch_size.*1 or more"),
        (WAN | {"lora_rank": "many"}, {}, ConfigError, 'lora_rank.*"many"'),
        (WAN | {"resolution": "big"}, {}, ConfigError, "resolution"),
        (WAN | {"mixed_precision": "foo"}, {}, ConfigError, "write one of no, bf16, fp16, fp8"),
        (WAN | {"lora_type": "dora"}, {}, ConfigError, "write one of standard, lycoris"),
    ],
)
def test_what_cannot_be_read(config, overrides, error, said):
    with pytest.raises(error, match=said):
        read(config, **overrides)


def test_targets_that_are_not_there():
    with pytest.raises(WorkloadError, match="no linear layer of the model is called to_x"):
        profile(read(WAN | {"peft_lora_target_modules": ["to_x"]}).workload)


def test_an_adapter_that_fits_nothing():
    lycoris = {"algo": "lokr", "apply_preset": {"target_module": ["NoSuchClass"]}}
    config = WAN | {"lora_type": "lycoris", "lycoris_config": lycoris}
    with pytest.raises(WorkloadError, match="fits no layer"):
        profile(read(config).workload)


def test_a_preset_of_lycoris_is_for_one_model():
    def trained(preset):
        lycoris = {"algo": "lokr", "linear_dim": 10_000, "factor": 2, "apply_preset": preset}
        work = read(WAN | {"lora_type": "lycoris", "lycoris_config": lycoris}).workload
        with without_memory():
            return trained_bytes([build(work)])

    plain = {"target_module": ["WanAttention"]}
    first = trained(plain)
    factors = {"module_algo_map": {"WanAttention": {"factor": 16}}}
    assert trained(plain | factors) < first
    assert trained(plain) == first


# -- estimate ---------------------------------------------------------------------------------


def test_estimates_as_records():
    found = estimate.estimate_config(
        WAN | keys_of("interval2"),
        registry=REGISTRY,
        overrides=Overrides(width=64, height=64, frames=5),
        on=card("h100"),
    )
    by_mode = {row.estimate.mode: row for row in found.rows}
    assert list(by_mode) == ["config", *MODES]
    assert by_mode["config"].estimate.step == by_mode["interval2"].estimate.step
    assert by_mode["none"].against_none == 1
    assert by_mode["none"].estimate.step.recomputed_share == 0
    assert 0.95 < by_mode["layer"].estimate.step.recomputed_share <= 1
    assert by_mode["layer"].time.launch_bound  # 16 tokens
    assert by_mode["layer"].against_none > by_mode["seg2-stride4"].against_none > 1


def test_the_command_says_what_it_rests_on(tmp_path, capsys):
    path = written(tmp_path, WAN | {"dynamo_backend": "inductor"})
    assert estimate.main([path, *SMALL, "--modes", "none,layer", "--gpu", "l40s"]) == 0
    out = capsys.readouterr().out
    assert "Wan 2.1 / 2.2 1.3b: 64x64 pixels, 5 frames, batch 1, LoRA of rank 16" in out
    rows_of_table = [line.split()[0] for line in out.splitlines()[2:5]]
    assert rows_of_table == ["config", "none", "layer"]
    assert "assumed: optimizer adamw_bf16" in out
    assert "not modelled: dynamo_backend inductor" in out
    assert "times of all modes come from the number of kernels, not from FLOPs" in out
    assert "not measurements" in out


def test_the_command_for_machines(tmp_path, capsys):
    path = written(tmp_path, WAN)
    options = [path, *SMALL, "--modes", "", "--output-format", "json", "--trace", "layer"]
    assert estimate.main(options) == 0
    document = json.loads(capsys.readouterr().out)
    own, layer = document["modes"]
    assert own["mode"] == "config"
    assert layer["peak"] == own["peak"] == pytest.approx(layer["traced"], rel=0.005)
    parts = ("weights", "gradients", "states", "kept", "working")
    assert sum(layer[part] for part in parts) == layer["peak"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing.json"], 2, "missing.json: SEG001"),
        (["CONFIG", "--modes", "layers"], 2, "did you mean layer?"),
        (["CONFIG", "--gpu", "h10"], 2, "did you mean h100?"),
        (["CONFIG", "--family", "flx"], 2, "did you mean `flux`?"),
        (["CONFIG", "--size", "9b"], 2, "has the sizes"),
        (["BROKEN"], 1, "gradient_checkpointing_interval"),
        (["CONFIG", "--resolution", "1"], 2, "does not take these settings"),
        (["TWICE"], 1, "`--lora_rank` is also given as `lora_rank`"),
    ],
)
def test_what_estimate_refuses(tmp_path, capsys, arguments, code, said):
    files = {
        "CONFIG": written(tmp_path, WAN),
        "TWICE": written(tmp_path, WAN | {"lora_rank": 4, "--lora_rank": 8}, "twice.json"),
        "BROKEN": written(tmp_path, WAN | {"gradient_checkpointing_interval": 0}, "broken.json"),
    }
    assert estimate.main([files.get(a, a) for a in arguments]) == code
    captured = capsys.readouterr()
    first, *rest = (captured.out + captured.err).strip().splitlines()
    assert said in first
    assert rest in ([], ["1 error, 0 warnings"])


def test_a_class_that_the_installed_diffusers_lacks():
    family = REGISTRY.find("wan").model_copy(
        update={"classes": ("diffusers.GoneTransformer3DModel",), "since": "999.0"}
    )
    work = replace(workload("wan"), family=family, model_class=family.classes[0])
    with pytest.raises(WorkloadError) as refused:
        profile(work)
    assert str(refused.value) == (
        f"{family.title} cannot be built: diffusers {diffusers.__version__} has no "
        "GoneTransformer3DModel, which came with 999.0"
    )


def test_a_condition_is_heeded_and_said(tmp_path, capsys):
    path = written(tmp_path, WAN | {"musubi_blocks_to_swap": 4} | keys_of("interval2"))
    assert estimate.main([path, *SMALL, "--modes", "layer"]) == 0
    out = capsys.readouterr().out
    own, layer = (line.split()[1:] for line in out.splitlines()[2:4])
    assert own == layer  # per block, with the same coverage
    assert "musubi_blocks_to_swap" in out


def test_data_files():
    assert cards()["h100"].memory < 80
    assert all(c.flops > 1e13 < 100 * c.bandwidth for c in cards().values())
    assert optimizers()["adamw_bf16"].states == 3


# -- plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flavour", "layers", "config"),
    [
        ("lumina2", None, {"num_layers": 5}, {}),
        ("wan", "1.3b", {"num_layers": 4}, {"musubi_blocks_to_swap": 2}),  # one by one
    ],
    ids=["segments", "per-block"],
)
def test_the_search_is_exact(name, flavour, layers, config):
    """Against all candidates, composed one by one."""
    work = workload(name, flavour, width=256, height=256, config=layers)
    search = Search(profile(work), work.family, load_settings(config), card("h100"))
    everything = [search.compose(candidate) for candidate in search.candidates]
    for candidate, found in zip(search.candidates, everything, strict=True):
        assert found.seconds == pytest.approx(candidate.seconds, rel=1e-9)
        assert candidate.bound <= found.step.peak
    peaks = sorted(found.step.peak for found in everything)
    for budget in (peaks[0], peaks[len(peaks) // 3], peaks[len(peaks) // 2], peaks[-1]):
        fitting = [found for found in everything if found.step.peak <= budget]
        best = search.fastest(budget)
        assert best.step.peak <= budget
        assert best.seconds == pytest.approx(min(found.seconds for found in fitting), rel=1e-9)
    assert search.fastest(peaks[0] - 1) is None
    assert search.smallest().step.peak == peaks[0]
    limit = median(found.seconds for found in everything)
    below = [found.step.peak for found in everything if found.seconds < limit]
    assert search.smallest(faster_than=limit).step.peak == min(below)


def test_nothing_fits(tmp_path, capsys):
    path = written(tmp_path, WAN)
    assert plan.main([path, "--budget", "3GiB"]) == 1
    out = capsys.readouterr().out
    assert "nothing fits; the least that the keys can reach: peak" in out
    assert "the working set of a block: " in out
    assert "lora_dropout 0 saves its masks" in out
    assert "a lower resolution, or fewer frames" in out


TOML = """# mine
model_family = "wan"  # the video model
model_flavour = "t2v-480p-1.3b-2.1"
gradient_checkpointing_interval = 2
gradient_checkpointing_segment_stride = 4
learning_rate = 1e-4   # keep

[tracker]
name = "runs"
"""


def test_keys_are_written_and_nothing_else(tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text(TOML)
    assert plan.main([str(path), *SMALL, "--budget", "4GiB", "--write"]) == 0
    captured = capsys.readouterr()
    assert f"saved as {path}.bak" in captured.err
    assert Path(f"{path}.bak").read_text() == TOML
    ours = re.compile("^gradient_checkpointing.*\n", re.MULTILINE)
    assert ours.sub("", path.read_text()) == ours.sub("", TOML)
    keys = json.loads(re.search(r"^\{$.*^\}$", captured.out, re.MULTILINE | re.DOTALL)[0])
    settings = load_settings(path).checkpointing.model_dump(by_alias=True)
    assert settings.items() >= {k: v for k, v in keys.items() if not isinstance(v, list)}.items()
    again = path.read_bytes()
    assert plan.main([str(path), *SMALL, "--budget", "4GiB", "--write"]) == 0
    assert path.read_bytes() == again
    assert "has these keys already" in capsys.readouterr().err


def test_what_is_planned_is_what_is_estimated(tmp_path, capsys):
    path = written(tmp_path, WAN)
    options = [*SMALL, "--output-format", "json"]
    assert plan.main([path, *options, "--budget", "3.55GiB", "--write"]) == 0
    captured = capsys.readouterr()
    planned = json.loads(captured.out)["found"]
    own = [key for key in OWN_KEYS if key in planned["keys"]]
    assert own
    assert f"{', '.join(own)}: not known to SimpleTuner" in captured.err
    assert estimate.main([path, *options, "--modes", "layer"]) == 0
    own = json.loads(capsys.readouterr().out)["modes"][0]
    assert own["peak"] == planned["peak"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["CONFIG"], "pass --budget, as 24GiB, or --gpu"),
        (["-", "--budget", "8", "--write"], "--write needs a file"),
        (["CONFIG", "--budget", "8", "--family", "nosuch"], "no model family is called"),
        (["CONFIG", "--budget", "0.1"], "of 0.10 GiB nothing is left"),
        (["FSDP", "--budget", "8"], "there is nothing to plan, since fsdp"),
    ],
)
def test_what_plan_refuses(tmp_path, capsys, arguments, said):
    fsdp = {"fsdp_enable": True, "fsdp_activation_checkpointing": True}
    files = {
        "CONFIG": written(tmp_path, WAN),
        "FSDP": written(tmp_path, WAN | fsdp, "fsdp.json"),
    }
    assert plan.main([files.get(a, a) for a in arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("much", 'the budget is "much"; write an amount of memory, as 22GiB'),
        ("0", 'the budget is "0"; write an amount above 0'),
        ("24G", 'the budget is "24G"; write 24GiB (powers of 1024) or 24GB (powers of 1000)'),
        ("90%", "the budget is 90% and no card is named; name one, or write an amount, as 24GiB"),
        ("", 'the budget is ""; write an amount of memory, as 24GiB'),
    ],
)
def test_no_amount_of_memory(tmp_path, capsys, budget, said):
    assert plan.main([written(tmp_path, WAN), f"--budget={budget}"]) == 2
    assert said in capsys.readouterr().err


def test_a_budget_as_text():
    found = plan.plan_config(
        WAN, "4GiB", registry=REGISTRY, overrides=Overrides(width=64, height=64, frames=5)
    )
    assert found.budget == 4 * GIB


def test_a_budget_that_is_a_share_of_the_card(tmp_path, capsys):
    options = [*SMALL, "--gpu", "rtx4090", "--output-format", "json"]
    assert plan.main([written(tmp_path, WAN), *options, "--budget", "50%"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"] == 12 * GIB


# -- compare ----------------------------------------------------------------------------------


def test_compare_refuses(tmp_path, capsys):
    assert compare.main([str(tmp_path / "missing.jsonl")]) == 2
    assert "holds no results of segckpt bench" in capsys.readouterr().err
    bad = tmp_path / "bad.jsonl"
    shutil.copy(__file__, bad)
    assert compare.main([str(bad)]) == 2
    assert "line 1: is not what bench writes" in capsys.readouterr().err
