"""Every message has a code, and every code a place in the documentation."""

import copy
import importlib
import logging
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from simpletuner_segckpt import SegmentBroken, UnsupportedModel, commands
from simpletuner_segckpt.messages.findings import RULES, WARNINGS, printable
from simpletuner_segckpt.messages.log import logger
from simpletuner_segckpt.messages.units import readable

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


def test_bytes_for_people():
    amounts = (0, 1023, 1024, 1536 * 2**10, 2**30 - 1, 3 * 2**30)
    assert [readable(amount) for amount in amounts] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 MiB",
        "1024.0 MiB",
        "3.0 GiB",
    ]


def test_what_other_libraries_tell_while_they_load_is_no_result(capfd, monkeypatch, tmp_path):
    """As torchao and torch do; a library may set its own level when it is imported."""
    folder = tmp_path / "loud_library"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "import logging\n"
        "own = logging.getLogger('loud_library')\n"
        "own.setLevel(logging.INFO)\n"
        "own.addHandler(logging.StreamHandler())\n"
        "own.warning('Failed to load')\n"
        "logging.getLogger('loud_library.other').error('broken')\n"
    )
    command = ModuleType("loud_command")

    def main(arguments):
        importlib.import_module("loud_library")
        logging.getLogger("torch.utils._pytree").warning("is an Enum subclass")
        logger.warning("ours")
        return 7

    command.main = main
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "simpletuner_segckpt.commands.validate", command)
    ours = []
    handler = logging.Handler()
    handler.emit = lambda record: ours.append(record.getMessage())
    logger.addHandler(handler)
    try:
        assert commands.run("validate", []) == 7
    finally:
        logger.removeHandler(handler)
    assert ours == ["ours"]
    assert capfd.readouterr().err == "broken\n"
    logging.getLogger("loud_library").warning("again")
    assert capfd.readouterr().err == "again\n"
    assert logger.manager is logging.root.manager
