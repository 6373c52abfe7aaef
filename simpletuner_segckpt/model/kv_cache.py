"""KV caches, which a recompute in backward would fill once more.

Models of transformers make a cache in every forward unless an argument or their config says no,
and the parts of a model decide on their own: the decoder of an encoder-decoder, the language
model inside a vision-language model, a decoder inside a class of one's own. The library's own
rule, no cache while checkpointing is on, asks the model's switch and training mode; here it holds
wherever a training forward recomputes.
"""

import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from ..schedules.conditions import is_cache

if TYPE_CHECKING:
    from torch.nn import Module


ARGUMENT = "use_cache"


class Trains(Protocol):
    """What is asked whether a training forward runs."""

    @property
    def takes_calls(self) -> bool: ...

    def say_cache_is_off(self) -> None: ...


class CacheOff:
    """Forward pre-hook of a module that may make a KV cache: not while ``entry`` recomputes.

    place: of ``use_cache`` among the arguments by position.
    default: its value when it is not given; None leaves it to the module's config.
    """

    def __init__(self, entry: Trains, place: int, default: Any):
        self.entry = entry
        self.place = place
        self.default = default

    def __call__(
        self, module: "Module", args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        if not (self.entry.takes_calls and self._wanted(module, args, kwargs)):
            return None
        if any(map(is_cache, (*args, *kwargs.values()))):
            return None  # the blocks that are given it are not recomputed
        self.entry.say_cache_is_off()
        if len(args) > self.place:
            return (*args[: self.place], False, *args[self.place + 1 :]), kwargs
        return args, kwargs | {ARGUMENT: False}

    def _wanted(self, module: "Module", args: tuple, kwargs: dict[str, Any]) -> bool:
        by_position = len(args) > self.place
        given = args[self.place] if by_position else kwargs.get(ARGUMENT, self.default)
        if given is None:
            given = getattr(getattr(module, "config", None), ARGUMENT, False)
        return bool(given)


def cache_makers(
    model: "Module", stacks: Iterable[str], entry: Trains
) -> Iterator[tuple["Module", CacheOff]]:
    """The parts of ``model`` outside its stacks that take ``use_cache``, each with its hook."""
    blocks = tuple(f"{path}." for path in stacks)
    for path, module in model.named_modules():
        parameters = [] if path.startswith(blocks) else _parameters(module)
        for place, parameter in enumerate(parameters):
            if parameter.name == ARGUMENT:
                empty = parameter.default is inspect.Parameter.empty
                yield module, CacheOff(entry, place, None if empty else parameter.default)


def _parameters(module: "Module") -> list[inspect.Parameter]:
    """Those of the module's forward; none where it has no readable signature."""
    try:
        return list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
