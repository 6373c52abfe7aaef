"""Amounts of memory as users write them: so many bytes, or so much of the device."""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic_core import PydanticCustomError

from .spelling import describe, finite_number, is_unset

# Unit -> its bytes.
UNITS = {
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
AUTO = "auto"
SHARE = "%"
_SPELLINGS = {unit.lower(): unit for unit in (*UNITS, SHARE)}
_NO_UNIT = "GiB"
# No device has as much; a number alone that comes to it was meant as bytes.
_TOO_MUCH = 1 << 50

# What ``auto`` leaves free of a device: a twentieth, and at least that many bytes.
_AUTO_PART = 20
_AUTO_LEAST = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory that a step may take. unit: of ``UNITS``, ``%`` of the device, or ``auto``."""

    number: float
    unit: str

    @classmethod
    def parse(cls, value: Any) -> "MemoryBudget | None":
        """What ``value`` says; None for unset. A number without a unit counts GiB.

        Raises ``PydanticCustomError``.
        """
        if isinstance(value, cls):
            return value
        if is_unset(value):
            return None
        if isinstance(value, str) and value.strip().lower() == AUTO:
            return cls(0, AUTO)
        number, unit = finite_number(value), _NO_UNIT
        if number is None and isinstance(value, str):
            number, unit = _parts(value)
        if number is None:
            raise PydanticCustomError(
                "wrong-type",
                "is {found}; write an amount of memory, as 22GiB, a share of the device, as 90%, "
                "or auto",
                {"found": describe(value)},
            )
        if unit == SHARE and not 0 < number <= 100:
            raise PydanticCustomError(
                "out-of-range",
                "is {found}; write a share of the device above 0% and up to 100%",
                {"found": describe(value)},
            )
        if unit != SHARE and not 1 <= number * UNITS[unit] < _TOO_MUCH:
            raise PydanticCustomError(
                "out-of-range",
                "is {found}; write an amount above 0 and below 1024 TiB, as 22GiB (a number alone "
                "counts GiB)",
                {"found": describe(value)},
            )
        return cls(float(number), unit)

    @property
    def of_device(self) -> bool:
        """Whether it depends on the memory of the device."""
        return self.unit in (SHARE, AUTO)

    @property
    def leaves_margin(self) -> bool:
        """Whether some of the device stays free of it."""
        return self.unit == AUTO

    def in_bytes(self, total: int) -> int:
        """Bytes of it, on a device of ``total`` bytes."""
        if self.unit == AUTO:
            return max(0, total - max(_AUTO_LEAST, total // _AUTO_PART))
        if self.unit == SHARE:
            return int(total * self.number / 100)
        return int(self.number * UNITS[self.unit])

    def __str__(self) -> str:
        """The way to write it in a config: ``22 GiB``, ``90%``, ``auto``."""
        if self.unit == AUTO:
            return AUTO
        # Not %g, which rounds, nor repr, whose exponents are no spelling of ours.
        number = format(Decimal(repr(self.number)), "f").removesuffix(".0")
        return f"{number}{self.unit}" if self.unit == SHARE else f"{number} {self.unit}"


def _parts(text: str) -> tuple[float | None, str]:
    """The number and the unit in ``text``; no number where that is none of our spellings."""
    found = re.fullmatch(r"\s*([+-]?[0-9]+(?:\.[0-9]*)?)\s*([A-Za-z%]+)\s*", text)
    if found is None:
        return None, ""
    letters = found[2].lower()
    if short := re.fullmatch(r"([kmgt])i?", letters):
        prefix = short[1].upper()
        raise PydanticCustomError(
            "wrong-type",
            'is "{found}"; write {number}{prefix}iB (powers of 1024) or {number}{prefix}B (powers '
            "of 1000)",
            {"found": text.strip(), "number": found[1], "prefix": prefix},
        )
    unit = _SPELLINGS.get(letters)
    return (float(found[1]), unit) if unit else (None, "")
