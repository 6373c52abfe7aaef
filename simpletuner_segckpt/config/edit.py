"""Set and remove keys of a trainer's config file; everything else stays byte for byte.

Values, lines and members are cut out of the text and put into it at the offsets that the parsers
give; the text is never rendered anew. (tomlkit can set a key of a document, but not put a new one
beside the others of ours; the standard library can only write a whole JSON file.)
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config_schema import PREFIX
from ..messages.errors import ConfigError, reason_of
from ..messages.findings import Finding
from ..private.of_tomlkit import toml_items
from .env import is_env, lines_for
from .file import ConfigFile, Member, is_toml, json_members, parse_config
from .replace import HalfWritten, replace_file

if TYPE_CHECKING:
    from tomlkit.items import Item, Key


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


_NEWLINE = r"(?:\r\n|\n|\r)"


def write_keys(path: str | Path, keys: Mapping[str, Any]) -> Path | None:
    """Change keys of a config file as ``edited`` does, and keep the old file as a backup.

    A link stays a link: the file it leads to is changed, and keeps its owner, its permissions and
    its other names. The backup, beside that file, is returned; None means that nothing had to
    change.

    Raises ``ConfigError`` as ``edited`` does and where a file cannot be read or written. The
    folder is then as it was, or the text says which backup holds what the file was.
    """
    name = str(path)
    try:
        real = Path(os.path.realpath(path, strict=True))
        old = real.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError([Finding("unreadable", reason_of(error), file=name)]) from error
    new = edited(old, name, keys)
    if new == old:
        return None
    try:
        return replace_file(real, old, new)
    except OSError as error:
        rest = "nothing was changed"
        if isinstance(error, HalfWritten):
            rest = f"it may be half written, and {error.backup} holds what it was"
        message = f"cannot be written: {reason_of(error)}; {rest}"
        raise ConfigError([Finding("unreadable", message, file=name)]) from error


def edited(data: bytes, name: str, keys: Mapping[str, Any]) -> bytes:
    """The bytes of a config file with the top-level ``keys`` set, or removed where None is given.

    Values are texts, whole numbers, switches and lists of texts. A key that stands with leading
    dashes keeps them; a new one gets them where the others have them. What means the same already
    stays as it is written.

    Raises ``ConfigError`` for a file that cannot be parsed, that gives a key in both spellings, or
    where a table stands in the place of a key.
    """
    mark = _BYTE_ORDER_MARK if data.startswith(_BYTE_ORDER_MARK) else b""
    old = parse_config(data.removeprefix(mark), name)
    if old.findings:
        raise ConfigError(old.findings)
    text = data.removeprefix(mark).decode("utf-8")
    changes = _changes(old, keys)
    if is_env(name, text):
        raise ConfigError([Finding("unsupported-option", _by_hand(old, changes), file=name)])
    new = _changed(text, old, changes).encode("utf-8")
    if not _holds(parse_config(new, name), old, changes):
        message = "cannot be edited without changing other keys (a bug, please report it)"
        raise ConfigError([Finding("unsupported-option", message, file=name)])
    return mark + new


def _changes(old: ConfigFile, keys: Mapping[str, Any]) -> dict[str, Any]:
    """What has to change, by the key as it stands or will stand in the file."""
    wanted = {
        key.removeprefix("--"): list(value) if isinstance(value, tuple) else value
        for key, value in keys.items()
    }
    twice = [
        old.finding("two-spellings", f"is also given as `{plain}`; leave one of the two out", key)
        for key in old.values
        if (plain := key.removeprefix("--")) != key and plain in old.values
        if plain in wanted or _is_ours(plain)
    ]
    if twice:
        raise ConfigError(twice)
    habit = [key for key in old.values if _is_ours(key)] or list(old.values)
    dashes = "--" if 2 * sum(key.startswith("--") for key in habit) > len(habit) else ""
    changes: dict[str, Any] = {}
    for plain, value in wanted.items():
        there = [key for key in (plain, f"--{plain}") if key in old.values]
        if value is None:
            changes |= dict.fromkeys(there)
        elif not there:
            changes[dashes + plain] = value
        elif not _same(old.values[there[0]], value):
            changes[there[0]] = value
    return changes


def _by_hand(old: ConfigFile, changes: Mapping[str, Any]) -> str:
    """What to do with an env file, which a shell may run as well."""
    lines = lines_for({k: v for k, v in changes.items() if v is not None and not _says(old, k, v)})
    gone = [old.called(key) for key, value in changes.items() if value is None]
    wanted = [f"it must say {' and '.join(lines)}"] if lines else []
    wanted += [f"it must not say {' and '.join(gone)}"] if gone else []
    return f"is an env file, which is not edited; {' and '.join(wanted) or 'nothing has to change'}"


def _says(old: ConfigFile, key: str, value: Any) -> bool:
    return isinstance(value, bool) and str(old.values.get(key)).lower() == str(value).lower()


def _changed(text: str, old: ConfigFile, changes: Mapping[str, Any]) -> str:
    toml = is_toml(old.name, text)
    if toml:
        _refuse_tables(text, old, changes)
    for key, value in changes.items():
        if value is not None:
            text = (_toml_set if toml else _json_set)(text, key, value)
    # Only now, so that new keys find the place of those that go.
    for key, value in changes.items():
        if value is None:
            text = (_toml_remove if toml else _json_remove)(text, key)
    return text


def _holds(new: ConfigFile, old: ConfigFile, changes: Mapping[str, Any]) -> bool:
    """Whether ``new`` holds what ``old`` does, but for the changes."""
    # Without its last key a TOML file can be empty.
    if any(finding.rule != "empty-file" for finding in new.findings):
        return False
    # repr tells 1, 1.0 and True apart, and finds NaN equal to itself.
    kept = {key: repr(value) for key, value in old.values.items() if key not in changes}
    wanted = {key: value for key, value in changes.items() if value is not None}
    return (
        new.values.keys() == kept.keys() | wanted.keys()
        and all(repr(new.values[key]) == value for key, value in kept.items())
        and all(_same(new.values[key], value) for key, value in wanted.items())
    )


def _same(there: Any, value: Any) -> bool:
    """Whether a value need not be replaced. ``"2"`` is as good as 2, but true is not 1."""
    if isinstance(there, bool) or isinstance(value, bool):
        return there is value
    if isinstance(there, str) and isinstance(value, int):
        return there.isdecimal() and (there.lstrip("0") or "0") == str(value)
    return bool(there == value)


def _is_ours(key: str) -> bool:
    return key.removeprefix("--").startswith(PREFIX)


def _last(keys: Sequence[str]) -> int:
    """Which of ``keys``, if there are any, a new one is put after."""
    return max((i for i, key in enumerate(keys) if _is_ours(key)), default=len(keys) - 1)


def _newline(text: str) -> str:
    found = re.search(_NEWLINE, text)
    return found.group() if found else "\n"


# JSON.


def _json_set(text: str, key: str, value: Any) -> str:
    members = list(json_members(text))
    for member in members:
        if member.key == key:
            literal = _json(value, _colon(text, member))
            return text[: member.value_start] + literal + text[member.end :]
    if not members:
        return _json_first(text, key, value)
    at = _last([member.key for member in members])
    colon = _colon(text, members[at])
    member_text = json.dumps(key) + colon + _json(value, colon)
    end = members[at].end
    return text[:end] + _comma(text, members, at, colon) + member_text + text[end:]


def _json_first(text: str, key: str, value: Any) -> str:
    start, end = text.index("{") + 1, text.rindex("}")
    newline = _newline(text)
    member = f"{json.dumps(key)}: {_json(value, ': ')}"
    closing = _last_line(text[start:end]) or newline
    return f"{text[:start]}{newline}    {member}{closing}{text[end:]}"


def _json_remove(text: str, key: str) -> str:
    members = list(json_members(text))
    [at] = [i for i, member in enumerate(members) if member.key == key]
    start, end = members[at].start, members[at].end
    if len(members) == 1:
        return text[: text.index("{") + 1] + text[text.rindex("}") :]
    if at == 0:
        return text[:start] + text[members[1].start :]
    before = text[members[at - 1].end : start]
    if at + 1 < len(members):
        after = text[end : members[at + 1].start]
        if before.count("\n") > after.count("\n"):  # the blank line above a group stays
            return text[:start] + text[members[at + 1].start :]
    return text[: members[at - 1].end] + text[end:]


def _json(value: Any, colon: str) -> str:
    return json.dumps(value, separators=(", " if colon.endswith(" ") else ",", ": "))


def _colon(text: str, member: Member) -> str:
    """The colon of a member with the space around it, on one line."""
    found = re.search(r"\s*:\s*\Z", text[member.start : member.value_start])
    assert found is not None
    return ": " if re.search(_NEWLINE, found.group()) else found.group()


def _comma(text: str, members: Sequence[Member], at: int, colon: str) -> str:
    """What stands between two members where the new one comes, without blank lines."""
    if len(members) > 1:
        at = max(at, 1)
        before, after = text[members[at - 1].end : members[at].start].split(",")
        return (_last_line(before) or before) + "," + (_last_line(after) or after)
    space = " " if colon.endswith(" ") else ""
    return "," + (_last_line(text[text.index("{") + 1 : members[0].start]) or space)


def _last_line(space: str) -> str:
    """The last line break in white space, with the indentation after it."""
    found = re.search(rf"{_NEWLINE}[ \t]*\Z", space)
    return found.group() if found else ""


# TOML.


class _Entry(NamedTuple):
    """A key above the first [table], and the offsets of its lines."""

    key: "Key"
    item: "Item"
    start: int
    end: int

    def is_value_of(self, key: str) -> bool:
        return self.key.key == key and not self.key.is_dotted()


def _toml_entries(text: str) -> tuple[list[_Entry], int]:
    """The keys above the first [table], and where that begins."""
    import tomlkit  # only here: most configs are JSON

    entries = []
    end = 0
    for key, item, start, rendered in toml_items(tomlkit.parse(text)):
        end = start + len(rendered)
        if key is not None:
            entries.append(_Entry(key, item, start, end))
    return entries, end


def _refuse_tables(text: str, old: ConfigFile, keys: Iterable[str]) -> None:
    entries, _ = _toml_entries(text)
    for key in keys:
        if key in old.values and not any(entry.is_value_of(key) for entry in entries):
            message = "is a table here, not one value; take it out by hand"
            raise ConfigError([old.finding("wrong-type", message, key)])


def _toml_set(text: str, key: str, value: Any) -> str:
    import tomlkit

    literal = tomlkit.item(value).as_string()
    entries, above_tables = _toml_entries(text)
    for entry in entries:
        if entry.is_value_of(key):
            name = entry.item.trivia.indent + entry.key.as_string() + entry.key.sep
            start = entry.start + len(name)
            return text[:start] + literal + text[start + len(entry.item.as_string()) :]
    newline = _newline(text)
    if not entries:
        return _toml_first(text, f"{_toml_key(key)} = {literal}", newline, above_tables)
    last, _, start, end = entries[_last([entry.key.key for entry in entries])]
    lines, name = text[start:end], last.as_string()
    indent = lines[: len(lines) - len(lines.lstrip())]
    equals = "=" if name + last.sep == name.strip() + "=" else " = "
    line = indent + _toml_key(key, name[0]) + equals + literal
    if lines.endswith("\n"):
        return text[:end] + line + newline + text[end:]
    return text[:end] + newline + line + text[end:]


def _toml_first(text: str, line: str, newline: str, above_tables: int) -> str:
    if above_tables == len(text):  # nothing but comments
        return text + line + newline if text.endswith("\n") else text + newline + line
    # Comments right above the table belong to it.
    blank = list(re.finditer(r"^[ \t]*\r?\n", text[:above_tables], re.MULTILINE))
    start = blank[-1].end() if blank else 0
    return text[:start] + line + 2 * newline + text[start:]


def _toml_remove(text: str, key: str) -> str:
    entries, _ = _toml_entries(text)
    [(start, end)] = [(entry.start, entry.end) for entry in entries if entry.is_value_of(key)]
    if end == len(text) and not text.endswith("\n"):  # what comes last now has no newline either
        return text[:start].removesuffix("\n").removesuffix("\r")
    return text[:start] + text[end:]


def _toml_key(key: str, quote: str = "") -> str:
    """A key in quotes where it needs them, or where the others have them."""
    import tomlkit

    written = tomlkit.key(key).as_string()
    return f"{quote}{key}{quote}" if written == key and quote in ("'", '"') else written
