"""GPUs, from ``cards.toml`` beside this module."""

import difflib
import tomllib
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict

from ..messages.errors import WorkloadError

DEFAULT_CARD = "h100"  # whose ratio of FLOPs to bandwidth orders the steps when none is named


class Card(BaseModel):
    """A GPU. memory: GiB. flops: dense bf16 FLOP/s. bandwidth, link: bytes/s."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    memory: float
    flops: float
    bandwidth: float
    link: float


@cache
def cards() -> dict[str, Card]:
    """The known cards by their short names."""
    return {
        name: Card.model_validate(entry)
        for name, entry in tomllib.loads(
            files(__package__).joinpath("cards.toml").read_text("utf-8")
        ).items()
    }


def card(name: str) -> Card:
    """The card of a short name. Raises ``WorkloadError`` naming those that are known."""
    wanted = name.strip().lower().replace("_", "-")
    if wanted not in cards():
        near = difflib.get_close_matches(wanted, cards(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(cards())}"
        raise WorkloadError(f"no card is called {name}; {hint}")
    return cards()[wanted]
