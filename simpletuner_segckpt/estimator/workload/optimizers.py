"""What optimizers keep for each trained parameter, from ``optimizers.toml`` beside this module."""

import tomllib
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict


class Optimizer(BaseModel):
    """What an optimizer keeps for each trained parameter; the file says what its fields mean."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    states: int = 0
    bytes: float = 0.0
    step: int = 0


@cache
def optimizers() -> dict[str, Optimizer]:
    """The known optimizers by the names that trainers' configs give them."""
    entries = tomllib.loads(
        files(__package__).joinpath("optimizers.toml").read_text("utf-8")
    ).items()
    return {name: Optimizer.model_validate(entry) for name, entry in entries}
