"""What this package says while a model trains."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from .findings import CODES

logger = logging.getLogger("simpletuner_segckpt")


@contextmanager
def quiet(log: logging.Logger, level: int) -> Iterator[None]:
    """Within this, ``log`` says nothing below ``level``."""
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


def warn(rule: str, message: str) -> None:
    """Say ``message`` with the code of its rule."""
    logger.warning("%s %s", CODES[rule], message)


class Messages:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, rule: str, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warn(rule, message)
