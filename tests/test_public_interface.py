"""What users rely on is what it was: names, parameters, codes, commands, JSON, family files.

``public_interface.json`` was made before the package got its present folders; since then `--gpu` of
``compare`` is gone, and the key and the codes of a memory budget and ``plan --buckets`` came.
Whoever changes it changes what scripts and configs out there see. To write it anew: ``python
tests/test_public_interface.py``.
"""

import inspect
import json
import re
import sys
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from io import StringIO
from pathlib import Path
from runpy import run_module
from tempfile import TemporaryDirectory

import simpletuner_segckpt
from simpletuner_segckpt.messages.findings import RULES, WARNINGS

RECORD = Path(__file__).with_name("public_interface.json")
COMMANDS = "validate launch estimate plan compare families check bench probe".split()
MODULES = "validate launch check".split()  # python -m simpletuner_segckpt.NAME
CONFIG = {
    "model_family": "flux",
    "gradient_checkpointing_interval": "two",
    "gradient_checkpointing_segment_stride": 4,
}


def parameters(function):
    """Names, in order; those with a default end in ``=``, keyword-only ones begin with ``*``."""
    return [
        ("*" if p.kind is p.KEYWORD_ONLY else "**" if p.kind is p.VAR_KEYWORD else "")
        + p.name
        + ("=" if p.default is not p.empty else "")
        for p in inspect.signature(function).parameters.values()
    ]


def described(value):
    if not inspect.isclass(value):
        return parameters(value)
    own = [base for base in value.__mro__ if base.__module__.startswith("simpletuner_segckpt")]
    names = sorted({name for base in own for name in vars(base) if not name.startswith("_")})
    members = {
        name: parameters(member) if inspect.isroutine(member := getattr(value, name, None)) else ""
        for name in names
    }
    bases = [base.__name__ for base in value.__mro__[1:] if not base.__name__.startswith("_")]
    fields = sorted(getattr(value, "model_fields", {}))
    return {"bases": bases, "fields": fields, "members": members}


def keys_in(value, path=""):
    """The paths of keys in a JSON document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}.{key}"
            yield from keys_in(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from keys_in(inner, f"{path}[]")


def json_keys(config):
    with TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config), "utf-8")
        code, out = ended(main_of("validate"), ["--output-format", "json", str(path)])
    return [code, *sorted(set(keys_in(json.loads(out))))]


def main_of(command):
    return import_module(f"simpletuner_segckpt.commands.{command}").main


def ended(main, arguments):
    """The exit code of a command, and what it printed."""
    with redirect_stdout(StringIO()) as out:
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue()


def options_of(command):
    out = ended(main_of(command), ["-h"])[1]
    return sorted(set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", out)))


def module_command(name):
    """The exit code of ``python -m simpletuner_segckpt.NAME -h``."""
    before = sys.argv
    sys.argv = [name, "-h"]
    try:
        run = partial(run_module, f"simpletuner_segckpt.{name}", run_name="__main__")
        return ended(lambda _: run(), [])[0]
    finally:
        sys.argv = before


def codes():
    return {code: name for code, (name, _) in (RULES | WARNINGS).items()}


def public_interface():
    names = simpletuner_segckpt.__all__
    return {
        "names": {name: described(getattr(simpletuner_segckpt, name)) for name in sorted(names)},
        "codes": codes(),
        "scripts": [p.name for p in entry_points(group="console_scripts") if p.name == "segckpt"],
        "commands": {name: options_of(name) for name in COMMANDS},
        "modules": {name: module_command(name) for name in MODULES},
        "validate, right": json_keys(CONFIG | {"gradient_checkpointing_interval": 2}),
        "validate, wrong": json_keys(CONFIG),
        "family file": simpletuner_segckpt.Family.model_json_schema(),
    }


def test_it_is_what_it_was():
    before, now = json.loads(RECORD.read_text("utf-8")), public_interface()
    for part, expected in before.items():
        assert json.loads(json.dumps(now[part])) == expected, part


if __name__ == "__main__":
    RECORD.write_text(json.dumps(public_interface(), indent=1, sort_keys=True) + "\n", "utf-8")
