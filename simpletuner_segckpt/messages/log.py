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


@contextmanager
def only_our_words() -> Iterator[None]:
    """Within this, other libraries log nothing below an error, whenever they are imported.

    Some (torchao, bitsandbytes) are loaded by others when these see fit, and then tell of each part
    of theirs that does not load.
    """
    before = logging.root.manager.disable
    logger.manager = logging.Manager(logging.root)  # what is disabled for others is not for us
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        del logger.manager
        logging.disable(before)


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
