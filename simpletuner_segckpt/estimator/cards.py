"""GPUs and optimizers, from the data files beside this module."""

import difflib
import tomllib
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict

from ..errors import WorkloadError


class Card(BaseModel):
    """A GPU. memory: GiB. flops: dense bf16 FLOP/s. bandwidth, link: bytes/s."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    memory: float
    flops: float
    bandwidth: float
    link: float


class Optimizer(BaseModel):
    """What an optimizer keeps for each trained parameter, see ``optimizers.toml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    states: int = 0
    bytes: float = 0.0
    step: int = 0


@cache
def cards() -> dict[str, Card]:
    """The known cards by their short names."""
    return {name: Card.model_validate(entry) for name, entry in _read("cards.toml").items()}


@cache
def optimizers() -> dict[str, Optimizer]:
    """The known optimizers by the names that trainers' configs give them."""
    entries = _read("optimizers.toml").items()
    return {name: Optimizer.model_validate(entry) for name, entry in entries}


def card(name: str) -> Card:
    """The card of a short name. Raises ``WorkloadError`` naming those that are known."""
    wanted = name.strip().lower().replace("_", "-")
    if wanted not in cards():
        near = difflib.get_close_matches(wanted, cards(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(cards())}"
        raise WorkloadError(f"no card is called {name}; {hint}")
    return cards()[wanted]


def _read(name: str) -> dict[str, dict]:
    return tomllib.loads(files(__package__).joinpath("data", name).read_text("utf-8"))
