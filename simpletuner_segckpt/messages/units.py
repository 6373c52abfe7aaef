"""Bytes for people."""

from typing import NamedTuple


class Unit(NamedTuple):
    name: str
    bytes: int


UNITS = (Unit("bytes", 1), Unit("KiB", 2**10), Unit("MiB", 2**20), Unit("GiB", 2**30))


def unit_of(amount: float, least: str = "bytes") -> Unit:
    """The largest unit of which ``amount`` bytes hold one, or else ``least``."""
    smallest = next(unit for unit in UNITS if unit.name == least)
    return next(
        (unit for unit in reversed(UNITS) if amount >= unit.bytes >= smallest.bytes), smallest
    )


def readable(amount: float) -> str:
    """``amount`` bytes in the largest unit of which there is one: ``1.4 MiB``."""
    unit = unit_of(amount)
    return f"{amount / unit.bytes:.{0 if unit.bytes == 1 else 1}f} {unit.name}"
