"""SimpleTuner's ``config.env``: what is read of it, and what is said of the rest."""

import pytest
from simpletuner_segckpt.config_schema import TrainingKeys
from toys import WithDoor, toy

import simpletuner_segckpt
from simpletuner_segckpt import ConfigError
from simpletuner_segckpt.commands import validate
from simpletuner_segckpt.config.edit import write_keys
from simpletuner_segckpt.config.file import parse_config, read_config_file
from simpletuner_segckpt.config.settings import check_settings, load_settings, read_keys

FILE = """\
# A LoRA of Wan 2.1
export MODEL_FAMILY='wan'
MODEL_TYPE="lora"
  USE_GRADIENT_CHECKPOINTING=true
GRADIENT_CHECKPOINTING_SEGMENT_STRIDE=4
GRADIENT_CHECKPOINTING_KEEP_LAST=1

RESOLUTION=480
DATALOADER_CONFIG=config/wan/multidatabackend.json
TRAINING_NUM_PROCESSES=1
TRAINER_EXTRA_ARGS="--model_flavour=t2v-480p-1.3b-2.1 --num_frames 33"
TRAINER_EXTRA_ARGS+=" --gradient_checkpointing_interval=2 --crepa_enabled"
"""


def read(text, name="config.env"):
    return parse_config(text.encode(), name)


def said(text, name="config.env"):
    _, findings = check_settings(read(text, name))
    return [str(finding) for finding in findings]


def test_keys_and_their_places():
    file = read(FILE)
    assert file.findings == []
    assert file.values == {
        "model_family": "wan",
        "model_type": "lora",
        "gradient_checkpointing": "true",
        "gradient_checkpointing_segment_stride": "4",
        "gradient_checkpointing_keep_last": "1",
        "resolution": "480",
        "data_backend_config": "config/wan/multidatabackend.json",
        "--model_flavour": "t2v-480p-1.3b-2.1",
        "--num_frames": "33",
        "--gradient_checkpointing_interval": "2",
        "--crepa_enabled": True,
    }
    assert file.places["model_family"] == (2, 8)
    assert file.places["gradient_checkpointing"] == (4, 3)
    assert file.places["--crepa_enabled"] == (12, 1)


def test_an_env_file_means_what_its_keys_mean(tmp_path):
    path = tmp_path / "config.env"
    path.write_text(FILE)
    settings = load_settings(path)
    config = settings.checkpointing
    assert (config.enabled, config.interval, config.stride, config.keep_last) == (True, 2, 4, 1)
    assert settings.trainer.model_flavour == "t2v-480p-1.3b-2.1"
    assert settings.trainer.crepa_enabled
    model, _ = toy(WithDoor)
    report = simpletuner_segckpt.apply(model, path).report
    assert [str(stack.schedule) for stack in report.stacks] == ["[0] [1] 2 3 [4] 5"]


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("GRADIENT_CHECKPOINTING_KEEP=attention,ffn", "gradient_checkpointing_keep", 2),
        ("GRADIENT_CHECKPOINTING_KEEP='attention ffn'", "gradient_checkpointing_keep", 2),
        ("GRADIENT_CHECKPOINTING_KEEP=", "gradient_checkpointing_keep", 0),
    ],
)
def test_a_list(line, key, value):
    file = read(line)
    assert len(file.values[key]) == value
    settings, findings = check_settings(file)
    assert findings == []
    assert len(settings.checkpointing.keep) == value


@pytest.mark.parametrize(
    "line",
    [
        "GRADIENT_CHECKPOINTING_BUDGET=22 GiB",
        "export GRADIENT_CHECKPOINTING_BUDGET='22GiB'",
        "TRAINER_EXTRA_ARGS=--gradient_checkpointing_budget=22",
    ],
)
def test_a_budget(line):
    settings, _ = check_settings(read(line))
    assert str(settings.checkpointing.budget) == "22 GiB"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "GRADIENT_CHECKPOINTING_BUDGET=22G",
            'config.env:1:1: SEG203 error: `GRADIENT_CHECKPOINTING_BUDGET` is "22G"; write 22GiB '
            "(powers of 1024) or 22GB (powers of 1000)",
        ),
        (
            "TRAINER_EXTRA_ARGS=--gradient_checkpointing_budget=90%",
            "config.env:1:1: SEG304 warning: `--gradient_checkpointing_budget` ends SimpleTuner "
            "unless `segckpt launch` starts it; write GRADIENT_CHECKPOINTING_BUDGET=90%",
        ),
        (
            "GRADIENT_CHECKPOINTING_INTERVAL=2",
            "config.env:1:1: SEG304 warning: `GRADIENT_CHECKPOINTING_INTERVAL` is not read by "
            'SimpleTuner; write TRAINER_EXTRA_ARGS+=" --gradient_checkpointing_interval=2"',
        ),
        (
            "\nexport GRADIENT_CHECKPOINTING=true",
            "config.env:2:8: SEG304 warning: `GRADIENT_CHECKPOINTING` is not read by SimpleTuner; "
            "write USE_GRADIENT_CHECKPOINTING=true",
        ),
        (
            "USE_GRADIENT_CHECKPOINTING=false",
            "config.env:1:1: SEG304 warning: `USE_GRADIENT_CHECKPOINTING` is false, which "
            "SimpleTuner leaves out of an env file, so that its default, on, stays; write off",
        ),
        (
            "TRAINER_EXTRA_ARGS=--gradient_checkpointing_keep=ffn",
            "config.env:1:1: SEG304 warning: `--gradient_checkpointing_keep` ends SimpleTuner "
            "unless `segckpt launch` starts it; write GRADIENT_CHECKPOINTING_KEEP=ffn",
        ),
        (
            "GRADIENT_CHECKPOINTING_INTERVALS=2",
            "config.env:1:1: SEG201 error: `GRADIENT_CHECKPOINTING_INTERVALS` is not a key; did "
            "you mean `gradient_checkpointing_interval`?",
        ),
        (
            "TRAINER_EXTRA_ARGS=--gradient_checkpointing_interval=two",
            'config.env:1:1: SEG203 error: `--gradient_checkpointing_interval` is "two"; write a '
            "whole number, 1 or more (blocks per segment)",
        ),
        (
            "MODEL_FAMILY=wan\nMODEL_FAMILY=flux",
            "config.env:2:1: SEG105 error: `MODEL_FAMILY` is already given in line 1; leave one "
            "of the two out",
        ),
        (
            "USE_GRADIENT_CHECKPOINTING=on\ngradient_checkpointing=on",
            "config.env:2:1: SEG202 error: `gradient_checkpointing` is also given as "
            "`USE_GRADIENT_CHECKPOINTING`; leave one of the two out",
        ),
        (
            "TRAINER_EXTRA_ARGS='--gradient_checkpointing_interval 2 "
            "--gradient_checkpointing_segment_stride=4'\nGRADIENT_CHECKPOINTING_SEGMENT_STRIDE=6",
            "config.env:2:1: SEG202 error: `GRADIENT_CHECKPOINTING_SEGMENT_STRIDE` is also given "
            "as `--gradient_checkpointing_segment_stride`; leave one of the two out",
        ),
        (
            "TRAINER_EXTRA_ARGS=--lora_rank=4\nTRAINER_EXTRA_ARGS=--lora_rank=8",
            "config.env:2:1: SEG105 error: `TRAINER_EXTRA_ARGS` is already given in line 1, which "
            "it replaces; write += to add",
        ),
        (
            "MODEL_FAMILY=wan\nsource other.env",
            'config.env:2:1: SEG103 warning: "source other.env" is no NAME=value and is not read',
        ),
        (
            "CONFIG_TYPE=toml\nMODEL_FAMILY=wan",
            "config.env:1:1: SEG304 warning: `CONFIG_TYPE` is toml: SimpleTuner then reads no key "
            "of this file",
        ),
        ('{"model_family": "wan"}', "config.env:1:1: SEG104 error: holds no line NAME=value"),
        ("\n", "config.env:1:1: SEG102 error: is empty; write the keys into it"),
    ],
)
def test_what_is_said(text, message):
    assert message in said(text)


def test_what_needs_no_word():
    """Options that go on from the earlier ones, and keys that only this package reads."""
    assert (
        said(
            "CONFIG_BACKEND=env\n"
            "TRAINER_EXTRA_ARGS=--gradient_checkpointing_interval=2\n"
            'TRAINER_EXTRA_ARGS="${TRAINER_EXTRA_ARGS} --crepa_enabled"\n'
            "GRADIENT_CHECKPOINTING_KEEP_LAST=1\n"
            "SOMETHING=else\n"
        )
        == []
    )


def test_what_is_off_is_named_once():
    findings = said(
        "USE_GRADIENT_CHECKPOINTING=off\nGRADIENT_CHECKPOINTING_SEGMENT_STRIDE=four\n"
        "GRADIENT_CHECKPOINTING_OFFLOAD_ATTENTION=true\n"
    )
    assert len(findings) == 2
    assert all("warning" in finding for finding in findings)


def test_a_config_beside_it_is_read_instead(tmp_path):
    path = tmp_path / "config.env"
    path.write_text(FILE)
    (tmp_path / "config.toml").write_text("")
    [finding] = read_config_file(path).findings
    assert "SimpleTuner reads config.toml beside this file" in finding.message
    path.write_text(f"CONFIG_BACKEND=env\n{FILE}")
    assert read_config_file(path).findings == []
    path.write_text("TRAINING_NUM_PROCESSES=1\n")  # none of our keys: nothing is lost
    assert read_config_file(path).findings == []


@pytest.mark.parametrize("first", ["export MODEL_FAMILY=wan\n", "# mine\n\nMODEL_FAMILY=wan\n"])
def test_standard_input(first):
    assert read(first, "<stdin>").values == {"model_family": "wan"}
    assert read('model_family = "wan"\n', "<stdin>").values == {"model_family": "wan"}


def test_the_command(tmp_path, capsys):
    path = tmp_path / "config.env"
    path.write_text(FILE)
    assert validate.main([str(path)]) == 0
    assert "crepa_enabled: CREPA captures hidden states after a block" in capsys.readouterr().out


def test_what_the_estimator_reads():
    keys = read_keys(TrainingKeys, read(FILE + "MODEL_NAME=Wan-AI/Wan2.1\nUSE_EMA=true\n"))
    assert (keys.resolution, keys.num_frames, keys.model_type) == (480, 33, "lora")
    assert keys.data_backend_config == "config/wan/multidatabackend.json"
    assert (keys.pretrained_model_name_or_path, keys.use_ema) == ("Wan-AI/Wan2.1", True)


def test_an_env_file_is_not_edited(tmp_path):
    path = tmp_path / "config.env"
    path.write_text(FILE)
    keys = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_interval": 4,
        "gradient_checkpointing_keep": ["attention", "ffn"],
        "gradient_checkpointing_segment_stride": None,
    }
    with pytest.raises(ConfigError) as error:
        write_keys(path, keys)
    assert str(error.value).endswith(
        "config.env: SEG402 error: is an env file, which is not edited; it must say "
        'TRAINER_EXTRA_ARGS+=" --gradient_checkpointing_interval=4" and '
        "GRADIENT_CHECKPOINTING_KEEP=attention,ffn and it must not say "
        "GRADIENT_CHECKPOINTING_SEGMENT_STRIDE"
    )
    with pytest.raises(ConfigError, match="nothing has to change"):
        write_keys(path, {"gradient_checkpointing": True})
    assert path.read_text() == FILE
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.env"]
