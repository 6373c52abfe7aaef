"""What was learned of calls, as long as they come."""

from collections import OrderedDict
from contextlib import suppress
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values of the ``most`` keys that were met last. Several threads may ask at once."""

    def __init__(self, most: int):
        self.most = most
        self._values: OrderedDict[K, V] = OrderedDict()  # those met last at the end

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> list[tuple[K, V]]:
        """All that is known, those met last at the end."""
        return list(self._values.items())

    def get(self, key: K) -> V | None:
        """The value of a key, which is met; None where it has none."""
        value = self._values.get(key)
        if value is not None:
            self.met(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Remember a value; the one that was not met for longest is forgotten."""
        self._values[key] = value
        self.met(key)
        while len(self._values) > self.most:
            self._values.popitem(last=False)

    def met(self, key: K) -> None:
        """The key is one of those that come."""
        with suppress(KeyError):  # forgotten meanwhile, by another thread
            self._values.move_to_end(key)
