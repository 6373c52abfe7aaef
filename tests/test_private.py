"""Private names of other libraries: all in one place, tested, and missed without a crash."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import simpletuner_segckpt
from simpletuner_segckpt.private import self_test

PACKAGE = Path(simpletuner_segckpt.__file__).parent


def test_they_are_what_they_were():
    assert list(self_test.drifted()) == []


def test_one_that_drifted_is_named(monkeypatch, capsys):
    gone = self_test.PrivateName("torch._gone", "to do a thing", "it is not done", lambda: 1 / 0)
    other = self_test.PrivateName("torch._other", "to see", "nothing is seen", lambda: False)
    monkeypatch.setattr(self_test, "NAMES", (gone, other))
    assert import_module("simpletuner_segckpt.commands.check").main(["prx"]) == 1
    out = capsys.readouterr().out
    assert (
        "private name: torch._gone raises ZeroDivisionError: division by zero; it is there to do a "
        "thing, and without it it is not done"
    ) in out
    assert "private name: torch._other does something else; it is there to see" in out


PRIVATE = re.compile(
    r"torch\._(?!_version__)|torch\.utils\._|\b_supports_gradient|\b_gradient_checkpointing_func|\b_hf_hook"
    r"|\b_set_gradient_checkpointing"
    r"|\b_diffusers_hook|\b_disable_adapters|\b_active_adapter|\b_forward_(pre_)?hooks"
    r"|\b_backward_(pre_)?hooks|\b_global_forward|\b_compiled_call|\b_orig_mod|\b_mp_policy"
    r"|\b_is_stateful|\b_keep_in_fp32|output_capturing|\b_NormBase"
)


def test_they_stand_in_one_place():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "private":
            continue
        found = [name for name in names_in(path) if PRIVATE.search(name)]
        assert found == [], path


def names_in(path):
    """Attributes, names, imports and strings of the code, without docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    docs = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docs.add(first.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
            yield node.value


# What is deleted from the libraries before this package is imported.
MISSING = """
import torch
from torch.nn.modules import batchnorm
del batchnorm._NormBase
top = torch._C._autograd._top_saved_tensors_default_hooks
del torch._C._autograd._top_saved_tensors_default_hooks
del torch._C._dynamo.eval_frame._set_lru_cache
"""
USE = """
import simpletuner_segckpt
from toys import WithDoor, toy

model, inputs = toy(WithDoor)
installation = simpletuner_segckpt.apply(model, {"gradient_checkpointing_interval": 2})
torch._C._autograd._top_saved_tensors_default_hooks = top  # torch 2.14 itself needs it
for _ in range(2):
    model(**inputs).sum().backward()
print(installation.effect["blocks"].drawing)
"""


def test_apply_without_them():
    done = subprocess.run(
        [sys.executable, "-c", MISSING + USE],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "[0 1] [2 3] [4 5]"
