"""A trainer's config file, read with the place of every top-level key.

The stdlib decodes JSON, tomlkit TOML and ``envfile`` SimpleTuner's ``config.env``; what is added is
where each key stands, and that a key given twice is seen instead of lost.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..config_schema import describe
from ..messages.errors import reason_of
from ..messages.findings import Finding, Severity
from ..private.of_tomlkit import toml_items
from .env import EXTRA, Assignment, Setting, assignments, chooser, is_env, remark, settings_of

Position = tuple[int, int]  # line and column, from 1


class Member(NamedTuple):
    """A member of a JSON object, and the offsets of its key, of its value and of their end."""

    key: str
    value: Any
    start: int
    value_start: int
    end: int


@dataclass
class ConfigFile:
    """The top-level keys of a file as they stand there, with values and places.

    ``findings`` says what is wrong with the file itself; ``values`` is then what could be read.
    ``names`` has what a key is called in the file where that is something else.
    """

    name: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Position] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def finding(
        self, rule: str, message: str, key: str = "", severity: Severity = "error"
    ) -> Finding:
        """A finding about this file, at the place of ``key`` if it is there."""
        line, column = self.places.get(key, (0, 0))
        return Finding(rule, message, self.called(key), self.name, line, column, severity)

    def called(self, key: str) -> str:
        """What ``key`` is called in this file."""
        return self.names.get(key, key)

    def report(self, rule: str, message: str, place: Position = (0, 0), key: str = "") -> None:
        """Add a finding about the file itself."""
        line, column = place
        self.findings.append(Finding(rule, message, key, self.name, line, column))


def read_config_file(path: str | Path) -> ConfigFile:
    """Read a JSON, TOML or env file; ``-`` is standard input. Never raises for what is in it."""
    name = "<stdin>" if str(path) == "-" else str(path)
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except (OSError, ValueError, AttributeError) as error:  # the last: no standard input
        return ConfigFile(name, findings=[Finding("unreadable", reason_of(error), file=name)])
    return parse_config(data, name)


def parse_config(data: bytes, name: str) -> ConfigFile:
    """Parse the bytes of a config file; ``name`` decides between JSON, TOML and env.

    Standard input has no ending: it is env when its first line is ``NAME=``, else TOML unless it
    starts like JSON.
    """
    file = ConfigFile(name)
    if data.startswith(b"\xef\xbb\xbf"):
        file.report(
            "encoding",
            "starts with a byte order mark, which trainers do not read; save it as UTF-8 without",
            (1, 1),
        )
        data = data[3:]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        file.report("encoding", f"byte {error.start} is not UTF-8; save it as UTF-8", (line, 1))
        return file
    if not text.strip():
        file.report("empty-file", "is empty; write the keys into it", (1, 1))
        return file
    if is_env(name, text):
        _read_env(text, file)
    else:
        (_read_toml if is_toml(name, text) else _read_json)(text, file)
    return file


def is_toml(name: str, text: str) -> bool:
    """Whether a file is TOML; ``text`` decides for standard input and must not be blank then."""
    return name.lower().endswith(".toml") or (
        name == "<stdin>" and text.lstrip()[0] not in '{["-0123456789'
    )


def _read_json(text: str, file: ConfigFile) -> None:
    try:
        if text.lstrip()[0] != "{":
            found = describe(_decoder().decode(text))
            message = f"holds {found}, not an object; write the keys between {{ and }}"
            file.report("not-an-object", message, (1, 1))
            return
        for key, value, start, _, _ in json_members(text):
            place = _place(text, start)
            if key in file.values:
                first = file.places[key][0]
                message = f"is already given in line {first}; leave one of the two out"
                file.report("duplicate-key", message, place, key)
            file.values[key] = value
            file.places[key] = place
    except json.JSONDecodeError as error:
        hint = ""
        if text[error.pos : error.pos + 1] in ("/", "#"):
            hint = "; JSON has no comments"
        elif text[error.pos : error.pos + 1] == "'":
            hint = "; JSON strings stand between double quotes"
        message = f"is not valid JSON: {error.msg}{hint}"
        file.report("syntax", message, (error.lineno, error.colno))
    except RecursionError:
        file.report("syntax", "is nested too deeply to be read")


def json_members(text: str) -> Iterator[Member]:
    """Each member of the object that ``text`` holds.

    Raises ``json.JSONDecodeError`` where it is no object, and ``RecursionError``.
    """
    decoder = _decoder()

    def skip(position: int) -> int:
        while text[position : position + 1] in (" ", "\t", "\n", "\r"):
            position += 1
        return position

    def expect(character: str, position: int) -> int:
        if text[position : position + 1] != character:
            raise json.JSONDecodeError(f"Expecting '{character}'", text, position)
        return skip(position + 1)

    position = expect("{", skip(0))
    more = text[position : position + 1] != "}"
    while more:
        if text[position : position + 1] != '"':
            raise json.JSONDecodeError("Expecting a key in double quotes", text, position)
        start = position
        key, position = decoder.raw_decode(text, position)
        value_start = expect(":", skip(position))
        value, end = decoder.raw_decode(text, value_start)
        yield Member(key, value, start, value_start, end)
        position = skip(end)
        more = text[position : position + 1] == ","
        if more:
            position = skip(position + 1)
    position = expect("}", position)
    if position != len(text):
        raise json.JSONDecodeError("Extra data", text, position)


def _read_toml(text: str, file: ConfigFile) -> None:
    import tomlkit  # only here: most configs are JSON, and validate must answer at once
    from tomlkit.exceptions import ParseError, TOMLKitError

    try:
        document = tomlkit.parse(text)
        values = document.unwrap()
    except ParseError as error:
        message = f"is not valid TOML: {str(error).partition(' at line ')[0]}"
        file.report("syntax", message, (error.line, error.col + 1))
        return
    except (TOMLKitError, ValueError, RecursionError) as error:
        file.report("syntax", f"is not valid TOML: {str(error) or type(error).__name__}")
        return
    file.values = values
    for key, _, offset, rendered in toml_items(document):
        if key is not None:
            indent = len(rendered) - len(rendered.lstrip())
            file.places.setdefault(key.key, _place(text, offset + indent))


def _read_env(text: str, file: ConfigFile) -> None:
    lines = list(assignments(text))
    found = [line for line in lines if isinstance(line, Assignment)]
    if not found:
        file.report("not-an-object", "holds no line NAME=value", (1, 1))
        return
    extra = 0  # the line of the options so far
    for line in lines:
        if not isinstance(line, Assignment):
            message = f"{describe(line[1])} is no NAME=value and is not read"
            finding = Finding("syntax", message, "", file.name, line[0], 1, "warning")
            file.findings.append(finding)
            continue
        if line.name == EXTRA:
            if extra and not line.appends and EXTRA not in line.value:
                message = f"is already given in line {extra}, which it replaces; write += to add"
                file.report("duplicate-key", message, (line.line, line.column), EXTRA)
            extra = line.line
        for setting in settings_of(line):
            _take(setting, file)
    _say_what_is_read_instead(chooser(found), file)


def _take(setting: Setting, file: ConfigFile) -> None:
    key, place = setting.key, (setting.line, setting.column)
    if key in file.values:
        rule, said = "duplicate-key", f"is already given in line {file.places[key][0]}"
        if file.called(key) != setting.name:
            rule, said = "two-spellings", f"is also given as `{file.called(key)}`"
        file.report(rule, f"{said}; leave one of the two out", place, setting.name)
    file.values[key] = setting.value
    file.places[key] = place
    file.names[key] = setting.name
    if said := remark(setting):
        file.findings.append(file.finding("no-effect", said, key, "warning"))


def _say_what_is_read_instead(chosen: Assignment | None, file: ConfigFile) -> None:
    """SimpleTuner takes an env file when told so, or when no JSON and TOML stand beside it."""
    kind = chosen.value.strip().lower() if chosen else ""
    path = Path(file.name)
    beside = [n for n in ("config.json", "config.toml") if path.with_name(n).is_file()]
    if not file.values or kind == "env":
        return
    if chosen and kind:
        place = (file.name, chosen.line, chosen.column)
        message = f"is {kind}: SimpleTuner then reads no key of this file"
        file.findings.append(Finding("no-effect", message, chosen.name, *place, "warning"))
    elif beside and path.name.lower() == "config.env":
        message = (
            f"SimpleTuner reads {beside[0]} beside this file, and no key of this one; "
            "set CONFIG_BACKEND=env"
        )
        file.findings.append(file.finding("no-effect", message, severity="warning"))


def _place(text: str, offset: int) -> Position:
    start = text.rfind("\n", 0, offset) + 1
    return text.count("\n", 0, offset) + 1, offset - start + 1


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_int=_integer)


def _integer(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # more digits than Python converts
        return -math.inf if digits.startswith("-") else math.inf
