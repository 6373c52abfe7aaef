"""What happens inside the blocks while they run, counted thread by thread."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """What happened inside the blocks of one span, beside their being recomputed or not.

    feed_forwards: calls of feed-forwards that are recomputed by themselves.
    kept: outputs that a recompute takes from memory, by operator (``attention``, the
        ``collectives`` that belong to it, ``cross-attention``, ``ffn``).
    offloaded: tensors that wait for backward in CPU memory, by what saved them: an ``attention``,
        or a checkpoint call its ``inputs``.
    """

    feed_forwards: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    offloaded: Counter[str] = field(default_factory=Counter)


class _Counting(threading.local):
    tally: Tally | None = None


_counting = _Counting()


@contextmanager
def tallying() -> Iterator[Tally]:
    """Count what happens within this; see ``tally``."""
    before = _counting.tally
    _counting.tally = Tally()
    try:
        yield _counting.tally
    finally:
        _counting.tally = before


def tally() -> Tally | None:
    """What is being counted in this thread: the run of a block in forward, or nothing."""
    return _counting.tally
