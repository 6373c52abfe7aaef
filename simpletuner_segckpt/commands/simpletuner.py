"""SimpleTuner's trainer under ``segckpt launch``: its own config may hold all of our keys.

Its parser ends on options that it does not know, so those of this package are taken out of what it
parses. So are its own of a schedule: the setters of its model classes would carry them out as well,
in ways of their own, and refuse what these classes cannot do.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..config_schema import CHECKPOINTING_KEYS, OWN_KEYS, PREFIX
from ..messages.errors import UsageError
from ..messages.log import logger
from ..private import of_simpletuner

PACKAGE = "simpletuner"
SCRIPT = "train.py"


def is_trainer(script: str, is_module: bool) -> bool:
    """Whether ``script`` is SimpleTuner's training script."""
    if is_module:
        return script == f"{PACKAGE}.train"
    path = Path(script)
    return path.name == SCRIPT and (path.parent / "helpers/configuration/cmd_args.py").is_file()


def is_command(script: str, is_module: bool) -> bool:
    """Whether ``script`` is SimpleTuner's own command, which starts that script."""
    if is_module:
        return script in (PACKAGE, f"{PACKAGE}.cli")
    path = Path(script)
    return path.stem == PACKAGE and path.suffix in ("", ".exe") and not path.is_dir()


def make_keys_known(*, native: bool) -> None:
    """Have SimpleTuner's parser take configs with our keys.

    Unless ``native``, what its own keys of a schedule say is not for its model classes.
    """
    parser = of_simpletuner.argument_parser()
    if parser is None:
        logger.warning(
            "SimpleTuner %s has no %s: its parser may end on %s",
            _version(),
            of_simpletuner.PARSER,
            " and ".join(OWN_KEYS),
        )
        return
    parse = parser.parse_args
    ours = [] if native else [key for key in CHECKPOINTING_KEYS if key != PREFIX]

    def parse_args(args: Sequence[str] | None = None, namespace: Any = None) -> Namespace:
        given = _without_own(sys.argv[1:] if args is None else args)
        parsed: Namespace = parse(given, namespace)
        for key in ours:
            if key in parsed:
                setattr(parsed, key, parser.get_default(key))
        return parsed

    parser.parse_args = parse_args  # type: ignore[method-assign, assignment]


def _without_own(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments without the options of ours, and their values."""
    left: list[str] = []
    drops = False
    for argument in arguments:
        if argument.startswith("--"):
            option = argument.removeprefix("--").partition("=")[0]
            drops = option.replace("-", "_") in OWN_KEYS
        if not drops:
            left.append(argument)
    return left


def start(launching: Sequence[str], arguments: Sequence[str]) -> int:
    """Run ``simpletuner`` with these arguments, and the script that it starts under ``launch``.

    ``launching`` are the options of that. Returns the exit code. Raises ``UsageError``.
    """
    if list(arguments[:1]) != ["train"]:
        raise UsageError("of SimpleTuner's commands `simpletuner train` can be launched")
    from simpletuner.cli import main  # type: ignore[import-not-found]

    sys.argv = [PACKAGE, *arguments]
    with _launching(["-m", "simpletuner_segckpt.launch", *launching]) as started:
        code: int = main() or 0
    if not started and not code:
        raise UsageError("SimpleTuner ended without starting its trainer")
    return code


@contextmanager
def _launching(options: Sequence[str]) -> Iterator[list[bool]]:
    """Within this, the script that SimpleTuner's command starts is one that ``launch`` runs."""
    module = of_simpletuner.starter()
    if module is None:
        raise UsageError(
            f"SimpleTuner {_version()} has no {of_simpletuner.STARTER}, which starts its trainer; "
            "launch that: segckpt launch -m simpletuner.train"
        )
    started: list[bool] = []

    def popen(command: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        places = [k for k, word in enumerate(command) if is_trainer(word, is_module=False)]
        if not places:
            raise UsageError(f"SimpleTuner starts {' '.join(command)}, without its {SCRIPT}")
        started.append(True)
        before, after = command[: places[0]], command[places[0] :]
        return subprocess.Popen([*before, *options, *after], *args, **kwargs)

    own = module.subprocess
    module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": popen})  # type: ignore[attr-defined]
    try:
        yield started
    finally:
        module.subprocess = own  # type: ignore[attr-defined]


def _version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:  # a checkout
        return "(a checkout)"
