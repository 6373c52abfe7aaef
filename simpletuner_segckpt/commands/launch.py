"""``segckpt launch``: run a training script, unmodified, under the schedule of a config.

    python -m simpletuner_segckpt.launch --config config.json train.py --gradient_checkpointing ...
    accelerate launch -m simpletuner_segckpt.launch --config config.json train.py ...
    torchrun --nproc-per-node 2 -m simpletuner_segckpt.launch --config config.json train.py ...
    python -m simpletuner_segckpt.launch simpletuner train

Every model for which the script enables gradient checkpointing gets its schedule, and every one
that trains and is of a known class. SimpleTuner's own config is found. What runs is
said on standard error, by the first process, which also decides: the exit code is the script's, or
1 when it ended well but nothing that the config asks for took effect or the schedule was refused,
or 2 when it could not be started.
"""

import argparse
import builtins
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from ..config.file import read_config_file
from ..config.settings import check_settings
from ..config.simpletuner import config_of_trainer
from ..config_schema import PREFIX
from ..families.registry import FamilyRegistry
from ..messages.errors import FamilyError, UsageError, reason_of
from ..messages.findings import CODES
from ..messages.log import logger
from ..private.of_simpletuner import package_folder
from ..schedules.checked_file import Checked, check_file
from . import simpletuner
from .output import command, refuse
from .printing import print_text


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="segckpt launch",
        description="Run a training script as it is. Every model for which it enables gradient "
        "checkpointing, or that trains and is of a class that a family names, gets the schedule of "
        "the config.",
        epilog="exit codes: the script's own; 1 when it ended well but nothing that the config "
        "asks for took effect, or the config is wrong; 2 could not run",
    )
    made.add_argument(
        "--config",
        metavar="FILE",
        help="JSON, TOML or env; for SimpleTuner by default the file that it reads itself",
    )
    made.add_argument(
        "--model",
        type=_class_path,
        default=None,
        metavar="PACKAGE.MODULE:CLASS",
        help="a class whose models get the schedule in their first training forward, as those of "
        "classes that families name do",
    )
    made.add_argument(
        "--native",
        action="store_true",
        help="classes with set_gradient_checkpointing_* methods (SimpleTuner's) carry the keys out "
        "themselves, in their own way",
    )
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
    first = os.environ.get("RANK", "0") == "0"
    of_simpletuner = simpletuner.is_trainer(options.script, options.module)
    try:
        if simpletuner.is_command(options.script, options.module):
            return simpletuner.start(_passed_on(options), options.arguments)
        config = options.config or _found_config(of_simpletuner)
        registry = FamilyRegistry.default(options.families)
        file = read_config_file(config)
        checked = check_file(file, registry)
        settings, _ = check_settings(file)
        if checked.exit_code or settings is None:
            return _refused(checked, first)
        start = _module if options.module else _script
        run = start(options.script, options.arguments)
    except (FamilyError, UsageError) as error:
        return refuse("launch", str(error))

    from ..install.launched import Refused
    from ..install.scheduled import scheduled

    with (
        _told(first),
        scheduled(
            settings,
            registry,
            text_encoders=options.text_encoders,
            asked_for=options.model or "",
            native=options.native,
        ) as found,
    ):
        try:
            if not settings.checkpointing.enabled:
                logger.info("`%s` is off in %s: nothing is recomputed", PREFIX, config)
            if of_simpletuner:
                if not options.config:
                    logger.info("%s is read, as SimpleTuner does", config)
                simpletuner.make_keys_known(native=options.native)
            run()
        except Refused as error:
            return _refused(Checked(str(config), list(error.findings)), first)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        finally:
            if first:
                _report(line for model in found.models for line in model.lines())
        shortfall = found.shortfall() if first else None
        if shortfall is None:
            return 0
        rule, reason = shortfall
        _report([f"{CODES[rule]} {reason}"])
        return 1


def _found_config(of_simpletuner: bool) -> str:
    """The config of a script that is SimpleTuner's. Raises ``UsageError``."""
    if not of_simpletuner:
        raise UsageError("--config FILE is needed: it holds the gradient_checkpointing keys")
    return str(config_of_trainer(os.environ, package_folder()))


def _passed_on(options: argparse.Namespace) -> list[str]:
    """The options of this command for one that another process runs."""
    given = ["--native"] if options.native else []
    given += ["--text-encoders"] if options.text_encoders else []
    for folder in options.families:
        given += ["--families", folder]
    if options.config:
        given += ["--config", os.path.abspath(options.config)]
    if options.model:
        module, _, name = options.model.rpartition(".")
        given += ["--model", f"{module}:{name}"]
    return given


def _class_path(written: str) -> str:
    """The dotted path of a class that is written as ``package.module:Class``."""
    module, colon, name = written.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))):
        raise argparse.ArgumentTypeError(f"{written} is no package.module:Class")
    return f"{module}.{name}"


def _refused(checked: Checked, first: bool) -> int:
    return _show(checked) if first else checked.exit_code


@command("launch")
def _show(checked: Checked) -> int:
    print_text([checked])
    return checked.exit_code


def _report(lines: Iterable[str]) -> None:
    """Past the logger, which a script's own logging may have turned down or off."""
    with suppress(OSError, ValueError):  # closed
        for line in lines:
            print(f"segckpt: {line}", file=sys.stderr, flush=True)


def _script(script: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Runs a script as Python itself would, as ``__main__`` to the end of the process.

    Raises ``UsageError`` when there is no such file, or it cannot be read.
    """
    try:
        text = Path(script).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"there is no script {script}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"the script {script} cannot be read: {reason_of(error)}") from None
    path = os.path.abspath(script)
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path = [os.path.dirname(path), *sys.path[1:]]

    def run() -> None:
        main = ModuleType("__main__")
        loader = SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __loader__=loader, __builtins__=builtins)
        code = compile(text, path, "exec", dont_inherit=True)
        sys.modules["__main__"] = main
        exec(code, main.__dict__)

    return run


def _module(name: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Runs a module as ``python -m`` would. Raises ``UsageError`` when there is none."""
    sys.argv = [name, *arguments]
    if not sys.flags.safe_path:
        sys.path = [os.getcwd(), *sys.path[1:]]
    try:
        found = find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UsageError(f"there is no module {name}")

    def run() -> None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return run


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
