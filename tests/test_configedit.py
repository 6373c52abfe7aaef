"""Keys set and removed in a file, with not one other byte changed."""

import errno
import json
import math
import os
import resource
import stat
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simpletuner_segckpt import ConfigError
from simpletuner_segckpt.config import edit as configedit
from simpletuner_segckpt.config.edit import edited, write_keys
from simpletuner_segckpt.config.file import ConfigFile

ON = "gradient_checkpointing"
INTERVAL = "gradient_checkpointing_interval"
STRIDE = "gradient_checkpointing_segment_stride"
KEEP = "gradient_checkpointing_keep"
MARK = b"\xef\xbb\xbf"


def edit(text, keys, name="config.json"):
    return edited(text.encode(), name, keys).decode()


def findings(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return [(finding.code, finding.key) for finding in caught.value.findings]


# JSON.

INDENTED = """{
    "--model_family": "flux",
    "--gradient_checkpointing": "true",
    "--learning_rate": 1e-4,

    "--\\u0061lpha": 0.10
}
"""


@pytest.mark.parametrize(
    ("before", "keys", "after"),
    [
        # Set in place.
        ('{"a": 1, "b": 1e-4}', {"a": 2}, '{"a": 2, "b": 1e-4}'),
        ('{"a" :\t{"x": [1]} ,"b":2}', {"a": "x"}, '{"a" :\t"x" ,"b":2}'),
        ('{"a": 1}', {"a": ["x", "y"]}, '{"a": ["x", "y"]}'),
        ('{"a":1}', {"a": ["x", "y"]}, '{"a":["x","y"]}'),
        ('{"a":1}', {"a": ("x",)}, '{"a":["x"]}'),
        ('{"a": null}', {"a": False}, '{"a": false}'),
        ('{"a": 1}', {"a": 'é"\\'}, '{"a": "\\u00e9\\"\\\\"}'),
        ('{"\\u0061": 1, "é": "\\ud83d"}', {"a": 2}, '{"\\u0061": 2, "é": "\\ud83d"}'),
        ('{"x": {"a": 1}, "a": 1}', {"a": 2}, '{"x": {"a": 1}, "a": 2}'),
        # The spelling that is there.
        (f'{{"--{INTERVAL}": "2"}}', {INTERVAL: 4}, f'{{"--{INTERVAL}": 4}}'),
        (f'{{"--lr": 1, "{INTERVAL}": 2}}', {INTERVAL: 4}, f'{{"--lr": 1, "{INTERVAL}": 4}}'),
        (f'{{"--{INTERVAL}": 2}}', {f"--{INTERVAL}": 4}, f'{{"--{INTERVAL}": 4}}'),
        (f'{{"{INTERVAL}": 2}}', {f"--{INTERVAL}": 4}, f'{{"{INTERVAL}": 4}}'),
        # New, in the file's own spelling.
        ('{"a":1}', {INTERVAL: 2}, f'{{"a":1,"{INTERVAL}":2}}'),
        ('{"a": 1}', {INTERVAL: 2}, f'{{"a": 1, "{INTERVAL}": 2}}'),
        ('{ "a" : 1 }', {INTERVAL: 2}, f'{{ "a" : 1, "{INTERVAL}" : 2 }}'),
        ('{"--a":1,"--b":2}', {INTERVAL: 2}, f'{{"--a":1,"--b":2,"--{INTERVAL}":2}}'),
        ('{"_":0,"--a":1,"--b":2}', {ON: True}, f'{{"_":0,"--a":1,"--b":2,"--{ON}":true}}'),
        ('{"--a":1,"b":2}', {ON: True}, f'{{"--a":1,"b":2,"{ON}":true}}'),
        (f'{{"--a":1,"{ON}":1}}', {KEEP: ["x"]}, f'{{"--a":1,"{ON}":1,"{KEEP}":["x"]}}'),
        # New, after the last key of ours.
        (f'{{"{ON}":1,"z":2}}', {INTERVAL: 2}, f'{{"{ON}":1,"{INTERVAL}":2,"z":2}}'),
        (
            f'{{\n "{ON}": 1,\n\n "z": 2}}\n',
            {INTERVAL: 2, STRIDE: 4},
            f'{{\n "{ON}": 1,\n "{INTERVAL}": 2,\n "{STRIDE}": 4,\n\n "z": 2}}\n',
        ),
        ('{"a":\n1}', {"b": 2}, '{"a":\n1, "b": 2}'),
        ('{ "a": 1\n, "b": 2\n}', {"c": 3}, '{ "a": 1\n, "b": 2\n, "c": 3\n}'),
        ('{ "a": 1\n\n, "b": 2}', {"c": 3}, '{ "a": 1\n\n, "b": 2\n, "c": 3}'),
        (
            f'{{"a": 1, "{ON}": 1,\n "z": 2}}',
            {KEEP: 2},
            f'{{"a": 1, "{ON}": 1, "{KEEP}": 2,\n "z": 2}}',
        ),
        ('{\n\n  "a": 1\n}', {"b": 2}, '{\n\n  "a": 1,\n  "b": 2\n}'),
        ('{\r  "a": 1\r}', {"b": 2}, '{\r  "a": 1,\r  "b": 2\r}'),
        ('{\r\n\t"a": 1\r\n}\r\n', {"b": 2}, '{\r\n\t"a": 1,\r\n\t"b": 2\r\n}\r\n'),
        (
            '{"a": 1,\r\n\r\n  "b": 2}',
            {"c": 3},
            '{"a": 1,\r\n\r\n  "b": 2,\r\n  "c": 3}',
        ),
        # Into nothing.
        ("{}", {"a": 1}, '{\n    "a": 1\n}'),
        (" { }\r\n", {"a": 1, "b": 2}, ' {\r\n    "a": 1,\r\n    "b": 2\r\n}\r\n'),
        ("{\n  }", {"a": ["x", "y"]}, '{\n    "a": ["x", "y"]\n  }'),
        # Removed, with the comma.
        ('{"a":1,"b":2}', {"a": None}, '{"b":2}'),
        ('{"a":1,"b":2}', {"b": None}, '{"a":1}'),
        ('{"a": 1, "b": 2, "c": 3}', {"b": None}, '{"a": 1, "c": 3}'),
        ('{"a": 1, "b": 2, "c": 3}', {"b": None, "c": None}, '{"a": 1}'),
        ('{"a": null}', {"a": None}, "{}"),
        (' {\n  "a": {"b": 1}\n}\n', {"a": None, "b": None}, " {}\n"),
        ('{\n  "a": 1,\n  "b": 2\n}\n', {"a": None}, '{\n  "b": 2\n}\n'),
        ('{\n  "a": 1,\n  "b": 2\n}', {"b": None}, '{\n  "a": 1\n}'),
        ('{\n "a": 1,\n\n "b": 2,\n "c": 3}', {"b": None}, '{\n "a": 1,\n\n "c": 3}'),
        ('{\n "a": 1,\n "b": 2,\n\n "c": 3}', {"b": None}, '{\n "a": 1,\n\n "c": 3}'),
        ('{ "a": 1\n, "b": 2\n}', {"a": None}, '{ "b": 2\n}'),
        (f'{{"{ON}":1,"--a":2}}', {ON: None, KEEP: "x"}, f'{{"{KEEP}":"x","--a":2}}'),
        # Everything at once.
        (
            INDENTED,
            {ON: None, INTERVAL: 2, "alpha": 1},
            INDENTED.replace('"--gradient_checkpointing": "true"', f'"--{INTERVAL}": 2').replace(
                "0.10", "1"
            ),
        ),
    ],
)
def test_json(before, keys, after):
    assert edit(before, keys) == after
    assert edit(after, keys) == after
    assert edited(MARK + before.encode(), "config.json", keys) == MARK + after.encode()


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ('"2"', 2),
        ('"02"', 2),
        ('"0"', 0),
        ("2.0", 2),
        ("2", 2),
        ('"\\u0061"', "a"),
        ("true", True),
        ('[ "a" ]', ["a"]),
        ('[ "a" ]', ("a",)),
    ],
)
def test_what_is_equal_stays_as_it_is_written(literal, value):
    for text in (f'{{"a" :{literal}}}', f'{{"--a" :{literal}}}'):
        assert edit(text, {"a": value}) == text
    assert edit(f"a={literal}", {"a": value}, "a.toml") == f"a={literal}"


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("true", 1),
        ("1", True),
        ("false", 0),
        ('"true"', True),
        ('"-2"', -2),
        ('""', 0),
        ('"²"', 2),
        ('"٢"', 2),
        ('"2.0"', 2),
        ("2", "2"),
        ('"a"', ["a"]),
        (f'"{"9" * 5000}"', 9),
        ("9" * 5000, 9),
    ],
)
def test_what_is_not_equal_is_replaced(literal, value):
    assert edit(f'{{"a": {literal}}}', {"a": value}) == f'{{"a": {json.dumps(value)}}}'


@pytest.mark.parametrize("text", [INDENTED, "{}", "{\r\n}", '{"b":NaN}'])
def test_nothing_to_change(text):
    assert edit(text, {}) == text
    assert edit(text, {INTERVAL: None, KEEP: None}) == text


def test_numbers_that_python_cannot_convert_are_kept():
    for number in ("9" * 5000, "-" + "9" * 5000, "NaN", "-Infinity", "1e999"):
        assert edit(f'{{"a":{number},"b":1}}', {"b": None}) == f'{{"a":{number}}}'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", [("SEG102", "")]),
        (" \n", [("SEG102", "")]),
        ("[1]", [("SEG104", "")]),
        ('{"a": 1,}', [("SEG103", "")]),
        ('{"a": 1} x', [("SEG103", "")]),
        ("{'a': 1}", [("SEG103", "")]),
        ('{"a": 1, "a": 2}', [("SEG105", "a")]),
        (f'{{"--{INTERVAL}": 1, "{INTERVAL}": 1}}', [("SEG202", f"--{INTERVAL}")]),
        ('{"a": 1, "--a": 2}', [("SEG202", "--a")]),
        ("[" * 100000, [("SEG103", "")]),
    ],
)
def test_json_that_cannot_be_edited(text, found):
    keys = {"a": 3, INTERVAL: 2}
    if text.startswith("[["):
        text = f'{{"x": {text}'
    assert findings(edit, text, keys) == found


def test_no_text():
    for name in ("config.json", "config.toml"):
        assert findings(edited, b'{"a": "\xff"}', name, {"a": 1}) == [("SEG101", "")]


def test_two_spellings_of_a_key_that_is_not_ours_nor_asked_for():
    assert edit('{"lr":1,"--lr":2}', {ON: True}) == f'{{"lr":1,"--lr":2,"{ON}":true}}'


def test_nested_almost_too_deeply():
    outcomes = []
    for depth in range(sys.getrecursionlimit() - 150, sys.getrecursionlimit() + 5):
        deep = "[" * depth + "]" * depth
        try:
            outcomes.append(edit(f'{{"x":{deep},"a":1}}', {"a": None}) == f'{{"x":{deep}}}')
        except ConfigError as error:
            outcomes += [finding.code for finding in error.findings]
    assert set(outcomes) <= {True, "SEG103"}
    assert outcomes[0] is True


def test_a_result_that_is_not_right_is_an_error(monkeypatch):
    monkeypatch.setattr(configedit, "_json_set", lambda text, *_: text.replace("1e-4", "1e-5"))
    assert findings(edit, '{"lr": 1e-4}', {"lr": 1}) == [("SEG402", "")]
    monkeypatch.setattr(configedit, "_json_set", lambda text, *_: text.replace("}", ""))
    assert findings(edit, '{"lr": 1e-4}', {"lr": 1}) == [("SEG402", "")]


@pytest.mark.parametrize(
    ("new", "right"),
    [
        ({"lr": math.nan, "one": 1, "a": 2}, True),
        ({"lr": math.nan, "one": 1, "a": "2"}, True),
        ({"lr": math.nan, "one": 1, "a": 3}, False),
        ({"lr": math.nan, "one": 1}, False),
        ({"lr": math.nan, "one": 1, "a": 2, "gone": 0}, False),
        ({"lr": math.nan, "one": 1, "a": 2, "more": 0}, False),
        ({"lr": math.nan, "one": 1.0, "a": 2}, False),
        ({"lr": math.nan, "one": True, "a": 2}, False),
    ],
)
def test_what_makes_a_result_right(new, right):
    old = ConfigFile(values={"lr": math.nan, "one": 1, "gone": 0})
    assert configedit._holds(ConfigFile(values=new), old, {"a": 2, "gone": None}) is right


# TOML.

TOML = """\
# A run on one card.
model_family = "flux"   # the family

--gradient_checkpointing = true
  "--learning_rate"=1e-4
text = \"\"\"
[table]
interval = 3
\"\"\"
list = [ # of numbers
  1,
  2, # two
]
when = 1979-05-27 07:32:00
a.b.c = 1
point = {x = 1, y = {z = 2}} # inline

# About the optimizer.
[optimizer]
lr = 0.10
a = 1
[[data]]
gradient_checkpointing = 1
"""


@pytest.mark.parametrize(
    ("before", "keys", "after"),
    [
        # Set in place.
        ("a = 1 # one\n", {"a": 2}, "a = 2 # one\n"),
        ("\ta\t=\t'1'\t#\n", {"a": True}, "\ta\t=\ttrue\t#\n"),
        ("a = 1", {"a": ["x", "y"]}, 'a = ["x", "y"]'),
        ("a = 1", {"a": ("x",)}, 'a = ["x"]'),
        ("a = [\n 1, # ]\n]\nb = 1", {"a": 'é"\\\n'}, 'a = "é\\"\\\\\\n"\nb = 1'),
        ('a = """\nb = 1\n"""\nb = 2\n', {"b": 3}, 'a = """\nb = 1\n"""\nb = 3\n'),
        ('a = """\r\nb = 1\r\n"""\r\n', {"a": ""}, 'a = ""\r\n'),
        ("a = {b = 1} # c\n", {"a": 1}, "a = 1 # c\n"),
        (f'"--{INTERVAL}" = "2"\n', {INTERVAL: 4}, f'"--{INTERVAL}" = 4\n'),
        (f"'--{INTERVAL}' = 2\n[t]\n", {INTERVAL: 4}, f"'--{INTERVAL}' = 4\n[t]\n"),
        (f"--{INTERVAL} = 2\n", {INTERVAL: 4}, f"--{INTERVAL} = 4\n"),
        ("a = 1\n[t]\na = 2\n", {"a": 3}, "a = 3\n[t]\na = 2\n"),
        # New.
        ("a = 1\n", {INTERVAL: 2}, f"a = 1\n{INTERVAL} = 2\n"),
        ("a=1", {"b": 2, "c": 3}, "a=1\nb=2\nc=3"),
        ("  a = 1\r\n", {"b": 2}, "  a = 1\r\n  b = 2\r\n"),
        ("z = 0\r\na = 1", {"b": 2}, "z = 0\r\na = 1\r\nb = 2"),
        ("'--a' = 1\n", {"b": 2}, "'--a' = 1\n'--b' = 2\n"),
        ('"--a" = 1\n', {"b": 2}, '"--a" = 1\n"--b" = 2\n'),
        ("--a = 1\n", {"b": 2}, "--a = 1\n--b = 2\n"),
        ("a = 1\n", {"b c": 2}, 'a = 1\n"b c" = 2\n'),
        ("'a' = 1\n", {"b'c": 2}, "'a' = 1\n\"b'c\" = 2\n"),
        (f"{ON} = 1 # x\n\nz = 2\n", {KEEP: "x"}, f'{ON} = 1 # x\n{KEEP} = "x"\n\nz = 2\n'),
        ("a = 1\n\n[t]\nb = 1\n", {"b": 2}, "a = 1\nb = 2\n\n[t]\nb = 1\n"),
        ("a = 1\n# t\n[[t]]\n", {"b": 2}, "a = 1\nb = 2\n# t\n[[t]]\n"),
        ("a = [\n  1, # x\n]\n[t]\n", {"b": 2}, "a = [\n  1, # x\n]\nb = 2\n[t]\n"),
        ("a.b = 1\n[t]\n", {"b": 2}, "a.b = 1\nb = 2\n[t]\n"),
        (
            f"a.b = 1\nc = 1\n  a.d = 1\n{ON}.x.y = 1\n[t]\n",
            {"b": 2},
            f"a.b = 1\nc = 1\n  a.d = 1\n{ON}.x.y = 1\nb = 2\n[t]\n",
        ),
        # Where no key stands.
        ("[t]\na = 1\n", {"a": 2}, "a = 2\n\n[t]\na = 1\n"),
        ("# t\r\n[t.u]\r\n", {"a": 2}, "a = 2\r\n\r\n# t\r\n[t.u]\r\n"),
        ("# f\n \n# t\n  [t]\n", {"a": 2, "b": 3}, "# f\n \na = 2\nb = 3\n\n# t\n  [t]\n"),
        ("# f\n", {"a": 2}, "# f\na = 2\n"),
        ("# f\r\n# g", {"a": 2}, "# f\r\n# g\r\na = 2"),
        ("# f", {"a": 2}, "# f\na = 2"),
        # Removed.
        ("a = 1 # one\nb = 2\n", {"a": None}, "b = 2\n"),
        ("a = 1\nb = [\n 1,\n]\n\n[t]\nb = 1\n", {"b": None}, "a = 1\n\n[t]\nb = 1\n"),
        ("# c\na = 1\r\nb = 2", {"b": None}, "# c\na = 1"),
        ("a = 1\nb = 2", {"a": None}, "b = 2"),
        ("a = 1\n", {"a": None}, ""),
        ("a = 1\nb = 2", {"a": None, "b": None}, ""),
        (f"a = 1\n{ON} = 1\nz = 1\n", {ON: None, KEEP: 1}, f"a = 1\n{KEEP} = 1\nz = 1\n"),
        # Everything at once.
        (
            TOML,
            {"model_family": "sd3", ON: None, INTERVAL: 2, "list": ["x"], "point": None, "when": 3},
            TOML.replace('"flux"', '"sd3"')
            .replace(f"--{ON} = true", f"--{INTERVAL} = 2")
            .replace("[ # of numbers\n  1,\n  2, # two\n]", '["x"]')
            .replace("point = {x = 1, y = {z = 2}} # inline\n", "")
            .replace("1979-05-27 07:32:00", "3"),
        ),
    ],
)
def test_toml(before, keys, after):
    assert edit(before, keys, "config.TOML") == after
    assert edited(MARK + before.encode(), "a.toml", keys) == MARK + after.encode()
    if after:
        tomllib.loads(after)
        assert edit(after, keys, "a.toml") == after


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", [None, -1])
def test_a_toml_file_and_back(newline, end):
    before = TOML[:end].replace("\n", newline)
    after = edit(before, {KEEP: ["attention"]}, "a.toml")
    line = f'--{KEEP} = ["attention"]'
    assert after == before.replace("= true", f"= true{newline}{line}")
    assert edit(after, {KEEP: None}, "a.toml") == before


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", [("SEG102", "")]),
        ("a = ", [("SEG103", "")]),
        ("a = 1\na = 2\n", [("SEG103", "")]),
        (f'"--{INTERVAL}" = 1\n{INTERVAL} = 1\n', [("SEG202", f"--{INTERVAL}")]),
        ("[a]\nb = 1\n", [("SEG203", "a")]),
        ("[a.b]\nc = 1\n", [("SEG203", "a")]),
        ("[[a]]\nb = 1\n", [("SEG203", "a")]),
        ("x = 1\na.b = 1\n", [("SEG203", "a")]),
    ],
)
def test_toml_that_cannot_be_edited(text, found):
    for value in (3, None):
        assert findings(edit, text, {"a": value}, "a.toml") == found


def test_the_place_of_a_finding():
    with pytest.raises(ConfigError, match=r"^a\.toml:2:2: SEG203 error: `a` is a table here"):
        edit("x = 1\n a.b = 1\n", {"a": 1}, "a.toml")
    with pytest.raises(ConfigError, match=r"^c:2:1: SEG202 error: `--a` is also given as `a`"):
        edit('{"a": 1,\n"--a": 1}', {"a": 1}, "c")


# Properties.

SPACE = st.text(" \t\r\n", max_size=3)
KEYS = ("a", "b:,", "", 'q"{', "é", "\u2028", ON, INTERVAL, KEEP)
LITERALS = [
    *("1e-4", "1E5", "-0.0", "0.10", "NaN", "null", "true", "1", '"2"', "12345678901234567890"),
    *('"\\u00e9"', '"é"', '"}"', '"\\ud83d"', "[ 1 ,2]", "[\n]", '{"a" :{}}'),
    f'{{"a":1,\n"{INTERVAL}":2}}',
]
VALUES = st.one_of(
    st.integers(),
    st.booleans(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.lists(st.text("ab", max_size=3), max_size=2),
)


@st.composite
def members(draw):
    """Members of a JSON object as pieces of text: space, key, colon, value, space."""
    names = draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=6))
    found = []
    for name in names:
        key = json.dumps(draw(st.sampled_from(["", "--"])) + name, ensure_ascii=draw(st.booleans()))
        colon = draw(SPACE) + ":" + draw(SPACE)
        found.append((draw(SPACE), key, colon, draw(st.sampled_from(LITERALS)), draw(SPACE)))
    return found


def plain(member):
    return json.loads(member[1]).removeprefix("--")


def joined(parts):
    return ",".join("".join(part) for part in parts)


@settings(deadline=None)  # a machine may be busy
@given(members(), SPACE, SPACE, SPACE, st.sampled_from(KEYS), VALUES)
def test_one_key_set_in_any_json(parts, before, inside, after, key, value):
    text = before + "{" + (joined(parts) or inside) + "}" + after
    result = edit(text, {key: value})
    at = [i for i, part in enumerate(parts) if plain(part) == key]
    if at:
        [at] = at
        space, name, colon, literal, more = parts[at]
        if result == text:
            there = json.loads(literal)
            assert there == value or there == str(value)
            return
        head = before + "{" + joined(parts[:at]) + ("," if at else "") + space + name + colon
        tail = more + ("," if at + 1 < len(parts) else "") + joined(parts[at + 1 :]) + "}" + after
        assert result.startswith(head)
        assert result.endswith(tail)
        assert json.loads(result[len(head) : len(result) - len(tail)]) == value
    elif parts:
        ours = [i for i, part in enumerate(parts) if plain(part) in (ON, INTERVAL, KEEP)]
        last = ours[-1] if ours else len(parts) - 1
        head = before + "{" + joined(parts[: last + 1]).removesuffix(parts[last][-1])
        tail = text.removeprefix(head)
        assert result.startswith(head)
        assert result.endswith(tail)
        new = result[len(head) : len(result) - len(tail)].strip(" \t\r\n").removeprefix(",")
        [(name, there)] = json.loads("{" + new + "}").items()
        assert name.removeprefix("--") == key
        assert there == value
    else:
        assert result.startswith(before + "{")
        assert result.endswith("}" + after)
        assert json.loads(result) == {key: value}


@settings(deadline=None)
@given(members(), SPACE, SPACE, st.data())
def test_one_key_removed_from_any_json(parts, before, after, data):
    assume(parts)
    at = data.draw(st.integers(0, len(parts) - 1))
    text = before + "{" + joined(parts) + "}" + after
    result = edit(text, {plain(parts[at]): None})
    if len(parts) == 1:
        assert result == before + "{}" + after
        return
    # The member goes with all that stands before it from the last one on, or after it to the next.
    rests = []
    if at > 0:
        last = (*parts[at - 1][:-1], parts[at][-1])
        rests.append([*parts[: at - 1], last, *parts[at + 1 :]])
    if at + 1 < len(parts):
        following = (parts[at][0], *parts[at + 1][1:])
        rests.append([*parts[:at], following, *parts[at + 2 :]])
    assert result in [before + "{" + joined(rest) + "}" + after for rest in rests]


@settings(deadline=None)
@given(members(), SPACE, st.dictionaries(st.sampled_from(KEYS), st.none() | VALUES))
def test_many_keys_changed_in_any_json(parts, inside, keys):
    text = "{" + (joined(parts) or inside) + "}"
    result = edit(text, keys)
    assert edit(result, keys) == result
    old, new = (
        [(key.removeprefix("--"), value) for key, value in json.loads(either).items()]
        for either in (text, result)
    )
    assert len(dict(new)) == len(new)
    for key, value in keys.items():
        assert key not in dict(new) if value is None else dict(new)[key] in (value, str(value))
    assert [(key, repr(value)) for key, value in new if key not in keys] == [
        (key, repr(value)) for key, value in old if key not in keys
    ]
    end = 0
    for part in parts:  # as they were written, in order
        if plain(part) not in keys:
            written = "".join(part[1:4])
            assert written in result[end:]
            end = result.index(written, end) + len(written)


WORDS = st.booleans() | st.integers(2) | st.text("xy") | st.lists(st.text("xy"), max_size=2)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["a", "b", ON, INTERVAL]), WORDS, min_size=1),
    st.dictionaries(st.sampled_from(["a", STRIDE, INTERVAL, KEEP]), st.none() | st.integers(2)),
    st.sampled_from([None, 0, 1, 4, "\t"]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.sampled_from(["", "--"]),
)
def test_json_as_it_is_usually_written(values, keys, indent, newline, final, dashes):
    """What comes out is what the stdlib writes for the new values in the same style."""
    separators = (",", ":") if indent is None and final else None

    def written(values):
        values = {dashes + key: value for key, value in values}
        text = json.dumps(values, indent=indent, separators=separators)
        return (text + "\n" * final).replace("\n", newline)

    assume("a" in values or "a" not in keys)
    there = [(key, keys.get(key, value)) for key, value in values.items()]
    new = [(key, value) for key, value in keys.items() if key not in values]
    ours = [i for i, (key, _) in enumerate(there) if key.startswith(ON)]
    place = ours[-1] + 1 if ours else len(there)
    after = [*there[:place], *new, *there[place:]]
    after = [(key, value) for key, value in after if value is not None]
    assume(after or indent is None)
    assert edit(written(values.items()), keys) == written(after)


# Key, text before the value, value, text after it.
LINES = [
    *((None, line, "", "") for line in ("", "  ", "# c", "  # d = 1", "d.e = 1", "d.f = 2 # c")),
    ("x", "x = ", "1", " # c"),
    ("y", "\ty=", "[\n1, # a\n]", ""),
    ("t", "t = ", "'''\n[t]\n'''", " "),
    ("i", "'--i' = ", "{j = 1e-4, k = {l = 0.10}}", ""),
    (ON, f"{ON} = ", "true", " # on"),
    (INTERVAL, f'  "--{INTERVAL}"\t=\t', '"x"', ""),
    (KEEP, f"{KEEP}=", '[ "ffn" ]', ""),
]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(LINES), unique=True).filter(lambda lines: any(k for k, *_ in lines)),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.sampled_from([ON, INTERVAL, KEEP, "new", "x", "y", "t", "i"]),
    st.none() | VALUES,
)
def test_one_key_in_any_toml(lines, table, newline, final, key, value):
    table = ["# of t", "[table]", "x = 1", f"{ON} = 1"] * table

    def written(lines):
        text = "".join(line + "\n" for line in [*map("".join, lines), *table])
        return (text if final else text.removesuffix("\n")).replace("\n", newline)

    names = [name for name, *_ in lines]
    lines = [tuple(parts) for _, *parts in lines]
    text = written(lines)
    result = edit(text, {key: value}, "a.toml")
    if key not in names:
        # The result is the text with one line put in.
        pairs = zip(text, result, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(text))
        assert result.endswith(text[same:])
        added = result[same : len(result) - len(text) + same]
        assert bool(added) is (value is not None)
        assert added.count(newline if newline in text else "\n") == bool(added)
        assert added.count("\n") == bool(added)
        old = [k.removeprefix("--") for k in tomllib.loads(text)]
        new = {k.removeprefix("--"): v for k, v in tomllib.loads(result).items()}
        if value is not None:
            assert new[key] == value
            ours = [k for k in old if k in (ON, INTERVAL, KEEP)]
            if ours:
                assert list(new).index(key) == old.index(ours[-1]) + 1
        return
    at = names.index(key)
    if value is None:
        assert result == written([*lines[:at], *lines[at + 1 :]])
    elif result == text:
        assert tomllib.loads("x=" + lines[at][1])["x"] in (value, str(value))
    else:
        mark = "@@"
        before, _, after = lines[at]
        head, tail = written([*lines[:at], (before, mark, after), *lines[at + 1 :]]).split(mark)
        assert result.startswith(head)
        assert result.endswith(tail)
        there = result[len(head) : len(result) - len(tail)]
        assert tomllib.loads("x=" + there) == {"x": value}


# Files.


def snapshot(folder):
    return {
        path.name: (path.is_symlink(), path.lstat().st_mode, path.is_file() and path.read_bytes())
        for path in folder.iterdir()
    }


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": 1}\r\n')
    return path


def test_write(config):
    assert write_keys(str(config), {"a": 2}) == config.with_name("config.json.bak")
    assert write_keys(config, {"a": 2}) is None
    assert write_keys(config, {"a": 3}) == config.with_name("config.json.bak1")
    assert write_keys(config, {"a": None}) == config.with_name("config.json.bak2")
    assert {name: data for name, (_, _, data) in snapshot(config.parent).items()} == {
        "config.json": b"{}\r\n",
        "config.json.bak": b'{"a": 1}\r\n',
        "config.json.bak1": b'{"a": 2}\r\n',
        "config.json.bak2": b'{"a": 3}\r\n',
    }


def test_write_toml(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(TOML)
    backup = write_keys(path, {INTERVAL: 2})
    assert backup.read_text() == TOML
    assert tomllib.loads(path.read_text()) == tomllib.loads(TOML) | {f"--{INTERVAL}": 2}


def test_nothing_to_write(config):
    before = config.stat()
    for keys in ({}, {"a": 1}, {"b": None}):
        assert write_keys(config, keys) is None
    assert config.stat() == before
    assert len(snapshot(config.parent)) == 1


def test_a_backup_overwrites_nothing(config):
    config.with_name("config.json.bak").symlink_to("nowhere")
    config.with_name("config.json.bak1").mkdir()
    config.with_name("config.json.bak2").write_text("")
    before = snapshot(config.parent)
    assert write_keys(config, {"a": 2}) == config.with_name("config.json.bak3")
    after = snapshot(config.parent)
    assert {name: after[name] for name in before if name != "config.json"} == {
        name: before[name] for name in before if name != "config.json"
    }


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o666])
def test_the_permissions_stay(config, mode):
    config.chmod(mode)
    backup = write_keys(config, {"a": 2})
    assert [stat.S_IMODE(path.stat().st_mode) for path in (config, backup)] == [mode, mode]


def test_nobody_else_can_read_a_copy_before_it_has_the_permissions(config, monkeypatch):
    config.chmod(0o644)
    chmod, seen = Path.chmod, []

    def recording(path, mode):
        seen.append(stat.S_IMODE(path.stat().st_mode))
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", recording)
    write_keys(config, {"a": 2})
    assert seen == [0o600, 0o600]


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
SOMEBODY, THEIRS = 1234, 5678  # a user and a group


def rights(path):
    status = path.stat()
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)


def as_somebody(call, *arguments):
    """Call as a user who belongs to the group THEIRS, too."""
    groups = os.getgroups()
    os.setgroups([THEIRS])
    os.seteuid(SOMEBODY)
    try:
        return call(*arguments)
    finally:
        os.seteuid(0)
        os.setgroups(groups)


@AS_ROOT
@pytest.mark.parametrize("mode", [0o600, 0o6755, 0o1640])
def test_owner_and_group_stay(config, mode):
    os.chown(config, SOMEBODY, THEIRS)
    config.chmod(mode)
    backup = write_keys(config, {"a": 2})
    assert rights(config) == rights(backup) == (SOMEBODY, THEIRS, mode)
    assert config.read_bytes() == b'{"a": 2}\r\n'


def test_extended_attributes_stay(config):
    try:
        os.setxattr(config, "user.comment", b"mine")
    except OSError:
        pytest.skip("this file system has none")
    backup = write_keys(config, {"a": 2})
    assert [os.getxattr(path, "user.comment") for path in (config, backup)] == [b"mine"] * 2


@AS_ROOT
def test_a_file_of_somebody_elses_stays_theirs():
    """Who may write it but not give files away writes it in place."""
    with tempfile.TemporaryDirectory() as folder:  # that of pytest is root's alone
        os.chmod(folder, 0o777)
        config = Path(folder, "config.json")
        config.write_text('{"a": 1}')
        os.chown(config, 0, THEIRS)
        config.chmod(0o664)
        number = config.stat().st_ino
        backup = as_somebody(write_keys, config, {"a": 2})
        assert config.read_text() == '{"a": 2}'
        assert (config.stat().st_ino, rights(config)) == (number, (0, THEIRS, 0o664))
        assert backup.read_text() == '{"a": 1}'
        assert rights(backup) == (SOMEBODY, 0, 0o604)  # nothing for a group that is not THEIRS


def test_all_names_of_a_file_lead_to_what_was_written(config, tmp_path):
    other = tmp_path / "other.json"
    other.hardlink_to(config)
    backup = write_keys(config, {"a": 25})
    assert other.read_bytes() == config.read_bytes() == b'{"a": 25}\r\n'
    assert other.samefile(config)
    assert write_keys(other, {"a": 1}).name == "other.json.bak"  # shorter again
    assert config.read_bytes() == backup.read_bytes() == b'{"a": 1}\r\n'


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_file_with_several_names_is_written_back(config, tmp_path, monkeypatch, error):
    (tmp_path / "other.json").hardlink_to(config)
    before = snapshot(tmp_path)
    real, calls = os.fsync, []

    def fail_once(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:  # after the backup's: all is written, and cannot be kept
            raise error
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises((ConfigError, KeyboardInterrupt)) as caught:
        write_keys(config, {"a": 2})
    assert isinstance(error, KeyboardInterrupt) or "; nothing was changed" in str(caught.value)
    assert len(calls) == 3
    assert snapshot(tmp_path) == before


def test_no_room_for_a_file_with_several_names(config, tmp_path):
    config.write_text(json.dumps({"a": "x" * 40_000}))
    (tmp_path / "other.json").hardlink_to(config)
    before = snapshot(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        found = findings(write_keys, config, {"b": "y" * 40_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found == [("SEG001", "")]
    assert snapshot(tmp_path) == before


def test_what_cannot_be_written_back_is_in_the_backup(config, tmp_path, monkeypatch):
    (tmp_path / "other.json").hardlink_to(config)
    real, calls = os.fsync, []

    def fail_from_then_on(descriptor):
        calls.append(descriptor)
        if len(calls) > 1:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_from_then_on)
    with pytest.raises(ConfigError, match=r"half written, and .*config.json.bak holds what it was"):
        write_keys(config, {"a": 2})
    assert config.with_name("config.json.bak").read_bytes() == b'{"a": 1}\r\n'


@AS_ROOT
def test_a_file_that_cannot_be_opened_is_not_said_to_be_half_written(config, tmp_path, monkeypatch):
    (tmp_path / "other.json").hardlink_to(config)
    before = snapshot(tmp_path)
    real = Path.open

    def refusing(path, mode="r", *args, **kwargs):
        if mode == "r+b":
            failing()
        return real(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(ConfigError, match="Permission denied; nothing was changed"):
        write_keys(config, {"a": 2})
    assert snapshot(tmp_path) == before


def test_a_link_stays_a_link(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "base.json").write_text('{"a": 1}')
    (tmp_path / "between").symlink_to(Path("shared", "base.json"))
    (tmp_path / "config.json").symlink_to("between")
    before = snapshot(tmp_path)
    assert write_keys(tmp_path / "config.json", {"a": 2}) == shared / "base.json.bak"
    assert os.readlink(tmp_path / "config.json") == "between"
    assert snapshot(tmp_path).keys() == before.keys()
    assert (shared / "base.json").read_text() == '{"a": 2}'
    assert (shared / "base.json.bak").read_text() == '{"a": 1}'


def test_the_name_given_decides_the_format(tmp_path):
    (tmp_path / "stored").write_text("a = 1\n")
    (tmp_path / "config.toml").symlink_to("stored")
    write_keys(tmp_path / "config.toml", {"a": 2})
    assert (tmp_path / "stored").read_text() == "a = 2\n"


def test_a_file_in_the_current_folder(config, monkeypatch):
    monkeypatch.chdir(config.parent)
    assert write_keys("config.json", {"a": 2}).samefile("config.json.bak")


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1,}', '{"a": 1, "--a": 1}', '{"a":1,"a":1}'])
def test_files_that_cannot_be_edited(config, content):
    config.write_text(content)
    before = snapshot(config.parent)
    assert len(findings(write_keys, config, {"a": 2})) == 1
    assert snapshot(config.parent) == before


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "dangling.json").symlink_to("nowhere.json")
    before = snapshot(tmp_path)
    for name in ("missing.json", "loop.json", "dangling.json", ".", "a\0b.json", "x" * 300):
        assert findings(write_keys, tmp_path / name, {"a": 2}) == [("SEG001", "")]
    assert snapshot(tmp_path) == before


def failing(*_, **__):
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Path, "touch"),
        (Path, "open"),
        (Path, "chmod"),
        (tempfile, "mkstemp"),
        (os, "fsync"),
        (os, "replace"),
    ],
)
def test_what_cannot_be_written_leaves_nothing_behind(config, monkeypatch, owner, name):
    before = snapshot(config.parent)
    real = Path.read_bytes(config)
    monkeypatch.setattr(Path, "read_bytes", lambda path: real)  # reading opens, too
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing)
        message = "config.json: SEG001 error: cannot be written: Permission denied; nothing was"
        with pytest.raises(ConfigError, match=message):
            write_keys(config, {"a": 2})
    monkeypatch.undo()
    assert snapshot(config.parent) == before


def test_an_interrupt_leaves_nothing_behind(config, monkeypatch):
    before = snapshot(config.parent)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_keys(config, {"a": 2})
    assert snapshot(config.parent) == before


def test_a_write_that_fails_halfway(config):
    config.write_text(json.dumps({"a": "x" * 100_000}))
    before = snapshot(config.parent)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        found = findings(write_keys, config, {"b": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found == [("SEG001", "")]
    assert snapshot(config.parent) == before


def test_no_room_for_the_name_of_a_backup(tmp_path):
    path = tmp_path / ("x" * 250 + ".json")
    path.write_text("{}")
    assert findings(write_keys, path, {"a": 2}) == [("SEG001", "")]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["{}"]


def test_a_write_protected_file(config, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    before = snapshot(config.parent)
    with pytest.raises(ConfigError, match="the file is write-protected; nothing was changed"):
        write_keys(config, {"a": 2})
    assert snapshot(config.parent) == before


def test_editing_needs_neither_torch_nor_for_json_tomlkit():
    code = (
        "import sys; from simpletuner_segckpt.config.edit import edited; "
        "edited(b'{}', 'x', {'a': 1}); assert not {'torch', 'tomlkit'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
