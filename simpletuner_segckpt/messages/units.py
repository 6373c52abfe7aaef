"""Bytes for people."""


def readable(amount: float) -> str:
    """``amount`` bytes in the largest binary unit of which there is one: ``1.4 MiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"
