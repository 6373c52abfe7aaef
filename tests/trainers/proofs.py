"""What a run of a trainer's own script proved, and the page that says it.

A trainer is a module here with a function that yields a ``Proof`` for each of its runs as it ends;
``__main__.py`` names the trainers.
"""

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby

HEAD = """# Trainers' own scripts, run

Made by `make trainers`: scripts of trainers, unmodified, on a CPU, with small models of random
weights. Each script ran without `launch` and without any checkpointing, and then under `launch`.
diffusers' scripts also got their own `--gradient_checkpointing` there, but where "by launch alone"
stands: those never switch checkpointing on. *Equal* means bit by bit. A picture shows a stack's
blocks: those in brackets were run again in backward, each pair of brackets is one checkpoint call;
the others ran normally. Where torchvision is of another build than torch, two of its operators are
declared by name, which no script calls.
"""


@dataclass(frozen=True)
class Proof:
    """One run under ``launch`` beside the same run without it.

    trainer: whose script it is, with its version.
    script: its name.
    schedule: the keys in short.
    processes: how many trained together.
    equal: what both runs had in common bit by bit; empty when something differed or did not run.
    ran: what was recomputed, or, when nothing is equal, what went wrong.
    """

    trainer: str
    script: str
    schedule: str
    processes: int
    equal: str
    ran: str


def page(proofs: Iterable[Proof], not_run: Mapping[str, str]) -> str:
    """docs/trainers/proven.md. ``not_run`` has the trainers that were left out, with the reason."""
    packages = ("torch", "diffusers", "transformers", "peft", "accelerate")
    lines = [HEAD]
    found = ", ".join(f"{name} {version(name)}" for name in packages)
    lines.append(f"Python {platform.python_version()}, {found}.\n")
    for trainer, rows in groupby(proofs, key=lambda proof: proof.trainer):
        lines.append(f"## {trainer}\n")
        lines.append("| script | schedule | processes | equal | recomputed |")
        lines.append("| --- | --- | --- | --- | --- |")
        for proof in rows:
            equal = proof.equal or "**no**"
            cells = (proof.script, proof.schedule, str(proof.processes), equal, proof.ran)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        lines.append("")
    if not_run:
        lines.append("## Not run\n")
        lines += [f"- {trainer}: {reason}" for trainer, reason in not_run.items()]
        lines.append("")
    return "\n".join(lines)
