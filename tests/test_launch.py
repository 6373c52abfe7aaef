"""Unmodified training scripts under ``segckpt launch``."""

import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from simpletuner_segckpt import ConfigError
from simpletuner_segckpt.commands import launch
from simpletuner_segckpt.install.enablers import ENABLERS

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/launch/train_lora.py"
CONFIG = ROOT / "examples/launch/config.json"  # Flux, interval 2, stride 4
OPTIONS = ("--gradient_checkpointing", "--max_train_steps", "4")


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """No patch outlives a run. What a script is to find until the process ends is put back here."""
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(logging.getLogger("simpletuner_segckpt"), "disabled", False)
    methods = [owner.__dict__.get(name) for owner, name in ENABLERS]
    handlers = list(logging.getLogger().handlers)
    yield
    assert [owner.__dict__.get(name) for owner, name in ENABLERS] == methods
    log = logging.getLogger("simpletuner_segckpt")
    assert (log.handlers, log.level, log.propagate) == ([], logging.NOTSET, True)
    assert logging.getLogger().handlers == handlers


@pytest.fixture
def run(tmp_path, capfd):
    """Run a script's text under a config: the exit code, and what was said of it."""

    def run(text, config=None, *options, arguments=()):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text))
        file = tmp_path / "config.json"
        file.write_text(json.dumps({"gradient_checkpointing_interval": 2} | (config or {})))
        code = launch.main(["--config", str(file), *options, str(script), *arguments])
        return code, capfd.readouterr()

    return run


MODEL = """
import copy, sys
sys.path.append({tests!r})
import torch
from diffusers import ModelMixin
from toys import WithDoor, toy
torch.manual_seed(0)
model, inputs = toy(WithDoor)

class Model(ModelMixin):
    _supports_gradient_checkpointing = True
    gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.blocks = copy.deepcopy(model.blocks)

    def forward(self, hidden_states, temb):
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(block, hidden_states, temb)
            else:
                hidden_states = block(hidden_states, temb)
        return hidden_states

def train(model, steps=3):
    for _ in range(steps):
        model(**inputs).sum().backward()
""".format(tests=str(ROOT / "tests"))


def adapters(folder):
    [file] = folder.glob("*.safetensors")
    return load_file(file)


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--train_text_encoder", "--gradient_accumulation_steps", "2"),
        ("--mixed_precision=bf16",),
    ],
    ids=["lora", "text-encoder", "bf16"],
)
def test_a_script_trains_the_same_adapter(tmp_path, monkeypatch, capfd, options):
    calls = []
    real = torch.utils.checkpoint.checkpoint

    def spy(*args, **kwargs):
        calls.append(torch.is_grad_enabled())
        return real(*args, **kwargs)

    def prepared(self, model, *args, **kwargs):
        """In two processes DDP refuses a model of which nothing is trained."""
        assert any(parameter.requires_grad for parameter in model.parameters())
        return prepare(self, model, *args, **kwargs)

    prepare = Accelerator.prepare_model
    monkeypatch.setattr(Accelerator, "prepare_model", prepared)
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", spy)
    arguments = [*OPTIONS, *options]
    AcceleratorState._reset_state(True)
    plain = tmp_path / "plain"
    launch._script(str(SCRIPT), [*arguments, "--output_dir", str(plain)])()
    plain_calls = len(calls)
    assert plain_calls
    calls.clear()
    AcceleratorState._reset_state(True)
    output = ["--output_dir", str(tmp_path / "launched")]
    assert launch.main(["--config", str(CONFIG), str(SCRIPT), *arguments, *output]) == 0
    AcceleratorState._reset_state(True)
    assert_same(adapters(tmp_path / "launched"), adapters(plain))
    said = capfd.readouterr().err
    accumulated = 2 if "--gradient_accumulation_steps" in options else 1
    forwards = 4 * accumulated
    # Two validations of two steps each, in which nothing is a checkpoint call.
    assert f"FluxTransformer2DModel, forwards: {forwards} training, 4 without gradients" in said
    first = "per-block in 1 (first forward of this shape of call)"
    assert f"transformer_blocks: segmented in {forwards - 1}, {first}" in said
    for drawn in ("  [0 1] 2 3 [4]\n", "  [0 1] 2 3 [4 5]\n"):
        assert drawn in said
    text_encoder = "--train_text_encoder" in options
    assert ("CLIPTextModel is no diffusion model: every block" in said) == text_encoder
    assert ("per-block in 8 (gradient_checkpointing_interval is 1)" in said) == text_encoder
    covered = 3 + 4, 2 + 2  # by themselves in the first forward, in segments from then on
    expected = covered[0] + (forwards - 1) * covered[1] + (4 * forwards if text_encoder else 0)
    assert calls == [True] * expected
    assert expected < plain_calls


def test_two_processes(tmp_path):
    """The same adapter as without the plugin, and one report."""

    def torchrun(*arguments):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, "--nproc-per-node", "2", *arguments],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    options = [*OPTIONS, "--train_text_encoder", "--output_dir"]
    torchrun(str(SCRIPT), *options, str(tmp_path / "plain"))
    module = ["-m", "simpletuner_segckpt.launch", "--config", str(CONFIG), "--text-encoders"]
    ended = torchrun(*module, str(SCRIPT), *options, str(tmp_path / "launched"))
    assert_same(adapters(tmp_path / "launched"), adapters(tmp_path / "plain"))
    for line in (
        "FluxTransformer2DModel, forwards: 4 training, 4 without gradients",
        "CLIPTextModel, forwards: 4 training, 2 without gradients",
        "encoder.layers: segmented in 3",
    ):
        assert ended.stderr.count(line) == 1


def test_a_script_that_never_enables_checkpointing(run):
    code, said = run(MODEL + "train(Model())")
    assert code == 1
    assert "SEG701 no model was switched on" in said.err
    assert "--gradient_checkpointing?" in said.err


def test_a_script_whose_models_never_train(run):
    code, said = run(MODEL + "Model().enable_gradient_checkpointing()")
    assert code == 1
    assert "Model, forwards: none observed\n" in said.err
    assert "SEG702 no training forward ran with checkpointing switched on" in said.err


def test_nothing_that_needs_gradients_is_recomputed(run):
    """All blocks are kept, so the schedule covers none of them."""
    text = MODEL + "it = Model(); it.enable_gradient_checkpointing(); train(it)"
    code, said = run(text, {"gradient_checkpointing_keep_last": 6})
    assert code == 1
    assert "SEG703 nothing was recomputed in any training forward" in said.err


def test_off_is_nothing_to_complain_of(run):
    text = MODEL + "it = Model(); it.enable_gradient_checkpointing(); train(it)"
    code, said = run(text, {"gradient_checkpointing": False})
    assert code == 0
    assert "Model, forwards: 3 with checkpointing switched off" in said.err
    assert run("", {"gradient_checkpointing": False})[0] == 0


def test_disable_and_enable_and_a_function_of_the_scripts_own(run):
    text = """
    it = Model()
    it.enable_gradient_checkpointing(lambda block, *args: block(*args))
    train(it)
    it.disable_gradient_checkpointing()
    train(it, 1)
    with torch.no_grad():
        it(**inputs)
    it.enable_gradient_checkpointing()
    train(it)
    """
    code, said = run(MODEL + textwrap.dedent(text))
    assert code == 0
    assert "is replaced by the schedule" in said.err
    counts = "6 training, 1 without gradients, 1 with checkpointing switched off"
    assert f"Model, forwards: {counts}" in said.err
    assert "blocks: segmented in 5, per-block in 1" in said.err


def test_models_are_not_kept_alive(run):
    text = """
    import gc, weakref
    it = Model()
    it.enable_gradient_checkpointing()
    train(it)
    watched = [weakref.ref(it), weakref.ref(it.blocks)]
    gc.disable()
    del it
    assert [reference() for reference in watched] == [None, None]
    gc.enable()
    """
    code, said = run(MODEL + textwrap.dedent(text))
    assert code == 0
    assert "Model, forwards: 3 training\n" in said.err


def test_a_model_without_blocks_is_left_to_its_library(run):
    text = """
    class Plain(Model):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([model.blocks[0]])
    it = Plain()
    it.enable_gradient_checkpointing()
    train(it)
    """
    code, said = run(MODEL + textwrap.dedent(text))
    assert code == 1
    assert "Plain has no nn.ModuleList of two or more blocks" in said.err
    assert "it is left to its own library's checkpointing" in said.err
    assert "SEG704 no model has the schedule of the config" in said.err


def test_a_schedule_that_a_model_cannot_have_ends_the_run(run):
    """Where it is the one that the config is about, as the first in this script is not."""
    text = """
    from training import model_and_inputs
    Model().enable_gradient_checkpointing()
    print("went on")
    model_and_inputs("prx")[0].enable_gradient_checkpointing()
    print("went further")
    """
    code, said = run(MODEL + textwrap.dedent(text), {"gradient_checkpointing_backend": "torch-ffn"})
    assert code == 1
    assert "SEG704 Model:" in said.err
    assert "left to its own library's checkpointing" in said.err
    assert "`gradient_checkpointing_backend` is torch-ffn" in said.out
    assert "went on" in said.out
    assert "went further" not in said.out


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        ('{"gradient_checkpointing_interval": 0}', 1, "SEG204"),
        ("{", 1, "SEG103"),
        ('{"model_family": "fluxx"}', 1, "SEG401"),
        (None, 2, "SEG001"),
    ],
)
def test_a_wrong_config_runs_nothing(tmp_path, capfd, config, code, message):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    file = tmp_path / "config.json"
    if config is not None:
        file.write_text(config)
    assert launch.main(["--config", str(file), str(script)]) == code
    said = capfd.readouterr()
    assert message in said.out
    assert "ran" not in said.out.splitlines()
    assert launch.main(["--config", str(CONFIG), str(tmp_path / "none.py")]) == 2
    assert "there is no script" in capfd.readouterr().err


def test_a_script_ends_as_it_wants_to(run):
    with pytest.raises(SystemExit) as end:
        run("import sys; sys.exit(7)")
    assert end.value.code == 7
    with pytest.raises(ZeroDivisionError):
        run(MODEL + "it = Model(); it.enable_gradient_checkpointing(); train(it); 1 / 0")
    code, _ = run(MODEL + "it = Model(); it.enable_gradient_checkpointing(); train(it); sys.exit()")
    assert code == 0


def test_a_script_sees_what_it_would_see_alone(run, tmp_path):
    text = """
    import sys
    from pathlib import Path
    import neighbour  # in its own folder
    print(__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
    """
    (tmp_path / "neighbour.py").touch()
    script = tmp_path / "script.py"
    _, said = run(text, None, arguments=["--config", "its own", "-m"])
    expected = ["__main__", script, [str(script), "--config", "its own", "-m"], tmp_path, True]
    assert said.out.splitlines() == [" ".join(map(str, expected))]
    assert sys.modules["__main__"].__file__ == str(script)  # also for what runs at exit


def test_a_module(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/__main__.py").write_text("import sys; print(__package__, sys.argv[1:])")
    assert launch.main(["--config", str(CONFIG), "-m", "trainer", "--steps", "2"]) == 1
    assert capfd.readouterr().out == "trainer ['--steps', '2']\n"
    assert launch.main(["--config", str(CONFIG), "-m", "trainer.nowhere"]) == 2
    assert "there is no module trainer.nowhere" in capfd.readouterr().err


def test_a_script_by_a_relative_path(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("import os, sys; os.chdir('/'); print(__file__, sys.argv[0])")
    launch.main(["--config", str(CONFIG), "script.py"])
    assert capfd.readouterr().out == f"{tmp_path / 'script.py'} script.py\n"


def test_logging_that_disables_what_it_does_not_name(run):
    text = """
    import logging.config
    logging.config.dictConfig({"version": 1})
    it = Model()
    it.enable_gradient_checkpointing()
    train(it)
    logging.config.dictConfig({"version": 1})
    """
    code, said = run(MODEL + textwrap.dedent(text))
    assert code == 0
    assert "segckpt: first training forward of Model" in said.err
    assert "Model, forwards: 3 training" in said.err
    code, said = run("import logging.config; logging.config.dictConfig({'version': 1})")
    assert code == 1
    assert "SEG701" in said.err


@pytest.mark.parametrize("enables", ["never", "before", "after"])
def test_a_script_that_applies_a_schedule_of_its_own(run, enables):
    enable = "it.enable_gradient_checkpointing()"
    text = f"""
    import simpletuner_segckpt
    it = Model()
    {enable if enables == "before" else ""}
    own = simpletuner_segckpt.apply(it, {{"gradient_checkpointing_interval": 3}})
    {enable if enables == "after" else ""}
    train(it)
    assert [len(segment) for segment in own.effect["blocks"].segments] == [3, 3]
    """
    code, said = run(MODEL + textwrap.dedent(text))
    assert code == 0
    assert said.err.count("the script itself applied, and keeps it") == 1
    assert "    [0 1 2] [3 4 5]" in said.err


def test_an_error_of_the_scripts_own_is_its_own(run):
    with pytest.raises(ConfigError):
        run(
            MODEL + "from simpletuner_segckpt import apply; apply(Model(), {'--config': 1,"
            "'gradient_checkpointing_interval': 0})"
        )


def test_a_copy_is_what_trains(run):
    text = "it = Model(); it.enable_gradient_checkpointing(); train(copy.deepcopy(it))"
    code, said = run(MODEL + text)
    assert code == 0
    assert "Model, forwards: 3 training" in said.err


def test_blocks_that_are_only_reached_past_the_forward(run):
    text = """
    it = Model()
    it.enable_gradient_checkpointing()
    it.forward(**inputs).sum().backward()
    """
    code, said = run(MODEL + textwrap.dedent(text))
    assert code == 0
    assert "past the model's forward: 6 blocks, per-block" in said.err


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_a_model_inside_another_one(run, first):
    text = f"""
    class Outer(Model):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def forward(self, hidden_states, temb):
            return self.inner(super().forward(hidden_states, temb), temb)

    it = Outer()
    for model in {"it.inner, it" if first == "inner" else "it, it.inner"}:
        model.enable_gradient_checkpointing()
    train(it)
    """
    code, said = run(MODEL + textwrap.dedent(text))
    assert code == 0
    assert said.err.count("SEG501") == 2  # at once, and in the end
    assert "has a schedule already" in said.err


TEXT_ENCODER = """
from transformers import CLIPTextConfig, CLIPTextModel
config = CLIPTextConfig(
    vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2
)
encoder = CLIPTextModel(config).train()
older = encoder.gradient_checkpointing_enable
getattr(encoder, "activation_checkpointing_enable", older)()
import torch
tokens = torch.zeros(1, 4, dtype=torch.long)
for _ in range(2):
    encoder(tokens).last_hidden_state.sum().backward()
"""


@pytest.mark.parametrize(
    ("config", "options", "code", "drawn"),
    [
        ({}, (), 1, "[0] [1] [2] [3]"),
        ({}, ("--text-encoders",), 0, "[0 1] [2 3]"),
        ({"gradient_checkpointing_interval": None}, (), 0, "[0] [1] [2] [3]"),
        ({"gradient_checkpointing": False}, (), 0, None),
        ({"fsdp_enable": True, "fsdp_activation_checkpointing": True}, (), 1, None),
    ],
)
def test_a_text_encoder_alone(run, config, options, code, drawn):
    ended, said = run(TEXT_ENCODER, config, *options)
    assert ended == code
    assert said.err.count("is no diffusion model") == (
        "--text-encoders" not in options and config.get("gradient_checkpointing", True)
    )
    assert "SEG304" not in said.err
    if drawn:
        assert f"segckpt:     {drawn}\n" in said.err
    else:
        assert "CLIPTextModel, forwards: 2 with checkpointing switched off" in said.err
    assert ("SEG704" in said.err) == bool(code)


def test_only_the_first_process_decides(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    code, said = run("")
    assert (code, said.err) == (0, "")
