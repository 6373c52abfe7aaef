"""Names of SimpleTuner that are used to run its trainer under a schedule (as of 4.10.1).

Nothing of it is imported but where it is what runs.
"""

from argparse import ArgumentParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# The module whose function makes its parser, once a process.
PARSER = "simpletuner.helpers.configuration.cmd_args.get_argument_parser"
# The command that starts its script, and the module by which that starts processes.
STARTER = "simpletuner.cli.train.subprocess"
# What is imported first, for every logger to be of the class that this sets.
_LOGGING = "simpletuner.helpers.logging"


def package_folder() -> Path | None:
    """Where SimpleTuner is installed."""
    found = find_spec("simpletuner")
    places = list(found.submodule_search_locations or ()) if found else []
    return Path(places[0]) if places else None


def argument_parser() -> ArgumentParser | None:
    """The parser that its script will use; None where it has none of this name."""
    module, _, name = PARSER.rpartition(".")
    try:
        import_module(_LOGGING)
        made = getattr(import_module(module), name)()
        kept = getattr(import_module(module), name)()
    except Exception:  # whatever a changed package does
        return None
    return made if isinstance(made, ArgumentParser) and made is kept else None


def starter() -> ModuleType | None:
    """The module of its command ``simpletuner train``; None where that is not as it was."""
    module, _, name = STARTER.rpartition(".")
    try:
        found = import_module(module)
        return found if hasattr(getattr(found, name), "Popen") else None
    except Exception:  # whatever a changed package does
        return None
