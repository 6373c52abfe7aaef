"""``segckpt check``: prove families on the versions that are installed.

Each tiny model of a family file is built from its class and trained for a step under several
schedules, and with its feed-forwards recomputed alone or kept. A family passes when every gradient
is bit-equal to the un-checkpointed step, every block ran as often as its schedule says, and what
passes between the blocks and stands inside them is what the file says. Exit codes: 0 nothing
drifted, 1 something did, 2 could not run.
"""

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from ..families.registry import FamilyRegistry
from ..families.schema import Family
from ..messages.errors import FamilyError, UnknownFamily
from ..messages.log import logger, quiet
from ..private.self_test import NAMES
from ..private.self_test import drifted as private_names_drifted
from ..verify.families import Check, check_family
from .output import command, refuse


def print_table(checks: Iterable[Check]) -> None:
    """One row for each class, what drifted below it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"segmented": "green", "per-block": "cyan", "drifted": "red"}
    table = Table("family", "class", "verdict", "details")
    for check in checks:
        details = check.details
        if check.verdict == "per-block":
            reasons = [stack.per_block for stack in check.family.stacks]
            details = list(dict.fromkeys(filter(None, reasons)))
        table.add_row(
            check.family.title,
            check.model_class.rpartition(".")[2],
            Text(check.verdict, colours.get(check.verdict, "dim")),
            Text("\n".join(details)),
        )
    Console(markup=False).print(table)


@command("check")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="segckpt check", description="Prove families on the installed versions."
    )
    parser.add_argument("names", nargs="*", metavar="FAMILY", help="model_family values")
    parser.add_argument("--all", action="store_true", help="every known family")
    parser.add_argument("--families", action="append", default=[], metavar="DIR")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the models are tiny
    try:
        registry = FamilyRegistry.default(options.families)
        families = [f for name in options.names for f in registry.named(name)]
    except (FamilyError, UnknownFamily) as error:
        return refuse("check", str(error))
    if options.all:
        families = sorted(registry, key=lambda family: family.title.lower())
    if not families:
        return refuse("check", "name families, or pass --all")
    checks = _run(families)
    print_table(checks)
    verdicts = Counter(check.verdict for check in checks)
    proven = {c.model_class for c in checks if c.verdict in ("segmented", "per-block")}
    drifted, others = verdicts["drifted"], verdicts["not installed"] + verdicts["not proven"]
    changed = list(private_names_drifted())
    for sentence in changed:
        print(f"private name: {sentence}")
    print(f"private names of other libraries: {len(NAMES)} used, {len(changed)} drifted")
    print(f"classes: {len(proven)} proven, {drifted} drifted, {others} not proven here")
    return int(drifted > 0 or bool(changed))


def _run(families: Sequence[Family]) -> list[Check]:
    from rich.progress import Progress

    checks: list[Check] = []
    # Without this package's own messages: what a check finds is in its table.
    silence = quiet(logger, logging.ERROR)
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress, silence:
        task = progress.add_task("checking", total=len(families))
        for family in families:
            progress.update(task, advance=1, description=family.title)
            checks += check_family(family)
    return checks
