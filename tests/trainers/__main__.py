"""Trainers' own scripts with and without ``segckpt launch``; `make trainers` is this.

    python tests/trainers --diffusers CHECKOUT --page docs/trainers/proven.md

The exit code is 1 when a run was not equal or did not come to its end, 2 when no trainer is given.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import diffusers_scripts
import simpletuner_trainer
from proofs import Proof, page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--diffusers", type=Path, help="a checkout of diffusers, for its examples")
    parser.add_argument("--packages", type=Path, help="a folder of what only those scripts need")
    parser.add_argument(
        "--simpletuner",
        metavar="PYTHON",
        help="of an environment with SimpleTuner and this package",
    )
    parser.add_argument("--only", action="append", default=[], help="part of a script's path")
    parser.add_argument("--folder", type=Path, help="a new one to leave everything in, with logs")
    parser.add_argument("--page", type=Path, help="where to write what came of it")
    options = parser.parse_args()
    if not options.diffusers and not options.simpletuner:
        print("Give DIFFUSERS=path/to/checkout, SIMPLETUNER_PYTHON=path/to/python, or both.")
        return 2
    done = []
    with TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        for proof in _proofs(options, folder):
            told = proof.ran if proof.equal else f"NOT EQUAL: {proof.ran}"
            print(f"{proof.script}, {proof.schedule}, {proof.processes}: {told}", flush=True)
            done.append(proof)
    not_run = {}
    if not options.diffusers:
        not_run["diffusers"] = "no checkout was given"
    if not options.simpletuner:
        not_run["SimpleTuner"] = "no environment with it was given (Python 3.12)"
    if options.page:
        options.page.write_text(page(done, not_run))
    return 0 if all(proof.equal for proof in done) else 1


def _proofs(options: argparse.Namespace, folder: Path) -> Iterator[Proof]:
    if options.diffusers:
        yield from diffusers_scripts.proofs(
            options.diffusers.resolve(),
            options.packages and options.packages.resolve(),
            folder / "diffusers",
            options.only,
        )
    if options.simpletuner:
        yield from _simpletuner(options.simpletuner, folder / "simpletuner")


def _simpletuner(python: str, folder: Path) -> Iterator[Proof]:
    asked = "from importlib.metadata import version as v; print(*map(v, %r))"
    asked %= ("simpletuner torch diffusers".split(),)
    told = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    trainer = "SimpleTuner {} (torch {}, diffusers {})".format(*told.stdout.split())
    blocks = sum(simpletuner_trainer.BLOCKS)
    for outcome in simpletuner_trainer.outcomes(python, folder):
        case = outcome.case
        ran = outcome.fault or f"{case.again} of {blocks} blocks in each backward"
        equal = "" if outcome.fault else f"adapter and losses of {simpletuner_trainer.STEPS} steps"
        name = (
            "Flux LoRA, `simpletuner train`"
            if case.started == simpletuner_trainer.COMMAND
            else "Flux LoRA, `-m simpletuner.train`"
        )
        yield Proof(trainer, name, case.title, case.processes, equal, ran)


if __name__ == "__main__":
    sys.exit(main())
