"""Containers among the arguments of a call.

A block gets the very objects that its loop passed, since it may write to them: keys and values that
layers share, a store that an attention processor fills. In backward the block is called again, when
they hold something else. So what is in them when a call begins is noted, put back while the call is
repeated, and what they hold by then comes back afterwards: the repeated call finds what the first
one found, and what it writes nobody sees.

A container is a list, dict, set or deque, or an object that is data by its class: a dataclass, a
``SimpleNamespace``, a ``UserDict`` or ``UserList``. Objects of other classes are not looked into.
"""

from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

# What most arguments are: asked first, since every covered block of every forward is.
_PLAIN = frozenset({Tensor, Parameter, type(None), bool, int, float, str, torch.dtype})

_BUILT_IN = (list, dict, set, deque)


def is_record(value: Any) -> bool:
    """Whether ``value`` is an object of no container class whose attributes are data."""
    if type(value) in _PLAIN or isinstance(value, (*_BUILT_IN, Module, Tensor, type)):
        return False
    return is_dataclass(value) or isinstance(value, (SimpleNamespace, UserDict, UserList))


def is_container(value: Any) -> bool:
    """Whether ``value`` is a container that could be written to."""
    return isinstance(value, _BUILT_IN) or is_record(value)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of ``value`` that are data, by name."""
    own = getattr(value, "__dict__", None)
    if own is not None or not is_dataclass(value):
        return dict(own or {})
    return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}


def containers(*values: Any) -> list[Any]:
    """Every container in ``values``, outer before inner, each once."""
    found: dict[int, Any] = {}
    for value in values:
        if type(value) not in _PLAIN:
            _find(value, found)
    return list(found.values())


def _find(value: Any, found: dict[int, Any]) -> None:
    if type(value) in _PLAIN:
        return
    if not isinstance(value, tuple):
        if not is_container(value) or id(value) in found:
            return
        found[id(value)] = value
    for inner in held_by(value):
        _find(inner, found)


def held_by(value: Any) -> Iterator[Any]:
    """What is directly in a tuple or a container."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (tuple, list, set, deque)):
        yield from value
    if not isinstance(value, tuple):
        yield from attributes_of(value).values()


@dataclass(slots=True)
class Contents:
    """What one container held at one time; of a dict its keys and values in turn."""

    container: Any
    items: list[Any]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, container: Any) -> "Contents":
        items: list[Any] = []
        if isinstance(container, dict):
            items = [part for item in container.items() for part in item]
        elif isinstance(container, _BUILT_IN):
            items = list(container)
        return cls(container, items, attributes_of(container))

    def put_back(self) -> None:
        """Have the container hold this again, past any method of its class."""
        now = Contents.of(self.container)
        if not _same(now.items, self.items):
            _fill(self.container, self.items)
        before, after = self.attributes, now.attributes
        if before.keys() != after.keys() or not _same(after.values(), before.values()):
            for name in after.keys() - before.keys():
                object.__delattr__(self.container, name)
            for name, value in before.items():
                object.__setattr__(self.container, name, value)


def _same(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _fill(container: Any, items: Sequence[Any]) -> None:
    if isinstance(container, dict):
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        for key, value in zip(items[::2], items[1::2], strict=True):
            kind.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), items)
    else:
        kind = set if isinstance(container, set) else deque
        kind.clear(container)
        (kind.update if kind is set else kind.extend)(container, items)


@contextmanager
def holding(noted: Sequence[Contents]) -> Iterator[None]:
    """Within this the containers hold what was noted of them; then what they hold now again."""
    now = [Contents.of(contents.container) for contents in noted]
    try:
        for contents in noted:
            contents.put_back()
        yield
    finally:
        for contents in now:
            contents.put_back()
