"""Faults put into the package one by one, each of which the tests have to find.

    python tests/mutations.py                 # all of them: some five minutes
    python tests/mutations.py --only link     # those whose name contains a word
    python tests/mutations.py --tests DIR     # with the tests of another checkout

Each fault is one replacement in a copy of the package; the tests named beside it run against the
copy until one of them fails. Not part of ``make test``. tests/README.md says what found what.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """One replacement in a file of the package, and the test files that have to notice."""

    name: str
    tests: str
    file: str
    before: str
    after: str


FAULTS = [
    Fault(
        "the wrong result goes into the next block",
        "conditions",
        "engine/links.py",
        "sources = [produced[source] for _, source in self.carried]",
        "sources = [produced[source - 1] for _, source in self.carried]",
    ),
    Fault(
        "a follower's arguments are not checked",
        "unseen",
        "engine/segmented.py",
        "            if not unchanged:",
        "            if False:",
    ),
    Fault(
        "writes in place are not seen",
        "unseen",
        "engine/links.py",
        "return mine is other and version(other) == self.versions[index]",
        "return mine is other",
    ),
    Fault(
        "ranks gather a segment in different orders",
        "distributed",
        "recompute/gathered.py",
        "        gather(self.first)",
        "        pass",
    ),
    Fault(
        "a recompute gathers the weights of blocks that are done",
        "distributed",
        "model/fsdp.py",
        "            undo.enter_context(forward_prefetch_put_off(module))",
        "            pass",
    ),
    Fault(
        "reads between blocks are not seen",
        "unseen",
        "engine/watched.py",
        "            alias.on_read(getattr(func",
        "            str(getattr(func",
    ),
    Fault(
        "a state that the loop keeps is not seen in a record",
        "unseen",
        "engine/recording.py",
        "            if reference() is not None:\n                self._boundaries[index]",
        "            if False:\n                self._boundaries[index]",
    ),
    Fault(
        "a state that the loop keeps is not seen in a segment",
        "unseen",
        "engine/segmented.py",
        "            if reference() is not None:",
        "            if False:",
    ),
    Fault(
        "random numbers between blocks are not seen",
        "unseen",
        "engine/recording.py",
        "if self.stack.platform.random_states() != last.random_states:",
        "if False:",
    ),
    Fault(
        "weights that are moved between blocks are not seen",
        "foreign_hooks",
        "engine/recording.py",
        "if [weights(block) for block in pair] != last.weights:",
        "if False:",
    ),
    Fault(
        "segments are not tried out on unknown models",
        "unseen",
        "engine/planner.py",
        "replay=probed",
        "replay=False",
    ),
    Fault(
        "a schedule is not cut where a boundary is no link",
        "unseen",
        "engine/proof.py",
        "return cls(schedule.cut(frozenset(broken)),",
        "return cls(schedule.cut(frozenset(list(broken)[1:])),",
    ),
    Fault(
        "conditions of a call are not heeded",
        "conditions",
        "engine/planner.py",
        "found = [str(c) for c in conditions if c.concerns(planned.path)]",
        "found: list[str] = []",
    ),
    Fault(
        "hooks of others are not looked for",
        "conditions",
        "engine/planner.py",
        "hooks = hook_boundaries(planned.path, blocks, alone=probed)",
        "pass",
    ),
    Fault(
        "a segment does not end at a hook inside of it",
        "foreign_hooks",
        "engine/recording.py",
        "known = self._boundaries | self._hooks",
        "known = self._boundaries",
    ),
    Fault(
        "what processes exchange is sent again",
        "distributed",
        "private/of_torch.py",
        "return operator.name() in _EXCHANGES",
        "return False",
    ),
    Fault(
        "a checkpoint call of others is not seen",
        "hard_cases",
        "private/of_torch.py",
        "return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__",
        "return False",
    ),
    Fault(
        "a wrong stride",
        "schedule",
        "schedules/schedule.py",
        "starts = range(0, blocks, stride)",
        "starts = range(0, blocks, max(interval, stride - 1))",
    ),
    Fault(
        "keep_last keeps one block less",
        "schedule",
        "schedules/schedule.py",
        "remaining = sum(stacks.values()) - keep_last",
        "remaining = sum(stacks.values()) - max(0, keep_last - 1)",
    ),
    Fault(
        "a written buffer is forgotten",
        "foreign_hooks",
        "recompute/state.py",
        "noted.buffers = written_by(noted.buffers, hooks, self.siblings)",
        "noted.buffers = []",
    ),
    Fault(
        "hooks are not put back",
        "foreign_hooks",
        "recompute/state.py",
        "if state[kind].keys() != table.keys():",
        "if False:",
    ),
    Fault(
        "attributes are not put back",
        "foreign_hooks",
        "recompute/state.py",
        "if now != noted.attributes:",
        "if False:",
    ),
    Fault(
        "adapters are not put back",
        "foreign_hooks",
        "recompute/state.py",
        "if own.keys() != held.keys() or not all(map(is_, own.values(), held.values())):",
        "if False:",
    ),
    Fault(
        "nothing is kept",
        "backends",
        "recompute/kept_outputs.py",
        "        if kind is None or not keeps:",
        "        if True:",
    ),
    Fault(
        "the projection that comes up is kept",
        "backends",
        "recompute/kept_operators.py",
        "return narrow < args[_PRODUCTS[operator]].shape[-2]",
        "return narrow > args[_PRODUCTS[operator]].shape[-2]",
    ),
    Fault(
        "attention with dropout is kept",
        "backends",
        "recompute/kept_operators.py",
        "        if value is not None if writes else value:",
        "        if value is not None if writes else False:",
    ),
    Fault(
        "compiled code gets no copies of what is kept",
        "backends",
        "recompute/kept_outputs.py",
        "return _each(Tensor, torch.clone, result)",
        "return result",
    ),
    Fault(
        "a call that goes another way than the one before is not noticed",
        "kept_outputs",
        "recompute/kept_outputs.py",
        "if tensor.dim() != next(expected, None) and self.rest == inf:",
        "if False:",
    ),
    Fault(
        "a mode is closed while an operator is on its way to it",
        "backends",
        "recompute/kept_outputs.py",
        "saved is not None and not self._has_returned(saved)",
        "False",
    ),
    Fault(
        "feed-forwards that are recomputed run plainly",
        "backends",
        "recompute/submodules.py",
        "        run = others.pop(self.kind)",
        "        run = others.pop(self.kind) and (lambda call, *a, **k: call(*a, **k))",
    ),
    Fault(
        "an offloaded view comes back from its storage's start",
        "offload",
        "offload/saved_tensors.py",
        "return empty.set_(self.stored.storage(), self.offset, self.size, self.stride)",
        "return empty.set_(self.stored.storage(), 0, self.size, self.stride)",
    ),
    Fault(
        "a storage that was written is not stored anew",
        "offload",
        "offload/saved_tensors.py",
        "if stored is None or version != tensor._version:",
        "if stored is None:",
    ),
    Fault(
        "remove() leaves checkpointing on",
        "lifecycle hard_cases",
        "model/flags.py",
        "                elif not _is_fixed(module, key):",
        "                elif False:",
    ),
    Fault(
        "remove() leaves blocks intercepted",
        "lifecycle hard_cases backends",
        "model/interception.py",
        'object.__setattr__(block, "__class__", plain_class(type(block)))',
        "pass",
    ),
    Fault(
        "a KV cache is filled by a recompute",
        "transformers",
        "engine/runs.py",
        "covered, self.cached = False, True",
        "self.cached = True",
    ),
    Fault(
        "models make a KV cache while they train",
        "transformers",
        "model/kv_cache.py",
        "return args, kwargs | {ARGUMENT: False}",
        "return args, kwargs",
    ),
    Fault(
        "the newest compiled code is tried first",
        "compiled",
        "model/compiled.py",
        "set_most_recent_first(not _holders)",
        "set_most_recent_first(True)",
    ),
]


def mutated(fault: Fault, folder: Path) -> None:
    """A copy of the package in ``folder`` as it is installed, with the fault."""
    package = folder / "simpletuner_segckpt"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "simpletuner_segckpt", package, ignore=ignore)
    for inner in ("config_schema", "model_families"):
        shutil.copytree(ROOT / inner, package / inner, ignore=ignore)
    path = package / fault.file
    text = path.read_text("utf-8")
    if text.count(fault.before) != 1:
        raise SystemExit(
            f"{fault.name}: {fault.file} has its line {text.count(fault.before)} times"
        )
    path.write_text(text.replace(fault.before, fault.after), "utf-8")


def found_by(fault: Fault, tests: Path) -> str:
    """The first test that fails with the fault; empty when none does."""
    with tempfile.TemporaryDirectory() as folder:
        mutated(fault, Path(folder))
        done = subprocess.run(
            [
                # Not ``python -m pytest``, which finds the package of the working directory first.
                str(Path(sys.executable).with_name("pytest")),
                *("-q", "-x", "-p", "no:cacheprovider", "--rootdir", str(tests.parent)),
                *("-c", str(tests.parent / "pyproject.toml")),
                *(str(tests / f"test_{name}.py") for name in fault.tests.split()),
            ],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": folder, "HF_HUB_OFFLINE": "1"},
            cwd=tests.parent,
        )
    found = re.search(r"^(?:FAILED|ERROR) \S*?test_(\w+\.py\S*)", done.stdout, re.MULTILINE)
    if done.returncode and not found:
        raise SystemExit(f"{fault.name}: the tests do not run\n{done.stdout[-2000:]}")
    return f"test_{found[1]}" if found else ""


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--only", default="", metavar="WORD")
    made.add_argument("--tests", type=Path, default=ROOT / "tests", metavar="DIR")
    options = made.parse_args()
    tests = options.tests.resolve()
    missed = 0
    faults = [fault for fault in FAULTS if options.only in fault.name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for fault, found in zip(
            faults, pool.map(partial(found_by, tests=tests), faults), strict=True
        ):
            missed += not found
            print(f"| {fault.name} | {f'`{found}`' if found else '**not found**'} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
