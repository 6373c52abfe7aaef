"""The spellings that trainers' files really contain, each with the value it means."""

import argparse
import json

import jsonschema
import numpy
import pytest
from simpletuner_segckpt.config_schema.generate import SCHEMA_FILE, json_schema, render
from simpletuner_segckpt.config_schema.keys import CHECKPOINTING_KEYS

from simpletuner_segckpt import CheckpointingConfig, ConfigError
from simpletuner_segckpt.config.file import ConfigFile
from simpletuner_segckpt.config.settings import check_settings, load_settings

ON = "gradient_checkpointing"
INTERVAL = "gradient_checkpointing_interval"
STRIDE = "gradient_checkpointing_segment_stride"
OFFLOAD = "gradient_checkpointing_offload_attention"
PREFETCH = "gradient_checkpointing_offload_prefetch"
BUCKETS = "gradient_checkpointing_offload_pin_memory_max_buckets"
KEEP = "gradient_checkpointing_keep"
KEEP_LAST = "gradient_checkpointing_keep_last"
BACKEND = "gradient_checkpointing_backend"
BUDGET = "gradient_checkpointing_budget"


def read(config):
    return load_settings(config).checkpointing


def codes(config):
    with pytest.raises(ConfigError) as caught:
        load_settings(config)
    return [finding.code for finding in caught.value.findings]


def test_defaults():
    assert read({}) == CheckpointingConfig() == CheckpointingConfig.model_validate({})
    assert CheckpointingConfig().model_dump(by_alias=True) == {
        ON: True,
        BACKEND: "torch",
        INTERVAL: 1,
        STRIDE: None,
        OFFLOAD: False,
        BUCKETS: 12,
        PREFETCH: False,
        KEEP: (),
        KEEP_LAST: 0,
        BUDGET: None,
    }


@pytest.mark.parametrize(
    "off", [False, "false", "False", "FALSE", "off", "no", "none", "None", "0", 0, " off "]
)
def test_off(off):
    assert read({ON: off}).enabled is False


@pytest.mark.parametrize("on", [True, "true", "True", "yes", "on", "1", 1, "", None, "null"])
def test_on_or_unset(on):
    assert read({ON: on}).enabled is True


def test_words_that_are_no_switch():
    assert codes({ON: "yes please"}) == ["SEG203"]
    with pytest.raises(ConfigError, match="gradient_checkpointing_backend"):
        load_settings({ON: "unsloth"})
    assert codes({ON: 2}) == codes({ON: [True]}) == ["SEG203"]


@pytest.mark.parametrize("key", [INTERVAL, STRIDE, BUCKETS, KEEP_LAST])
@pytest.mark.parametrize("spelling", [7, "7", " 7 ", "7.0", 7.0, "+7"])
def test_whole_numbers(key, spelling):
    assert read({key: spelling}).model_dump(by_alias=True)[key] == 7


@pytest.mark.parametrize(
    "key", [INTERVAL, STRIDE, BUCKETS, KEEP_LAST, BACKEND, KEEP, OFFLOAD, BUDGET]
)
@pytest.mark.parametrize("unset", ["", None, "None", "none", "null", "  "])
def test_unset(key, unset):
    default = CheckpointingConfig().model_dump(by_alias=True)[key]
    assert read({key: unset}).model_dump(by_alias=True)[key] == default


@pytest.mark.parametrize("key", [INTERVAL, STRIDE, BUCKETS, KEEP_LAST])
@pytest.mark.parametrize("wrong", ["abc", 2.5, "2.5", True, [2], {}, float("nan"), float("inf")])
def test_no_whole_numbers(key, wrong):
    assert codes({key: wrong}) == ["SEG203"]


@pytest.mark.parametrize(
    ("key", "wrong"),
    [(INTERVAL, 0), (INTERVAL, -2), (STRIDE, 0), (BUCKETS, -1), (KEEP_LAST, "-1"), (BUCKETS, 1e10)],
)
def test_out_of_range(key, wrong):
    assert codes({key: wrong}) == ["SEG204"]


def test_buckets_zero_is_allowed():
    assert read({BUCKETS: 0}).pin_memory_max_buckets == 0


def test_keep():
    parse = CheckpointingConfig.model_validate
    assert parse({KEEP: "attention"}).keep == ("attention",)
    assert parse({KEEP: ["ffn", "attention", "ffn"]}).keep == ("ffn", "attention")
    assert parse({KEEP: []}).keep == ()
    for wrong in (["mlp"], 3, ["attention", None], [""], [["ffn"]]):
        assert codes({KEEP: wrong}) == ["SEG205"]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("spelling", "amount", "written"),
    [
        ("22GiB", 22 * GIB, "22 GiB"),
        (" 22 gib ", 22 * GIB, "22 GiB"),
        ("22GB", 22 * 10**9, "22 GB"),
        ("22000MiB", 22000 << 20, "22000 MiB"),
        ("512 KiB", 1 << 19, "512 KiB"),
        ("1.5TB", 15 * 10**11, "1.5 TB"),
        (22, 22 * GIB, "22 GiB"),
        (22.5, 45 * GIB // 2, "22.5 GiB"),
        ("22", 22 * GIB, "22 GiB"),
        ("+22.", 22 * GIB, "22 GiB"),
        (2**-20, 1024, "0.00000095367431640625 GiB"),
        (numpy.float32(0.5), GIB // 2, "0.5 GiB"),
    ],
)
def test_a_budget_is_an_amount(spelling, amount, written):
    budget = read({BUDGET: spelling}).budget
    assert budget.in_bytes(1) == amount
    assert not budget.of_device
    assert str(budget) == written
    assert read({BUDGET: written}).budget == budget


@pytest.mark.parametrize(
    ("spelling", "written", "of_10", "of_100"),
    [
        ("90%", "90%", 9 * GIB, 90 * GIB),
        (" 12.5 % ", "12.5%", 5 * GIB // 4, 25 * GIB // 2),
        ("100%", "100%", 10 * GIB, 100 * GIB),
        ("auto", "auto", 9 * GIB, 95 * GIB),
        (" Auto", "auto", 9 * GIB, 95 * GIB),
    ],
)
def test_a_budget_is_of_the_device(spelling, written, of_10, of_100):
    """Automatically a twentieth is left free, but no less than a GiB."""
    budget = read({BUDGET: spelling}).budget
    assert budget.of_device
    assert (budget.in_bytes(10 * GIB), budget.in_bytes(100 * GIB)) == (of_10, of_100)
    assert str(budget) == written
    assert read({BUDGET: written}).budget == budget


def test_auto_on_a_device_with_less_than_its_margin():
    assert read({BUDGET: "auto"}).budget.in_bytes(GIB // 2) == 0


A_BUDGET = "write an amount of memory, as 22GiB, a share of the device, as 90%, or auto"
AN_AMOUNT = "write an amount above 0 and below 1024 TiB, as 22GiB (a number alone counts GiB)"
A_SHARE = "write a share of the device above 0% and up to 100%"


@pytest.mark.parametrize(
    ("wrong", "code", "sentence"),
    [
        ("much", "SEG203", f'is "much"; {A_BUDGET}'),
        ("22 bytes", "SEG203", f'is "22 bytes"; {A_BUDGET}'),
        ("%", "SEG203", f'is "%"; {A_BUDGET}'),
        ("22 GiB 3", "SEG203", f'is "22 GiB 3"; {A_BUDGET}'),
        (True, "SEG203", f"is true; {A_BUDGET}"),
        ([22], "SEG203", f"is a list; {A_BUDGET}"),
        ({"unit": "GiB"}, "SEG203", f"is an object; {A_BUDGET}"),
        (float("nan"), "SEG203", f"is nan; {A_BUDGET}"),
        ("inf", "SEG203", f'is "inf"; {A_BUDGET}'),
        (
            "22G",
            "SEG203",
            'is "22G"; write 22GiB (powers of 1024) or 22GB (powers of 1000)',
        ),
        (
            "1.5 mi",
            "SEG203",
            'is "1.5 mi"; write 1.5MiB (powers of 1024) or 1.5MB (powers of 1000)',
        ),
        (0, "SEG204", f"is 0; {AN_AMOUNT}"),
        ("0GiB", "SEG204", f'is "0GiB"; {AN_AMOUNT}'),
        ("-3 GiB", "SEG204", f'is "-3 GiB"; {AN_AMOUNT}'),
        (1e-12, "SEG204", f"is 1e-12; {AN_AMOUNT}"),
        (22 * GIB, "SEG204", f"is 23622320128; {AN_AMOUNT}"),
        (10**400, "SEG204", f"is a huge number; {AN_AMOUNT}"),
        ("0%", "SEG204", f'is "0%"; {A_SHARE}'),
        ("101%", "SEG204", f'is "101%"; {A_SHARE}'),
        ("-5%", "SEG204", f'is "-5%"; {A_SHARE}'),
    ],
)
def test_what_is_no_budget(wrong, code, sentence):
    with pytest.raises(ConfigError) as caught:
        load_settings({BUDGET: wrong})
    assert str(caught.value) == f"{code} error: `{BUDGET}` {sentence}"


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        (
            {INTERVAL: 2},
            f"is 22 GiB and chooses what is recomputed, but {INTERVAL} is 2; leave out one or the "
            "other",
        ),
        (
            {INTERVAL: 4, STRIDE: 2, KEEP: ["attention", "ffn"], KEEP_LAST: 1},
            f"is 22 GiB and chooses what is recomputed, but {INTERVAL} is 4 and {STRIDE} is 2 and "
            f"{KEEP} is attention, ffn and {KEEP_LAST} is 1; leave out one or the other",
        ),
        (
            {BACKEND: "unsloth-ffn"},
            f"is 22 GiB but {BACKEND} is unsloth-ffn, which recomputes the feed-forwards and "
            "nothing else; write unsloth as the backend or leave the budget out",
        ),
        (
            {OFFLOAD: True},
            f"is 22 GiB but {OFFLOAD} is true, which moves what the budget keeps or recomputes; "
            "write false there or leave the budget out",
        ),
    ],
)
def test_what_a_budget_cannot_stand_beside(others, sentence):
    with pytest.raises(ConfigError) as caught:
        load_settings({BUDGET: "22GiB", **others})
    assert str(caught.value) == f"SEG306 error: `{BUDGET}` {sentence}"
    off = load_settings({BUDGET: "22GiB", **others, ON: False})
    assert {finding.code for finding in off.findings} == {"SEG304"}


def test_what_a_budget_can_stand_beside():
    unset = {INTERVAL: 1, STRIDE: None, KEEP: [], KEEP_LAST: "0", OFFLOAD: "off"}
    config = read({BUDGET: 22, BACKEND: "unsloth", PREFETCH: True, BUCKETS: 3, **unset})
    assert config.inputs_on_cpu
    assert load_settings(config).checkpointing == config
    assert config.model_dump(mode="json", by_alias=True)[BUDGET] == "22 GiB"


def test_what_a_block_may_keep():
    assert read({KEEP: "ffn"}).may_keep == ("ffn",)
    assert read({BUDGET: "auto"}).may_keep == ("attention", "cross-attention", "ffn")


def test_backend():
    assert CheckpointingConfig(backend="Torch_FFN").backend == "torch-ffn"
    assert codes({BACKEND: "full"}) == codes({BACKEND: True}) == ["SEG205"]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("gradient_checkpoint_interval", INTERVAL),
        ("gradient-checkpointing-interval", INTERVAL),
        ("GRADIENT_CHECKPOINTING_INTERVAL", INTERVAL),
        ("---gradient_checkpointing", ON),
        ("gradient_checkpointing_stride", STRIDE),
        ("gradient_checkpointing_keep_attention", KEEP),
        ("gradient_checkpointing_offload", OFFLOAD),
        ("gradient_checkpointing_keeplast", KEEP_LAST),
        ("gradientcheckpointing_interval", INTERVAL),
        ("gradient_checkpoiting_interval", INTERVAL),
        ("gradient_chekpointing_interval", INTERVAL),
        ("grad_checkpointing_interval", INTERVAL),
        ("gradient_checkpointing_memory_budget", BUDGET),
    ],
)
def test_unknown_keys_get_the_nearest_real_one(key, nearest):
    with pytest.raises(ConfigError, match=f"`{key}` is not a key; did you mean `{nearest}`"):
        load_settings({key: 2})


def test_leading_dashes_and_both_spellings():
    assert read({"--" + INTERVAL: "3"}).interval == 3
    assert codes({"--" + INTERVAL: 3, INTERVAL: 2}) == ["SEG202"]
    assert codes({"--" + INTERVAL: 3, INTERVAL: 3}) == ["SEG202"]


def test_pairs():
    assert codes({INTERVAL: 4, STRIDE: 2}) == ["SEG301"]
    assert codes({PREFETCH: True}) == ["SEG303"]
    assert read({INTERVAL: 1, STRIDE: 2}).stride == 2
    assert read({INTERVAL: 2, STRIDE: 2}).stride == 2
    warnings = load_settings({STRIDE: 4}).findings
    assert [(w.code, w.severity) for w in warnings] == [("SEG302", "warning")]


def test_what_is_off_stops_nothing():
    settings = load_settings({ON: False, INTERVAL: 4, STRIDE: 2, BUCKETS: "abc", OFFLOAD: True})
    assert settings.checkpointing == CheckpointingConfig(enabled=False)
    assert {f.severity for f in settings.findings} == {"warning"}
    assert {f.key for f in settings.findings} == {INTERVAL, STRIDE, BUCKETS, OFFLOAD}


def test_a_key_that_is_off_and_wrong_is_named_once():
    findings = load_settings({ON: False, BUCKETS: "abc"}).findings
    assert [(f.code, f.key) for f in findings] == [("SEG203", BUCKETS)]


def test_names_of_fields_mean_what_keys_mean():
    assert CheckpointingConfig(enabled="none").enabled is False
    by_key = CheckpointingConfig.model_validate({INTERVAL: 2, KEEP: ["ffn"]})
    assert CheckpointingConfig(interval="2", keep="ffn") == by_key


def test_names_of_fields_are_checked():
    with pytest.raises(ValueError, match="gradient_checkpointing_interva"):
        CheckpointingConfig(gradient_checkpointing_interva=2)


def test_the_other_spelling_is_named():
    for first, second in ((INTERVAL, "--" + INTERVAL), ("--" + INTERVAL, INTERVAL)):
        with pytest.raises(ConfigError, match=f"`{second}` is also given as `{first}`"):
            load_settings({first: 2, second: 2})


def test_numbers_of_numpy():
    assert read({INTERVAL: numpy.int64(3), BUCKETS: numpy.float32(2)}).interval == 3


@pytest.mark.parametrize("nothing", ["false", "{}", "", "[]", None, {}, "None"])
def test_nested_keys_that_say_nothing(nothing):
    assert not load_settings({"tread_config": nothing}).trainer.tread_config


def test_keys_that_are_no_text():
    assert read({3: "x", INTERVAL: 2}).interval == 2


def test_other_keys_are_left_alone():
    config = {
        "learning_rate": "x",
        "use_gradient_checkpointing": 3,
        "nan": float("nan"),
        INTERVAL: 2,
    }
    before = dict(config)
    assert read(config).interval == 2
    assert config == before


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_file_means_what_its_mapping_means(tmp_path, suffix):
    path = tmp_path / f"config.{suffix}"
    lines = {
        "json": json.dumps({"--" + INTERVAL: "2", STRIDE: 4.0, KEEP_LAST: "", "x": {"y": [1]}}),
        "toml": f'"--{INTERVAL}" = "2"\n{STRIDE} = 4.0\n{KEEP_LAST} = ""\n[x]\ny = [1]\n',
    }
    path.write_text(lines[suffix])
    before = path.read_bytes()
    for source in (path, str(path)):
        assert read(source) == CheckpointingConfig(interval=2, stride=4)
    assert path.read_bytes() == before


def test_a_budget_in_toml(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(f"{BUDGET} = 22.5\n")
    assert str(read(path).budget) == "22.5 GiB"
    path.write_text(f'"--{BUDGET}" = "22G"\n')
    with pytest.raises(ConfigError, match=f"config.toml:1:1: SEG203 error: `--{BUDGET}` is"):
        load_settings(path)


def test_a_namespace():
    parsed = argparse.Namespace(
        lr=1e-4, gradient_checkpointing=True, gradient_checkpointing_interval=2
    )
    assert read(parsed).interval == 2
    parser = argparse.ArgumentParser()
    parser.add_argument(f"--{BUDGET}")
    assert str(read(parser.parse_args([f"--{BUDGET}=90%"])).budget) == "90%"
    empty = argparse.Namespace(gradient_checkpointing_interval=None, gradient_checkpointing=False)
    assert read(empty) == CheckpointingConfig(enabled=False)
    assert read(CheckpointingConfig(interval=3)).interval == 3
    with pytest.raises(TypeError, match="config is a int; pass a path"):
        load_settings(3)


def test_a_condition_of_the_wrong_type():
    assert codes({"musubi_blocks_to_swap": "all"}) == ["SEG203"]
    assert codes({"model_family": 3}) == ["SEG203"]


def test_the_schema_file_is_current():
    assert SCHEMA_FILE.read_text("utf-8") == render(), (
        "run python -m simpletuner_segckpt.config_schema"
    )


def test_the_schema_describes_every_key():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == {"$schema", *CHECKPOINTING_KEYS}
    for key in CHECKPOINTING_KEYS:
        entry = schema["properties"][key]
        assert all(entry[part] for part in ("title", "description", "examples")), key
        assert "default" in entry


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"$schema": "segckpt.schema.json", INTERVAL: 2, STRIDE: "4", "other": [1]},
        {ON: "None", INTERVAL: "", STRIDE: None, KEEP: "attention"},
        {"--" + INTERVAL: 2, KEEP: ["attention", "ffn"], BUCKETS: 0},
        *(
            {BUDGET: spelling}
            for spelling in (22, 0.5, "22", " 22.5 GiB", "300mb", "+7TiB", "90%", "9.5 %", "100%")
        ),
        {BUDGET: " Auto "},
        {"--" + BUDGET: "None"},
    ],
)
def test_the_schema_accepts_what_is_read(config):
    jsonschema.validate(config, json_schema())
    _, findings = check_settings(ConfigFile(values=config))
    assert {finding.rule for finding in findings} <= {"unsupported-option", "no-effect"}


@pytest.mark.parametrize(
    "config",
    [
        {INTERVAL: 0},
        {INTERVAL: True},
        {ON: "yes please"},
        {BACKEND: "full"},
        {KEEP: ["mlp"]},
        {"gradient_checkpointing_intervall": 2},
        {"--gradient_checkpointing_stride": 2},
        {BUCKETS: 3.7},
        *({BUDGET: wrong} for wrong in (0, -1, True, "0", "0.0GiB", "-3GiB", "22G", "most")),
        *({BUDGET: wrong} for wrong in ("0%", "101%", "100.1%", "%", ["22GiB"])),
    ],
)
def test_the_schema_refuses_what_is_refused(config):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, json_schema())
    assert codes(config)
