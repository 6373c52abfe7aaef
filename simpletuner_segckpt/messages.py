"""What this package says while a model trains."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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


class Messages:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)
