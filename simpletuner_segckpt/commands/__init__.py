"""The ``segckpt`` command: one subcommand per module with a ``main``."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version

from ..messages.log import only_our_words
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
        return run(name, arguments)
    usage = "usage: segckpt COMMAND ...\n\ncommands:\n" + "\n".join(
        f"  {each:<10} {text}" for each, (_, text) in COMMANDS.items()
    )
    if name in ("-h", "--help"):
        return command(name)(_show)(usage)
    if name == "--version":
        return command(name)(_show)(version("simpletuner-segckpt"))
    print(f"segckpt: there is no command {name!r}\n{usage}", file=sys.stderr)
    return 2


def run(name: str, arguments: Sequence[str]) -> int:
    """The exit code of a command, loaded and run without what other libraries tell meanwhile."""
    # The script that is launched is somebody else's, and may say what it likes.
    with nullcontext() if name == "launch" else only_our_words():
        code: int = import_module(f".{COMMANDS[name][0]}", __package__).main(arguments)
    return code


def _show(text: str) -> int:
    print(text)
    return 0
