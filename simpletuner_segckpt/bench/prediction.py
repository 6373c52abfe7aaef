"""What the estimator says of the same model, to be held against what is measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.settings import Settings
from ..costs.cards import Card, cards
from ..estimator.predict.modes import predict_mode
from ..estimator.predict.peak import time_of
from ..estimator.profile.profile import profile
from .trial import Trial


@dataclass(frozen=True)
class Prediction:
    """A mode. peak: bytes. seconds: of a step, where the card is known."""

    peak: float
    seconds: float | None = None


@dataclass(frozen=True)
class Predicted:
    """By mode, what is predicted, or why it cannot be carried out. note: on all of them."""

    modes: Mapping[str, Prediction]
    impossible: Mapping[str, str]
    note: str = ""


def predict(
    trial: Trial, settings: Settings, modes: Mapping[str, Mapping[str, Any]], card: Card | None
) -> Predicted:
    """Nothing for tiny models. Never raises for what the estimator cannot do: that is the note."""
    if trial.work is None:
        return Predicted({}, {})
    found: dict[str, Prediction] = {}
    impossible: dict[str, str] = {}
    try:
        measured = profile(trial.work)
        for mode, keys in modes.items():
            made = predict_mode(measured, trial.family, settings, mode, keys, card)
            if made.step is None:
                impossible[mode] = made.impossible
                continue
            seconds = time_of(made.step, card).total if card else None
            found[mode] = Prediction(made.step.peak, seconds)
    except Exception as error:  # a model that does not run without memory may run with it
        first = str(error).partition("\n")[0]
        return Predicted({}, {}, f"no predictions: {type(error).__name__}: {first}")
    where = f"of a step on {card.title}" if card else "without times, for a GPU"
    return Predicted(found, impossible, f"predictions are those of segckpt estimate, {where}")


def card_of(device_name: str) -> Card | None:
    """The known card that a driver calls so, for example ``NVIDIA H100 80GB HBM3``."""
    fitting = [card for card in cards().values() if device_name.startswith(card.title)]
    return max(fitting, key=lambda card: len(card.title), default=None)
