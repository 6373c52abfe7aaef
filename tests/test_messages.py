"""Every message has a code, and every code a place in the documentation."""

import copy
import pickle
import re
from pathlib import Path

import pytest

from simpletuner_segckpt import SegmentBroken, UnsupportedModel
from simpletuner_segckpt.messages.findings import RULES, WARNINGS, printable

PACKAGE = Path(__file__).parents[1]


def test_the_page_has_every_code_in_order():
    page = (PACKAGE / "docs/troubleshooting.md").read_text("utf-8")
    headings = re.findall(r"^### (SEG\d{3}) (\S+)\n(.+)", page, re.MULTILINE)
    known = {code: name for code, (name, _) in (RULES | WARNINGS).items()}
    assert [(code, name) for code, name, _ in headings] == list(known.items())
    assert len(set(known.values())) == len(known)


def test_every_code_of_a_warning_is_used():
    source = "\n".join(
        path.read_text("utf-8") for path in (PACKAGE / "simpletuner_segckpt").rglob("*.py")
    )
    for name, _ in WARNINGS.values():
        assert source.count(f'"{name}"') >= 2, name  # in the table, and where it is said


@pytest.mark.parametrize(
    ("kind", "code"), [(SegmentBroken, "SEG612"), (UnsupportedModel, "SEG501")]
)
def test_errors_begin_with_their_code(kind, code):
    error = kind("what happened")
    assert str(error) == f"{code} what happened"
    for same in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(same) == str(error)


def test_a_line_that_is_too_long_keeps_both_ends():
    assert printable("a\nb\x1b" + "x" * 380) == "a\\nb\\x1b" + "x" * 380
    shown = printable("file " + "x" * 5000 + ": File name too long")
    assert len(shown) == 400
    assert shown.startswith("file xxx")
    assert shown.endswith("xxx: File name too long")
