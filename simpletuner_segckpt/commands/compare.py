"""``segckpt compare``: predictions beside what ``segckpt bench`` measured.

Exit codes: 0 compared, 2 could not run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..bench.comparison import table_of
from ..families.registry import FamilyRegistry
from ..messages.errors import SegckptError, UsageError
from .output import command, refuse


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="segckpt compare",
        description="Set predictions beside the peaks that segckpt bench measured. (How far off "
        "they are on published measurements: docs/estimator.md.)",
        epilog="exit codes: 0 compared, 2 could not run",
    )
    made.add_argument("files", nargs="+", metavar="FILE", help="results.jsonl of segckpt bench")
    made.add_argument(
        "--families", action="append", default=[], metavar="DIR", help="folder of family files"
    )
    return made


@command("compare")
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        registry = FamilyRegistry.default(options.families)
        for name in options.files:
            print(table_of(Path(name), registry))
    except (SegckptError, UsageError) as error:
        return refuse("compare", str(error))
    return 0
