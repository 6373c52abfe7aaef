"""SimpleTuner under ``segckpt launch``: its config, its parser and its command.

The package is a stand-in with the names that are used of it; its trainer itself is run by
``make trainers``.
"""

import json
import os
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

from simpletuner_segckpt.commands import launch, simpletuner
from simpletuner_segckpt.config.simpletuner import config_of_trainer
from simpletuner_segckpt.messages.errors import UsageError
from simpletuner_segckpt.private import of_simpletuner

FILES = {
    "__init__.py": "",
    "__main__.py": "",
    "helpers/__init__.py": "",
    "helpers/logging.py": "",
    "helpers/configuration/__init__.py": "",
    "helpers/configuration/cmd_args.py": """
        import argparse

        made = None

        def get_argument_parser():
            global made
            if made is None:
                made = argparse.ArgumentParser(exit_on_error=False)
                made.add_argument("--gradient_checkpointing", default=True)
                made.add_argument("--gradient_checkpointing_interval", type=int)
                made.add_argument("--gradient_checkpointing_backend", default="torch")
                made.add_argument("--resolution", type=int)
            return made
        """,
    "cli/__init__.py": """
        from .train import main
        """,
    "cli/train.py": """
        import subprocess
        import sys
        from pathlib import Path

        def main():
            script = Path(__file__).parent.parent / "train.py"
            words = [sys.executable, "-c", "import sys; print(*sys.argv[1:])"]
            return subprocess.Popen([*words, str(script), "--resolution=64"]).wait()
        """,
    "train.py": """
        import json
        import sys

        import torch
        from simpletuner.helpers.configuration.cmd_args import get_argument_parser
        from toys import WithDoor, toy

        words = []
        for key, value in json.load(open("config/config.json")).items():
            words += [f"--{key}={v}" for v in (value if isinstance(value, list) else [value])]
        print(vars(get_argument_parser().parse_args(words)))
        model, inputs = toy(WithDoor)
        model.enable_gradient_checkpointing()
        for _ in range(2):
            model(**inputs).sum().backward()
        """,
}


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """The stand-in, and an empty folder to work in."""
    package = tmp_path / "site/simpletuner"
    for name, text in FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(textwrap.dedent(text))
    work = tmp_path / "work"
    (work / "config").mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "site"), *sys.path])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("ENV", "CONFIG_PATH", "CONFIG_BACKEND", "CONFIG_TYPE"):
        monkeypatch.delenv(name, raising=False)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "simpletuner"]:
        del sys.modules[name]


def write(values, path="config/config.json"):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(values))


KEYS = {
    "gradient_checkpointing_interval": 2,
    "gradient_checkpointing_keep_last": 1,
    "gradient_checkpointing_keep": ["attention", "cross-attention"],
    "resolution": 64,
}


def test_its_script_within_a_budget(trainer, capfd):
    write({"gradient_checkpointing_budget": "22GiB", "resolution": 64})
    assert launch.main(["-m", "simpletuner.train"]) == 0
    said = capfd.readouterr()
    assert "'resolution': 64" in said.out
    assert "budget" not in said.out
    assert "budget: 22 GiB; what is recomputed" in said.err


@pytest.mark.parametrize("by", ["module", "path"])
@pytest.mark.parametrize("native", [False, True])
def test_its_script_with_our_keys_in_its_own_config(trainer, capfd, by, native):
    """Its parser sees none of the schedule, unless its classes are to carry it out."""
    write(KEYS)
    script = ["-m", "simpletuner.train"] if by == "module" else [str(trainer / "train.py")]
    assert launch.main(["--native", *script] if native else script) == 0
    said = capfd.readouterr()
    parsed = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_interval": 2 if native else None,
        "gradient_checkpointing_backend": "torch",
        "resolution": 64,
    }
    assert said.out == f"{parsed}\n"
    assert "config/config.json is read, as SimpleTuner does" in said.err
    assert "    [0 1] [2 3] [4]" in said.err


def test_a_config_that_is_named(trainer, capfd):
    write({"resolution": 64})
    write({"gradient_checkpointing_interval": 3}, "other.json")
    assert launch.main(["--config", "other.json", "-m", "simpletuner.train"]) == 0
    assert "    [0 1 2] [3 4 5]" in capfd.readouterr().err


def test_off_is_said(trainer, capfd):
    write({"gradient_checkpointing": False})
    assert launch.main(["-m", "simpletuner.train"]) == 0
    said = capfd.readouterr().err
    assert "`gradient_checkpointing` is off in config/config.json: nothing is recomputed" in said
    assert "WithDoor, forwards: 2 with checkpointing switched off" in said


@pytest.mark.parametrize("script", [["simpletuner"], ["-m", "simpletuner"]])
def test_its_command_starts_the_script_under_launch(trainer, capfd, script):
    own = import_module("simpletuner.cli.train").subprocess
    options = ["--config", "my.json", "--native", "--model", "a.b:C", "--families", "mine"]
    assert launch.main([*options, *script, "train", "env=x"]) == 0
    given = f"--native --families mine --config {os.path.abspath('my.json')} --model a.b:C"
    expected = f"-m simpletuner_segckpt.launch {given} {trainer / 'train.py'} --resolution=64\n"
    assert capfd.readouterr().out == expected
    assert import_module("simpletuner.cli.train").subprocess is own is subprocess
    assert launch.main([*script, "server"]) == 2
    assert "of SimpleTuner's commands `simpletuner train` can be launched" in capfd.readouterr().err


def test_a_version_with_other_names(trainer, capfd):
    """A warning that says what was looked for, or what to launch instead."""
    write({"resolution": 64})
    (trainer / "helpers/configuration/cmd_args.py").write_text("get_argument_parser = None\n")
    with pytest.raises(TypeError):  # of the stand-in
        launch.main(["-m", "simpletuner.train"])
    assert f"has no {of_simpletuner.PARSER}: its parser may end on" in capfd.readouterr().err
    (trainer / "cli/train.py").write_text("def main(): return 0\n")
    assert launch.main(["simpletuner", "train"]) == 2
    assert f"has no {of_simpletuner.STARTER}" in capfd.readouterr().err


def test_another_script_needs_a_config(tmp_path, capfd):
    (tmp_path / "train.py").touch()
    assert launch.main([str(tmp_path / "train.py")]) == 2
    assert "--config FILE is needed" in capfd.readouterr().err


def test_options_of_ours_go_with_their_values():
    prefix = "--gradient_checkpointing_keep"
    words = f"--a=1 {prefix} attention ffn --b c {prefix.replace('_', '-')}-last=2"
    assert simpletuner._without_own(words.split()) == ["--a=1", "--b", "c"]


@pytest.mark.parametrize(
    ("files", "variables", "found"),
    [
        (["config/config.json", "config/config.toml"], {}, "config/config.json"),
        (["config/config.toml", "config/config.env"], {}, "config/config.toml"),
        (["config/config.env"], {}, "config/config.env"),
        (["config/config.json", "config/a/config.toml"], {"ENV": "a"}, "config/a/config.toml"),
        (["config/config.json", "a/config.json"], {"ENV": "a"}, "a/config.json"),
        (["config/a/config.json", "config/b/config.json"], {"ENV": "b", "SIMPLETUNER_ENV": "a"}, 0),
        (["config/config.json", "config/config.toml"], {"CONFIG_BACKEND": "TOML"}, 1),
        (["config/config.json", "x/y.json"], {"CONFIG_PATH": "x/y"}, 1),
        (["config/config.json", "x/config.json"], {"CONFIG_PATH": "x"}, 1),
        (["site/examples/e/config.json"], {"ENV": "examples/e"}, "site/examples/e/config.json"),
    ],
)
def test_the_config_that_it_reads(tmp_path, monkeypatch, files, variables, found):
    monkeypatch.chdir(tmp_path)
    for file in files:
        write({}, file)
    expected = found if isinstance(found, str) else files[found]
    assert config_of_trainer(variables, Path("site")) == Path(expected)


def test_a_config_that_an_env_file_chooses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write({}, "config/a/config.json")
    Path("config/config.env").write_text("export ENV='a'\n# ENV=b\n")
    assert config_of_trainer({}) == Path("config/a/config.json")
    with pytest.raises(UsageError, match=r"config/a/config\.toml; name it with --config"):
        config_of_trainer({"CONFIG_TYPE": "toml"})
    with pytest.raises(UsageError, match="from the command line"):
        config_of_trainer({"CONFIG_TYPE": "cmd"})
