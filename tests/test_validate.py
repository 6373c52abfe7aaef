"""``segckpt validate``: exact places and codes, three formats, and no traceback whatever comes."""

import io
import json
import os
import string
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simpletuner_segckpt.config_schema.keys import CHECKPOINTING_KEYS, TRAINER_KEYS

from simpletuner_segckpt import FamilyRegistry
from simpletuner_segckpt.commands import families
from simpletuner_segckpt.commands.validate import FORMATS, main
from simpletuner_segckpt.config.settings import load_settings
from simpletuner_segckpt.estimator.workload.parse import Overrides, parse_workload
from simpletuner_segckpt.messages.findings import RULES

INTERVAL = "gradient_checkpointing_interval"
BACKEND = "gradient_checkpointing_backend"


@pytest.fixture
def validate(tmp_path, capsys, monkeypatch):
    """Runs the command on a file with this content; gives exit code and standard output."""
    monkeypatch.chdir(tmp_path)

    def run(content, *options, name="config.json"):
        if isinstance(content, (dict, list)):
            content = json.dumps(content)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        code = main([name, *options])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out

    return run


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        ("", "config.json:1:1: SEG102 error: is empty"),
        (" \n ", "config.json:1:1: SEG102 error"),
        ("[1, 2]", "config.json:1:1: SEG104 error: holds a list"),
        ("3", "config.json:1:1: SEG104 error: holds 3"),
        (b"\xef\xbb\xbf{}", "config.json:1:1: SEG101 error: starts with a byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "config.json:1:1: SEG101 error: byte 0 is not UTF-8"),
        (b'{\n"a": "\xff"}', "config.json:2:1: SEG101 error: byte 8 is not UTF-8"),
        ('{\n  "a": 1,\n}', "config.json:3:1: SEG103 error: is not valid JSON"),
        ('{"a": 1} x', "config.json:1:10: SEG103 error: is not valid JSON: Extra data"),
        ('{"a" 1}', "config.json:1:6: SEG103 error"),
        ('{"a": }', "config.json:1:7: SEG103 error"),
        ('{\n // no\n "a": 1}', "config.json:2:2: SEG103 error"),
        ("{'a': 1}", "config.json:1:2: SEG103 error"),
        ('{"a": 1', "config.json:1:8: SEG103 error"),
        ("[" * 100_000, "SEG103 error: is nested too deeply"),
        ('{"a": ' + "[" * 100_000, "SEG103 error: is nested too deeply"),
        (
            f'{{"{INTERVAL}": 2,\n "x": 1, "{INTERVAL}": 4}}',
            f"config.json:2:10: SEG105 error: `{INTERVAL}` is already given in line 1",
        ),
        (f'{{"{INTERVAL}": NaN}}', f"config.json:1:2: SEG203 error: `{INTERVAL}` is nan"),
        (f'{{"{INTERVAL}": 1e999}}', f"config.json:1:2: SEG203 error: `{INTERVAL}` is inf"),
        (f'{{"{INTERVAL}": {"9" * 5000}}}', f"config.json:1:2: SEG203 error: `{INTERVAL}`"),
        (f'{{"{INTERVAL}": {10**15}}}', f"SEG204 error: `{INTERVAL}` is a huge number"),
        (
            f'{{"a": 1,\n\t"{INTERVAL}": true}}',
            f"config.json:2:2: SEG203 error: `{INTERVAL}` is true",
        ),
        (
            {INTERVAL: 4, "gradient_checkpointing_segment_stride": 2},
            "config.json:1:40: SEG301 error: `gradient_checkpointing_segment_stride` is 2 but",
        ),
        ({"gradient_checkpointing_segment_stride": 2}, "config.json:1:2: SEG302 warning"),
        (
            {"gradient_checkpointing_segment_stride": 1, "model_family": "fluxx"},
            "config.json:1:2: SEG302 warning: `gradient_checkpointing_segment_stride` is 1 without "
            "gradient_checkpointing_interval, so every block is recomputed by itself, as without "
            "it; write the interval as well",
        ),
        ({"gradient_checkpointing_offload_prefetch": True}, "config.json:1:2: SEG303 error"),
        ({"gradient_checkpointing": False, INTERVAL: 2}, "config.json:1:35: SEG304 warning"),
        (
            {"model_family": "fluxx"},
            "config.json:1:2: SEG401 error: `model_family` is fluxx, "
            "which no family file describes; did you mean flux",
        ),
        (
            {"model": {INTERVAL: 2}},
            "config.json:1:2: SEG304 warning",
        ),
        ({"gradient_checkpoint": True}, "did you mean `gradient_checkpointing`?"),
        (
            {"gradient_checkpointing_keep": "attention", BACKEND: "unsloth-ffn"},
            "config.json:1:2: SEG305 error: `gradient_checkpointing_keep` is attention but "
            "gradient_checkpointing_backend is unsloth-ffn, which recomputes the feed-forwards and "
            "nothing else; write unsloth as the backend or leave keep out",
        ),
        (
            {INTERVAL: 2, "gradient_checkpointing_budget": "22GiB"},
            "config.json:1:40: SEG306 error: `gradient_checkpointing_budget` is 22 GiB and chooses "
            f"what is recomputed, but {INTERVAL} is 2; leave out one or the other",
        ),
    ],
)
def test_findings(validate, content, finding):
    code, out = validate(content)
    assert finding in out
    assert code == (0 if finding.endswith("warning") else 1)


OFFLOAD = "gradient_checkpointing_offload_attention"


@pytest.mark.parametrize(
    ("content", "findings", "code"),
    [
        (
            {
                "model_family": "wan",
                "keep": ["attention"],
                "--offload_prefetch": True,
                "interval": 2,
            },
            [
                "SEG304 warning: `keep` is not read; did you mean `gradient_checkpointing_keep`?",
                "`--offload_prefetch` is not read; did you mean",
                "0 errors, 2 warnings",
            ],
            0,
        ),
        (
            {"model_family": "prx", BACKEND: "unsloth-ffn"},
            [
                f"config.json:1:25: SEG402 error: `{BACKEND}` is unsloth-ffn, but no "
                "feed-forward is known in the blocks of PRX; write unsloth"
            ],
            1,
        ),
        (
            {"model_family": "sd1x", "gradient_checkpointing_keep": ["attention", "ffn"]},
            ["but no feed-forward is known in the blocks of Stable Diffusion 1.x; write attention"],
            1,
        ),
        (
            {"model_family": "moss_image", OFFLOAD: True},
            [
                f"SEG402 error: `{OFFLOAD}` is true, but no attention is known in the "
                "blocks of MOSS-Image; write false"
            ],
            1,
        ),
        (
            {"model_family": "flux", BACKEND: "torch-ffn"},
            [
                f"SEG402 warning: `{BACKEND}` is torch-ffn: the blocks of "
                "single_transformer_blocks have no feed-forward of their own and run normally",
                "single_transformer_blocks: 38 blocks, none recomputed (its blocks have no "
                "feed-forward of their own)",
                "feed-forwards (ff, ff_context) of 19 blocks recomputed, 0 run normally",
            ],
            0,
        ),
        (
            {"model_family": "wan", OFFLOAD: True},
            [f"SEG304 warning: `{OFFLOAD}` has no effect: every block is recomputed as a whole"],
            0,
        ),
        (
            {"model_family": "wan", OFFLOAD: True, "gradient_checkpointing_keep_last": 30},
            ["blocks: 30 blocks, none recomputed", "waits in CPU memory: all blocks"],
            0,
        ),
        (
            {"model_family": "wan", OFFLOAD: True, "gradient_checkpointing": False},
            [f"SEG304 warning: `{OFFLOAD}` has no effect, since gradient_checkpointing is off"],
            0,
        ),
    ],
)
def test_what_the_blocks_of_a_family_have(validate, content, findings, code):
    found, out = validate(content)
    assert all(finding in out for finding in findings)
    assert found == code


WITHIN = {"model_family": "wan", "gradient_checkpointing_budget": "22GiB", BACKEND: "unsloth"}


def test_within_a_budget(validate):
    code, out = validate(WITHIN, "--blocks", "blocks=3")
    assert code == 0
    assert out.splitlines()[1:7] == [
        "  family wan, strategy per-block",
        "  budget: 22 GiB; what is recomputed is decided for each shape of call, the first of each "
        "recomputes everything",
        "  blocks: 3 blocks, per-block (within 22 GiB each shape of call gets a plan of its own)",
        "    [0] [1] [2]",
        "    3 recomputed in 3 checkpoint calls, 0 run normally",
        "    the inputs of each checkpoint call wait in CPU memory",
    ]
    assert "All keys are right." in out
    report = json.loads(validate(WITHIN, "--output-format", "json")[1])["files"][0]["report"]
    assert report["budget"] == "22 GiB"


@pytest.mark.parametrize(
    ("content", "said", "code"),
    [
        (
            {"fsdp_enable": True, "fsdp_activation_checkpointing": True},
            "SEG304 warning: `gradient_checkpointing_budget` has no effect: "
            "fsdp_activation_checkpointing: FSDP recomputes the blocks itself",
            0,
        ),
        ({"crepa_enabled": True}, "    because of crepa_enabled: CREPA captures hidden states", 0),
        (
            {"enable_group_offload": True},
            "SEG402 error: `enable_group_offload` is on: group offloading takes the weights away "
            "that the backward of some blocks needs, since they are not recomputed as a whole; "
            "cover every block (no stride, no keep_last, no backend for feed-forwards, no memory "
            "budget)",
            1,
        ),
    ],
)
def test_a_budget_beside_keys_of_the_trainer(validate, content, said, code):
    found, out = validate({"model_family": "wan", "gradient_checkpointing_budget": 22} | content)
    assert said in out
    assert found == code
    assert ("budget: 22 GiB" in out) == ("crepa_enabled" in content)


def test_a_document_says_what_happens_inside_the_blocks(validate):
    content = {
        "model_family": "wan",
        BACKEND: "unsloth",
        INTERVAL: 2,
        "gradient_checkpointing_segment_stride": 4,
        "gradient_checkpointing_keep": ["attention", "ffn"],
        OFFLOAD: True,
    }
    code, out = validate(content, "--output-format", "json", "--blocks", "blocks=5")
    stack = json.loads(out)["files"][0]["report"]["stacks"][0]
    assert (code, stack["segments"], stack["gap"]) == (0, [[0, 1], [4]], [2, 3])
    assert stack["feed_forward"] == []
    assert stack["kept"] == ["attention", "ffn"]
    assert stack["inputs_on_cpu"] is True
    assert stack["offloaded"] == [2, 3]


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        (f"a = 1\n{INTERVAL} = 0 # no\n", f"config.toml:2:1: SEG204 error: `{INTERVAL}` is 0"),
        (
            f'# c\n\na = """\n{INTERVAL} = 1\n"""\nb = [\n1,\n2]\n'
            f'  "--{INTERVAL}" = true\n[t]\nx = 1\n',
            f"config.toml:9:3: SEG203 error: `--{INTERVAL}` is true",
        ),
        (
            f"a.b = 1\n # c\n  {INTERVAL} = 0 # x\nc.d = 2",
            f"config.toml:3:3: SEG204 error: `{INTERVAL}` is 0",
        ),
        ("a = 1\nb = \n", "config.toml:2:"),
        ("a = 1\na = 2\n", "SEG103 error: is not valid TOML"),
        ("a = " + "[" * 5000, "SEG103 error: is not valid TOML"),
    ],
)
def test_toml(validate, content, finding):
    code, out = validate(content, name="config.toml")
    assert code == 1
    assert finding in out


def test_all_findings_of_a_file_are_shown_in_order(validate):
    code, out = validate(
        '{\n"model_family": "wam",\n"gradient_checkpointing_backend": "x",\n'
        f'"{INTERVAL}": 0,\n"gradient_checkpointing_foo": 1\n}}'
    )
    assert [line.split()[1] for line in out.splitlines()[:-1]] == [
        "SEG401",
        "SEG205",
        "SEG204",
        "SEG201",
    ]
    assert code == 1
    assert out.endswith("4 errors, 0 warnings\n")


def test_schedule_of_a_valid_config(validate):
    config = {
        "model_family": "sd3",
        "model_flavour": "medium",
        INTERVAL: 2,
        "gradient_checkpointing_segment_stride": 4,
        "gradient_checkpointing_keep_last": 1,
    }
    code, out = validate(config, "--blocks", "transformer_blocks=9")
    assert code == 0
    assert "transformer_blocks: 9 blocks, segmented" in out
    assert "[0 1] 2 3 [4 5] 6 7 8\n" in out
    assert "4 recomputed in 2 checkpoint calls, 5 run normally" in out
    _, out = validate(config)
    assert "24 blocks, segmented" in out
    assert "published size medium" in out


def test_the_reason_for_per_block(validate):
    code, out = validate({"model_family": "wan", INTERVAL: 2, "musubi_blocks_to_swap": "4"})
    assert code == 0
    assert "strategy per-block" in out
    assert "because of musubi_blocks_to_swap: block swapping" in out
    _, out = validate({"model_family": "wan"})
    assert f"per-block ({INTERVAL} is 1)" in out
    _, out = validate({"model_family": "wan", "gradient_checkpointing": "none"})
    assert "strategy off" in out
    assert "none recomputed" in out


def test_a_family_whose_blocks_cannot_run_together(validate):
    code, out = validate({"model_family": "hidream", INTERVAL: 4})
    assert code == 0
    assert f"config.json:1:29: SEG402 warning: `{INTERVAL}` is 4, but no blocks of HiDream" in out
    _, out = validate({"model_family": "hidream"})
    assert "SEG402" not in out


def test_notes_on_cost(validate):
    _, out = validate({"model_family": "wan", INTERVAL: 2})
    assert "wider segments save no time" in out
    _, out = validate(
        {"model_family": "wan", INTERVAL: 2, "gradient_checkpointing_segment_stride": 4}
    )
    assert "wider segments" not in out
    _, out = validate({"model_family": "wan", INTERVAL: 100})
    assert "interval of 100 is more than the 30 blocks of blocks" in out


def test_what_simpletuner_makes_of_the_keys(validate):
    """Sana's class runs no segments: an interval alone leaves every second block out."""
    config = {"model_family": "sana", INTERVAL: 2}
    options = ("--native", "--blocks", "transformer_blocks=5")
    code, out = validate(config, *options)
    assert code == 0
    assert "family sana, strategy native\n" in out
    assert "  transformer_blocks: 5 blocks, native (no segments in this class)\n" in out
    assert "    [0] 1 [2] 3 [4]\n    3 recomputed in 3 checkpoint calls, 2 run normally\n" in out
    assert f"remark: {INTERVAL}: it covers every n-th block, or with a stride" in out
    assert "[0 1] [2 3] [4]" in validate(config, *options[1:])[1]  # by this package
    _, document = validate(config, *options, "--output-format", "json")
    report = json.loads(document)["files"][0]["report"]
    assert any("it covers every n-th block" in remark for remark in report["remarks"])
    config["gradient_checkpointing"] = False
    assert "strategy off" in validate(config, *options)[1]


@pytest.mark.parametrize(
    ("config", "finding"),
    [
        (
            {"model_family": "ltxvideo2"},
            "is 1, which SimpleTuner's LTX-2 must not be set to: block by block, backward runs the "
            "last block again in place of each one, and the gradients are wrong; write 2 or more",
        ),
        (
            {"model_family": "ltxvideo2", INTERVAL: 2, "musubi_blocks_to_swap": 4},
            "SEG402 error: `musubi_blocks_to_swap` makes SimpleTuner's LTX-2 go block by block",
        ),
        (
            {"model_family": "flux2", BACKEND: "torch-ffn"},
            f"`{BACKEND}` is torch-ffn, which SimpleTuner's Flux.2 does not carry out; write torch",
        ),
        (
            {"model_family": "wan", "--gradient_checkpointing_keep_last": 1},
            "`--gradient_checkpointing_keep_last` is an option that SimpleTuner does not know",
        ),
        (
            {"model_family": "ltxvideo2", "--gradient_checkpointing": "false"},
            "`--gradient_checkpointing` is a text, which SimpleTuner leaves out",
        ),
        (
            {"model_family": "z_image_omni"},
            "`gradient_checkpointing` is on, but SimpleTuner's Z-Image Omni breaks when it is",
        ),
    ],
)
def test_what_simpletuner_cannot_do(validate, config, finding):
    code, out = validate(config, "--native")
    assert code == 1
    assert finding in out


def test_a_family_without_facts_about_simpletuner(validate):
    code, out = validate({"model_family": "bria", INTERVAL: 2}, "--native")
    assert code == 0
    assert "warning: `model_family` has no facts about a class of SimpleTuner's" in out
    assert "strategy segmented" in out


def test_a_class_without_a_choice_of_backends_has_that_of_torch(validate):
    code, out = validate(
        {"model_family": "ace_step"},
        "--native",
        "--blocks",
        "transformer_blocks=4",
        "--blocks",
        "lyric_encoder.encoders=6",
    )
    assert (code, out.endswith("All keys are right.\n")) == (0, True)


def test_a_variable_that_simpletuner_does_not_know_is_no_option(validate):
    text = "MODEL_FAMILY=wan\nGRADIENT_CHECKPOINTING_KEEP_LAST=1\n"
    code, out = validate(text, "--native", name="config.env")
    assert code == 0
    assert (
        "SEG304 warning: `GRADIENT_CHECKPOINTING_KEEP_LAST` is a variable that SimpleTuner" in out
    )


@pytest.mark.parametrize("place", ["", "transformer"])
def test_blocks_from_a_model_folder(validate, tmp_path, place):
    folder = tmp_path / "model" / place
    folder.mkdir(parents=True)
    config = {"_class_name": "WanTransformer3DModel", "num_layers": 7}
    (folder / "config.json").write_text(json.dumps(config))
    code, out = validate({INTERVAL: 3}, "--model", str(tmp_path / "model"))
    assert code == 0
    assert "[0 1 2] [3 4 5] [6]" in out
    assert "family wan" in out


def test_the_number_of_blocks_is_not_known(validate, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    code, out = validate({"model_family": "wan"}, "--model", str(tmp_path / "config"))
    assert code == 0
    assert "SEG403 warning: the number of blocks in blocks is not known; pass --model DIR" in out


def test_a_model_whose_blocks_nobody_has_counted(validate):
    without_size = [family for family in FamilyRegistry.shipped() if not family.size(None)]
    assert len(without_size) >= 5
    for family in without_size:
        for options in ([], ["--native"]):
            code, out = validate({"model_family": family.family}, *options)
            assert "SEG403 warning" in out or code == 1
            assert "strategy off" not in out
            assert "block counts" not in out
    config = {"model_family": "ace_step"}
    assert "strategy unknown\n" in validate(config)[1]
    assert "strategy off" in validate(config | {"gradient_checkpointing": False})[1]
    assert "note: block counts as given" in validate(config, "--blocks", "transformer_blocks=4")[1]
    out = validate({"model_family": "wan"}, "--blocks", "blocks=4")[1]
    assert "note: block counts of the published size 1.3b; those of blocks as given" in out


def test_flavours_pick_the_class(validate):
    _, out = validate({"model_family": "qwen_image"})
    assert "32 blocks" in out  # 2.1 is the trainer's default
    _, out = validate({"model_family": "qwen_image", "model_flavour": "v1.0"})
    assert "60 blocks" in out


def test_json_output(validate):
    code, out = validate(
        {"model_family": "wan", INTERVAL: 2, "gradient_checkpointing_foo": 1},
        "--output-format",
        "json",
    )
    [document] = json.loads(out)["files"]
    assert code == 1
    assert document["report"] is None
    assert document["findings"] == [
        {
            "code": "SEG201",
            "rule": "unknown-key",
            "message": document["findings"][0]["message"],
            "key": "gradient_checkpointing_foo",
            "file": "config.json",
            "line": 1,
            "column": 63,
            "severity": "error",
        }
    ]
    code, out = validate({"model_family": "wan", INTERVAL: 2}, "--output-format", "json")
    [document] = json.loads(out)["files"]
    [stack] = document["report"]["stacks"]
    assert stack["segments"] == [[b, b + 1] for b in range(0, 30, 2)]
    assert stack["gap"] == []


def test_github_output(validate):
    _, out = validate(f'{{\n"{INTERVAL}": "50%"}}', "--output-format", "github")
    assert out.startswith(
        f'::error file=config.json,line=2,col=1,title=SEG203::`{INTERVAL}` is "50%25"'
    )


def test_several_files_and_standard_input(validate, capsys, monkeypatch):
    assert validate({INTERVAL: 2})[0] == 0
    assert main(["config.json", "config.json"]) == 0
    assert main(["config.json", "missing.json"]) == 2
    assert "missing.json: SEG001 error: No such file" in capsys.readouterr().out
    assert main(["."]) == 2
    for text, line in ((f'{{"{INTERVAL}": 0}}', "<stdin>:1:2"), (f"{INTERVAL} = 0", "<stdin>:1:1")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert main(["-"]) == 1
        assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--family", "fluxx"],
        ["--model", "nowhere"],
        ["--blocks", "blocks"],
        ["--blocks", "blocks=0"],
        ["--families", "nowhere"],
        ["--family", "wan", "--blocks", "layers=3"],
        ["--family", "wan", "--blocks", "blocks=99999999"],
        ["--family", "wan", "--model", "sd3"],
        ["--model", "negative"],
        ["--model", "list"],
    ],
)
def test_a_command_line_that_cannot_run(validate, options):
    for name, config in {
        "sd3": {"_class_name": "SD3Transformer2DModel", "num_layers": 24},
        "negative": {"_class_name": "WanTransformer3DModel", "num_layers": -3},
        "list": [1],
    }.items():
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps(config))
    assert validate({INTERVAL: 2}, *options)[0] == 2


LONG = "x" * 5000  # longer than any file system takes
COMMANDS = {
    "validate": ["config.json"],
    "families": [],
    "estimate": ["config.json"],
    "plan": ["config.json", "--budget", "24GiB"],
    "compare": ["results.jsonl"],
    "check": ["flux"],
    "bench": ["config.json", "--tiny"],
    "launch": ["--config", "config.json", "script.py"],
}


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """Runs a command in a folder with a config; exit code and what it said where."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps({"model_family": "flux", INTERVAL: 2}))
    Path("script.py").write_text("")

    def run(command, *arguments):
        main = import_module(f"simpletuner_segckpt.commands.{command}").main
        code = main([*arguments])
        sys.stdout.flush()
        return code, *capfd.readouterr()

    return run


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        (LONG, "File name too long"),
        ("a\0b", "embedded null"),
        ("config.json", "Not a directory"),
        ("nowhere", "No such file or directory"),
        ("folder", "family.toml: Is a directory"),
    ],
)
def test_family_files_that_cannot_be_read(run, command, folder, reason):
    Path("folder", "family.toml").mkdir(parents=True)
    code, out, err = run(command, "--families", folder, *COMMANDS[command])
    assert (code, out) == (2, "")
    assert err.startswith(f"segckpt {command}: {folder[:20].replace(chr(0), '')[:1]}")
    assert reason in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["validate", "estimate", "plan", "bench"])
@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        (LONG, "config.json: File name too long"),
        ("a\0b", "config.json: embedded null byte"),
        ("nowhere", "nowhere holds no config.json"),
        ("loop", "config.json: Too many levels of symbolic links"),
    ],
)
def test_a_model_folder_that_cannot_be_read(run, command, folder, reason):
    Path("loop").mkdir()
    Path("loop", "config.json").symlink_to("config.json")
    arguments = [argument for argument in COMMANDS[command] if argument != "--tiny"]
    code, out, err = run(command, *arguments, "--model", folder)
    assert (code, out) == (2, "")
    assert reason in err
    assert err.startswith(f"segckpt {command}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["validate", "estimate", "plan", "bench", "launch"])
@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (LONG, "File name too long"),
        ("a\0b", "embedded null byte"),
        (".", "Is a directory"),
        ("missing", "No such file or directory"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_a_config_that_cannot_be_read(run, command, file, reason):
    Path("loop").symlink_to("loop")
    arguments = [file if a == "config.json" else a for a in COMMANDS[command]]
    code, out, err = run(command, *arguments)
    assert (code, err) == (2, "")
    finding, total = out.splitlines()
    assert finding.startswith(file[:1])
    assert finding.endswith(f"SEG001 error: {reason}")
    assert total == "1 error, 0 warnings"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_files_that_may_not_be_read(run, tmp_path):
    """By permission, as somebody who is not root."""
    for warm in (["config.json"], ["missing"]):  # Python's own files are perhaps root's, too
        run("validate", *warm)
    for path in [*Path().iterdir(), Path("families"), Path("model")]:
        if not path.exists():
            path.mkdir()
        path.chmod(0)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    os.fchmod(descriptor, 0o755)
    os.seteuid(1234)
    try:
        os.fchdir(descriptor)  # past the folders of pytest, which are root's
        told = [
            run("validate", "config.json"),
            run("validate", "-", "--families", "families"),
            run("validate", "-", "--model", "model"),
            run("families", "--families", "families"),
        ]
    finally:
        os.seteuid(0)
        os.close(descriptor)
    assert [code for code, _, _ in told] == [2] * 4
    assert told[0][1].startswith("config.json: SEG001 error: Permission denied\n")
    assert [err for _, _, err in told] == [
        "",
        "segckpt validate: families is not a folder of family files: Permission denied\n",
        "segckpt validate: --model: model/config.json: Permission denied\n",
        "segckpt families: families is not a folder of family files: Permission denied\n",
    ]


def test_other_files_that_cannot_be_used(run):
    for name, reason in ((LONG, "File name too long"), ("a\0b", "embedded null byte")):
        for code, out, err in (
            run("launch", "--config", "config.json", name),
            run("compare", name),
            run("bench", "config.json", "--tiny", "--out", name),
        ):
            assert (code, out) == (2, "")
            assert err.splitlines()[-1].endswith(reason)
    code, _, err = run("compare", ".")
    assert (code, err) == (2, "segckpt compare: .: Is a directory\n")
    # A path in the config itself that no file can have is as good as none.
    config = {"model_family": "wan", "pretrained_model_name_or_path": LONG}
    Path("config.json").write_text(json.dumps(config | {"data_backend_config": "a\0b"}))
    said = "nothing of data_backend_config, whose file a\0b cannot be read: embedded null byte"
    assert said in parsed("config.json").assumed


def parsed(config):
    return parse_workload(load_settings(config), FamilyRegistry.shipped(), Overrides())


def test_what_nobody_looked_after_is_told_by_the_file(run, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr(families, "page", fail)
    assert run("families", "flux") == (
        *(2, ""),
        "segckpt families: some/file: Permission denied\n",
    )


@pytest.mark.parametrize("arguments", [["config.json"], ["--help"]])
def test_an_output_that_is_full(run, monkeypatch, capfd, arguments):
    """It is said so, and the stream is for the caller what it was, but for what was not written."""
    with open("/dev/full", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        code = main(arguments)
        said = "segckpt validate: the output cannot be written (No space left on device)\n"
        assert (code, *capfd.readouterr()) == (2, "", said)
        assert sys.stdout is stream
        assert stream.errors == "strict"
        assert os.path.samestat(os.fstat(stream.fileno()), os.stat("/dev/full"))
        stream.flush()


def test_a_description_that_cannot_be_written(run, monkeypatch, capfd):
    """It is not the fault of the model that was probed."""
    command = import_module("simpletuner_segckpt.commands.probe")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(command, "probe", lambda *_: None)
    monkeypatch.setattr(command, "render", lambda _: "all of it")
    Path("described.py").write_text("def make(): return None, {}\ndef says(): print(1, flush=True)")
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        codes = [command.main([f"described:{name}"]) for name in ("make", "says")]
    said = "segckpt probe: the output cannot be written (No space left on device)\n"
    assert (codes, capfd.readouterr().err) == ([2, 2], 2 * said)


def test_a_caller_has_its_standard_output_again(tmp_path):
    """In its own process, where it is a full disk for a while."""
    script = """
import os, sys
from simpletuner_segckpt.commands import families, validate
kept, errors = os.dup(1), sys.stdout.errors
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
full = os.fstat(1).st_rdev
codes = [families.main([]), validate.main(["--families", "nowhere", "-"]), families.main(["flux"])]
assert os.fstat(1).st_rdev == full, "somewhere else"
os.dup2(kept, 1)
print(codes, sys.stdout.errors == errors)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[2, 2, 2] True\n")
    assert done.stderr.splitlines() == [
        "segckpt families: the output cannot be written (No space left on device)",
        "segckpt validate: nowhere is not a folder of family files: No such file or directory",
        "segckpt families: the output cannot be written (No space left on device)",
    ]


def test_output_that_cannot_be_written(validate, tmp_path):
    validate({"model_family": "flux", INTERVAL: 2})
    command = f"{sys.executable} -m simpletuner_segckpt.validate config.json"
    other = f"{sys.executable} -m simpletuner_segckpt.commands families"
    usage = f"{sys.executable} -m simpletuner_segckpt.commands --help"
    wrong = f"{sys.executable} -m simpletuner_segckpt.launch --config wrong.json script.py"
    (tmp_path / "wrong.json").write_text(json.dumps({INTERVAL: 0}))
    programs = (command, other, usage, wrong)
    ways = (">/dev/full", ">&-", "2>&- >&-")
    for shell in (f"{program} {way}" for program in programs for way in ways):
        done = subprocess.run(shell, shell=True, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2, shell
        assert "Traceback" not in done.stderr
    done = subprocess.run(
        f"{command} - <&-", shell=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "SEG001" in done.stdout


def test_every_rule_is_used():
    root = Path(__file__).parents[1]
    source = "".join(
        path.read_text()
        for folder in ("simpletuner_segckpt", "config_schema")
        for path in (root / folder).rglob("*.py")
        if path.name != "findings.py"
    )
    assert [name for name, _ in RULES.values() if f'"{name}"' not in source] == []


def test_no_torch_and_friends(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_family": "flux", INTERVAL: 2}))
    script = (
        "import sys; from simpletuner_segckpt.validate import main; code = main(sys.argv[1:]);"
        "found = {'torch', 'diffusers', 'transformers', 'peft', 'accelerate'} & set(sys.modules);"
        "sys.exit(repr(found) if found else code)"
    )
    done = subprocess.run([sys.executable, "-c", script, config], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_module_and_console_script(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_family": "flux", INTERVAL: 2}))
    scripts = Path(sys.executable).parent
    outputs = [
        subprocess.run([*command, config], capture_output=True, text=True, check=True).stdout
        for command in (
            [sys.executable, "-m", "simpletuner_segckpt.validate"],
            [scripts / "segckpt", "validate"],
        )
    ]
    assert outputs[0] == outputs[1] != ""
    assert subprocess.run([scripts / "segckpt", "nonsense"], capture_output=True).returncode == 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"zero_optimization": {"stage": 3}},
            "SEG402 warning: `deepspeed_config` has ZeRO stage 3",
        ),
        ('{"zero_stage": "3"}', "SEG402 warning: `deepspeed_config` has ZeRO stage 3"),
        ("zero3.json", "SEG402 warning: `deepspeed_config` has ZeRO stage 3"),
        ({"deepspeed_config_file": "zero3.json"}, "SEG402 warning: `deepspeed_config` has ZeRO"),
        (
            "gone.json",
            "SEG203 warning: `deepspeed_config` is not read, since it is neither JSON nor",
        ),
        ([3], "SEG203 warning: `deepspeed_config` is not read, since it holds no object"),
        ({"zero_optimization": {"stage": 2}}, ""),
        ({"zero_optimization": [3]}, ""),
        ("None", ""),
    ],
    ids=str,
)
def test_the_zero_stage_of_deepspeed(config, says, validate, tmp_path):
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    code, out = validate({"model_family": "flux", INTERVAL: 2, "deepspeed_config": config})
    assert code == 0
    assert says in out
    assert ("SEG" in out) == bool(says)
    strategy = "per-block" if says.startswith("SEG402") else "segmented"
    assert f"family flux, strategy {strategy}" in out
    _, out = validate({"model_family": "flux", "deepspeed_config": {"zero_stage": 3}})
    assert "SEG" not in out


# Whatever bytes stand in the file.

spellings = st.sampled_from(
    [
        *CHECKPOINTING_KEYS,
        *TRAINER_KEYS,
        *("--" + key for key in CHECKPOINTING_KEYS),
        *(key.upper().replace("_", "-") for key in CHECKPOINTING_KEYS),
        "gradient_checkpointing\x1b[31m",
        "gradient_checkpointing_\ud800",
        "$schema",
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["None", "true", "2", " 2 ", "2.0", "1e3", "torch", "flux", "wan", "off", "\ud800"]
    )
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
configs = st.dictionaries(spellings | st.text(max_size=30), values, max_size=8)
fuzz = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check_any(capsys, tmp_path, data, name, output_format):
    path = tmp_path / name
    path.write_bytes(data)
    code = main([str(path), "--output-format", output_format])
    out, err = capsys.readouterr()
    assert code in (0, 1, 2)
    assert err == ""
    assert path.read_bytes() == data
    if output_format == "json":
        [document] = json.loads(out)["files"]
        errors = [f for f in document["findings"] if f["severity"] == "error"]
        assert bool(errors) == (code == 1)
    else:
        assert all(character.isprintable() or character == "\n" for character in out)


@fuzz
@example({"gradient_checkpointing": "\ud800"}, "text")
@example({"gradient_checkpointing_interval": int("9" * 400)}, "text")
@example({"layersync_lambda": "9" * 400}, "text")
@given(configs, st.sampled_from(FORMATS))
def test_any_keys_and_values(capsys, tmp_path, config, output_format):
    check_any(capsys, tmp_path, json.dumps(config).encode(), "c.json", output_format)


@fuzz
@example(b"GRADIENT_CHECKPOINTING_INTERVAL=\x0c2\nTRAINER_EXTRA_ARGS=--a --", "c.env", "text")
@given(
    st.binary(max_size=60),
    st.sampled_from(["c.json", "c.toml", "c.env"]),
    st.sampled_from(FORMATS),
)
def test_any_bytes(capsys, tmp_path, data, name, output_format):
    check_any(capsys, tmp_path, data, name, output_format)


@fuzz
@given(configs, st.data(), st.sampled_from(FORMATS))
def test_broken_json(capsys, tmp_path, config, data, output_format):
    text = bytearray(json.dumps(config, indent=1).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        if text:
            where = data.draw(st.integers(0, len(text) - 1))
            text[where : where + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=2))
    check_any(capsys, tmp_path, bytes(text), "c.json", output_format)


@fuzz
@given(
    st.lists(
        st.tuples(
            spellings | st.text(string.ascii_letters, min_size=1),
            st.sampled_from(['"2"', "2", "true", "nan", "[1", "1979-05-27", "{a=1}", "'x'", '"""'])
            | st.text(max_size=8),
        ),
        max_size=6,
    ),
    st.sampled_from(FORMATS),
)
def test_any_toml(capsys, tmp_path, members, output_format):
    text = "\n".join(f"{key} = {value}" for key, value in members)
    check_any(capsys, tmp_path, text.encode(errors="replace"), "c.toml", output_format)
