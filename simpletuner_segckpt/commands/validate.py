"""``segckpt validate``: check config files, and show what would happen to every block.

Exit codes: 0 nothing wrong, 1 errors found, 2 could not run (unreadable file, bad usage).
No torch is imported.
"""

import argparse
from collections.abc import Sequence

from ..config.file import read_config_file
from ..families.registry import FamilyRegistry
from ..messages.errors import FamilyError, UnknownFamily, UsageError
from ..messages.findings import RULES
from ..schedules.checked_file import check_file, engine_plan, native_plan, read_model_config
from ..schedules.report import MOST_BLOCKS
from .output import command, refuse
from .printing import PRINTERS

FORMATS = ("text", "json", "github")


def parser() -> argparse.ArgumentParser:
    rules = "\n".join(f"  {code}  {name}: {text}" for code, (name, text) in RULES.items())
    made = argparse.ArgumentParser(
        prog="segckpt validate",
        description="Check the gradient_checkpointing keys of config files, and show the "
        "schedule of every stack of blocks.",
        epilog=f"rules:\n{rules}\n\nexit codes: 0 nothing wrong, 1 errors, 2 could not run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "files", nargs="+", metavar="FILE", help="JSON, TOML or env; - for standard input"
    )
    made.add_argument("--family", help="model family, instead of the file's model_family")
    made.add_argument("--model", metavar="DIR", help="diffusers folder whose config.json to read")
    made.add_argument(
        "--blocks", action="append", default=[], metavar="STACK=N", help="blocks in a stack"
    )
    made.add_argument(
        "--families", action="append", default=[], metavar="DIR", help="folder of family files"
    )
    made.add_argument(
        "--native",
        action="store_true",
        help="show what SimpleTuner's own class makes of the keys, instead of this package",
    )
    made.add_argument("--output-format", choices=FORMATS, default="text")
    return made


@command("validate")
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        registry = FamilyRegistry.default(options.families)
        if options.family:
            registry.find(options.family)
        model_config = read_model_config(options.model) if options.model else None
        blocks = dict(map(_stack_and_count, options.blocks))
        plan = native_plan if options.native else engine_plan
        checked = [
            check_file(read_config_file(name), registry, options.family, model_config, blocks, plan)
            for name in options.files
        ]
    except (UsageError, FamilyError, UnknownFamily) as error:
        return refuse("validate", str(error))
    PRINTERS[options.output_format](checked)
    return max(result.exit_code for result in checked)


def _stack_and_count(option: str) -> tuple[str, int]:
    path, _, count = option.rpartition("=")
    if not path or count not in map(str, range(1, MOST_BLOCKS + 1)):
        raise UsageError(f"--blocks {option}: write STACK=N with N from 1 to {MOST_BLOCKS}")
    return path, int(count)
