"""The ``segckpt`` command: one subcommand per module with a ``main``."""

import sys
from importlib import import_module
from importlib.metadata import version

from .output import command

# Command -> the module whose main it is, and what it does.
COMMANDS = {
    "validate": ("validate", "check config files and show the schedule of every stack"),
    "launch": ("launch", "run a training script under the schedule of a config"),
    "estimate": ("estimate", "predict peak memory and step time, without a GPU"),
    "plan": ("plan", "find the fastest keys that fit a memory budget"),
    "compare": ("compare", "set predictions beside measurements"),
    "families": ("families", "show which model families are supported, and how"),
    "check": ("check", "prove families on the installed versions"),
    "bench": ("bench", "measure schedules with real training steps"),
    "probe": ("probe", "describe a model that no family file describes"),
}


def main() -> int:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        code: int = import_module(f".{COMMANDS[name][0]}", __package__).main(arguments)
        return code
    usage = "usage: segckpt COMMAND ...\n\ncommands:\n" + "\n".join(
        f"  {each:<10} {text}" for each, (_, text) in COMMANDS.items()
    )
    if name in ("-h", "--help"):
        return command(name)(_show)(usage)
    if name == "--version":
        return command(name)(_show)(version("simpletuner-segckpt"))
    print(f"segckpt: there is no command {name!r}\n{usage}", file=sys.stderr)
    return 2


def _show(text: str) -> int:
    print(text)
    return 0
