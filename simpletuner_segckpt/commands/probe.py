"""``segckpt probe``: describe a model that no family file describes.

The same record that proves segments (see ``recording``) says which lists of blocks a model's
forward runs through, what passes between the blocks, and why a list cannot be segmented. From
that comes the family file to start from.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from ..messages.errors import SegckptError
from ..verify.probe import probe, render
from .output import OutputError, command, refuse


@command("probe")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="segckpt probe",
        description="Describe a model: prints the family file to start from.",
    )
    parser.add_argument(
        "source",
        metavar="MODULE:CALLABLE",
        help="a function without arguments that returns the model and a dict of inputs",
    )
    options = parser.parse_args(arguments)
    module, _, name = options.source.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        model, inputs = getattr(importlib.import_module(module), name)()
        found = render(probe(model, inputs))
    except OutputError:
        raise
    except Exception as error:  # the model and its inputs are somebody else's code
        text = str(error) if isinstance(error, SegckptError) else f"{type(error).__name__}: {error}"
        return refuse("probe", f"{options.source}: {text}")
    print(found, end="")
    return 0
