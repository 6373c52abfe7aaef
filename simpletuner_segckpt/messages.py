"""What this package says while a model trains."""

import logging

logger = logging.getLogger("simpletuner_segckpt")


class Messages:
    """Says each thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)
