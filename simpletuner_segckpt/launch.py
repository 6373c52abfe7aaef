"""``segckpt launch``: run a training script, unmodified, under the schedule of a config.

    python -m simpletuner_segckpt.launch --config config.json train.py --gradient_checkpointing ...
    accelerate launch -m simpletuner_segckpt.launch --config config.json train.py ...
    torchrun --nproc-per-node 2 -m simpletuner_segckpt.launch --config config.json train.py ...

Every model for which the script enables gradient checkpointing gets its schedule. What runs is
said on standard error, by the first process. The exit code is the script's, or 1 when it ended
well but nothing that the config asks for took effect or the schedule was refused, or 2 when it
could not be started.
"""

import argparse
import logging
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ConfigError, FamilyError, UnknownFamily
from .estimate import print_findings
from .messages import logger, warn
from .output import refuse
from .registry import FamilyRegistry
from .settings import load_settings
from .validate import printable

if TYPE_CHECKING:
    from .launching import Launched


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="segckpt launch",
        description="Run a training script as it is. Every model for which it enables gradient "
        "checkpointing gets the schedule of the config.",
        epilog="exit codes: the script's own; 1 when it ended well but nothing that the config "
        "asks for took effect, or the config is wrong; 2 could not run",
    )
    made.add_argument("--config", required=True, metavar="FILE", help="JSON or TOML")
    made.add_argument(
        "--text-encoders",
        action="store_true",
        help="text encoders get the schedule as well; otherwise every block of theirs is "
        "recomputed by itself",
    )
    made.add_argument(
        "--families", action="append", default=[], metavar="DIR", help="folder of family files"
    )
    made.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    made.add_argument("script", metavar="SCRIPT", help="the training script")
    made.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not options.module and not Path(options.script).is_file():
        return refuse("launch", f"there is no script {printable(options.script)}")
    try:
        settings = load_settings(options.config)
        registry = FamilyRegistry.default(options.families)
    except ConfigError as error:
        return print_findings(options.config, error)
    except (FamilyError, UnknownFamily) as error:
        return refuse("launch", printable(str(error)))

    from .launching import scheduled

    first = os.environ.get("RANK", "0") == "0"
    with _told(first), scheduled(settings, registry, text_encoders=options.text_encoders) as run:
        try:
            _run(options.script, options.arguments, options.module)
        except ConfigError as error:
            return print_findings(options.config, error)
        finally:
            for line in run.lines():
                logger.info("%s", line)
        return _exit_code(run)


def _exit_code(run: "Launched") -> int:
    shortfall = run.shortfall()
    if shortfall:
        warn(*shortfall)
    return int(bool(shortfall))


def _run(script: str, arguments: Sequence[str], module: bool) -> None:
    """Run a script as Python itself would. Raises what it raises, ``SystemExit`` but for 0."""
    argv, path = sys.argv, sys.path
    sys.argv = [script, *arguments]
    sys.path = [os.getcwd() if module else str(Path(script).resolve().parent), *path[1:]]
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.path = argv, path


@contextmanager
def _told(first: bool) -> Iterator[None]:
    """What this package says goes to standard error, once for all processes of a run."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("segckpt: %(message)s"))
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if first else logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


if __name__ == "__main__":
    sys.exit(main())
