"""How trainers' files really write values: numbers as text, several words for unset and off.

Each function returns the value meant, ``None`` for unset, or raises
``pydantic_core.PydanticCustomError`` with a type that is one of our rule names and a message
that says what to write instead. (Pydantic's own lax mode takes true for 1, has no words for unset,
and its messages do not say what to write.)
"""

import json
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, LiteralString

from pydantic_core import PydanticCustomError

UNSET = frozenset({"", "none", "null"})
TRUE = frozenset({"true", "yes", "on", "1"})
FALSE = frozenset({"false", "no", "off", "none", "0"})


def describe(value: Any) -> str:
    """``value`` as it stands in a file, shortened: ``"2.5"``, ``true``, ``a list``."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and abs(value) >= 10**12:
        return "a huge number"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    text = text.encode("utf-8", "backslashreplace").decode()  # JSON can hold half a character
    return text if len(text) <= 40 else text[:36] + ' ..."'


def is_unset(value: Any) -> bool:
    """Whether ``value`` is one of the ways to leave a key unset: null, ``""``, ``"None"``."""
    return value is None or (isinstance(value, str) and value.strip().lower() in UNSET)


def whole_number(minimum: int, what: str) -> Callable[[Any], int | None]:
    """A parser for integers >= ``minimum``; ``what`` names them in the message."""
    wanted = f"write a whole number, {minimum} or more ({what})"

    def parse(value: Any) -> int | None:
        if is_unset(value):
            return None
        number = finite_number(value)
        if number is None or number != int(number):
            raise PydanticCustomError(
                "wrong-type", "is {found}; {wanted}", {"found": describe(value), "wanted": wanted}
            )
        if not minimum <= number < 2**31:
            raise PydanticCustomError(
                "out-of-range", "is {found}; {wanted}", {"found": describe(value), "wanted": wanted}
            )
        return int(number)

    return parse


def real_number(value: Any) -> float | None:
    """A finite number >= 0, as used for loss weights."""
    if is_unset(value):
        return None
    number = finite_number(value)
    if number is None or not 0 <= number < 2**31:
        raise PydanticCustomError(
            "wrong-type", "is {found}; write a number, 0 or more", {"found": describe(value)}
        )
    return float(number)


def json_value(value: Any) -> Any:
    """A nested value, which trainers also write as JSON text; None for an empty one or off."""
    if isinstance(value, str):
        if value.strip().lower() in FALSE:
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value  # the path of a file, say
    return None if isinstance(value, (dict, list)) and not value else value


def finite_number(value: Any) -> int | float | None:
    """The number that ``value`` is or spells; None where it is none, NaN or infinite."""
    number = _number(value)
    return None if isinstance(number, float) and not math.isfinite(number) else number


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if not isinstance(value, str):
        return None
    try:
        return int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
    except ValueError:
        return None


def switch(hint: str = "") -> Callable[[Any], bool | None]:
    """A parser for booleans; ``hint`` is added to the message about a word it does not know."""

    def parse(value: Any) -> bool | None:
        if isinstance(value, bool):
            return value
        if isinstance(value, (int, float)) and value in (0, 1):
            return bool(value)
        if isinstance(value, str):
            word = value.strip().lower()
            if word in TRUE:
                return True
            if word in FALSE:
                return False
        if is_unset(value):
            return None
        raise PydanticCustomError(
            "wrong-type",
            "is {found}; write true or false{hint}",
            {"found": describe(value), "hint": hint},
        )

    return parse


def one_of(choices: Iterable[str]) -> Callable[[Any], str | None]:
    """A parser for one word out of ``choices``, in any case, with ``_`` for ``-``."""
    known = tuple(choices)

    def parse(value: Any) -> str | None:
        return (
            None if is_unset(value) else _choice(value, known, "is {found}; write one of {choices}")
        )

    return parse


def some_of(choices: Iterable[str]) -> Callable[[Any], tuple[str, ...] | None]:
    """A parser for a list out of ``choices``; a single word stands for a list of one."""
    known = tuple(choices)

    def parse(value: Any) -> tuple[str, ...] | None:
        if is_unset(value):
            return None
        items = value if isinstance(value, (list, tuple)) else [value]
        message = "holds {found}; write a list of one or more out of {choices}"
        return tuple(dict.fromkeys(_choice(item, known, message) for item in items))

    return parse


def _choice(value: Any, known: tuple[str, ...], message: LiteralString) -> str:
    word = value.strip().lower().replace("_", "-") if isinstance(value, str) else value
    if not isinstance(word, str) or word not in known:
        raise PydanticCustomError(
            "unknown-choice",
            message,
            {"found": describe(value), "choices": ", ".join(known)},
        )
    return word


def word(value: Any) -> str | None:
    """A name in lower case, without space around it."""
    if is_unset(value):
        return None
    if not isinstance(value, str):
        raise PydanticCustomError(
            "wrong-type", "is {found}; write a name in quotes", {"found": describe(value)}
        )
    return value.strip().lower()


def path(value: Any) -> str | None:
    """A path or the name of a repository, as it stands there."""
    return None if word(value) is None else str(value).strip()
