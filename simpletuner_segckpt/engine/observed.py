"""What is seen of a model's forwards: the effect of the last one, and the history of all."""

from collections.abc import Mapping

from torch.nn import Module

from ..messages.log import logger
from ..schedules.conditions import Condition
from ..schedules.effect import Effect
from ..schedules.history import History
from .proof import Proof


class Observed:
    """What the forwards of one model did.

    effect: of the last training forward that was seen; None before the first one.
    overall: the history of this model and of its deep copies in this process together.
    """

    def __init__(self) -> None:
        self.effect: Effect | None = None
        self.history = History()
        self.overall = History()

    def without_gradients(self) -> None:
        """A forward that does not train."""
        for history in (self.history, self.overall):
            history.without_gradients += 1

    def switched_off(self, condition: Condition) -> None:
        """A forward with gradients, while checkpointing was off."""
        self.effect = Effect((), (condition,))
        for history in (self.history, self.overall):
            history.switched_off += 1

    def compiled(self) -> None:
        """A training forward that is traced: no more than that will be seen of it."""
        for history in (self.history, self.overall):
            history.compiled = True

    def past_the_forward(self, condition: Condition) -> None:
        """A block that was recomputed outside any forward of the model."""
        self.effect = Effect((), (condition,))
        for history in (self.history, self.overall):
            history.past_the_hooks += 1
            history.recomputed = True

    def trained(self, model: Module, effect: Effect, proofs: Mapping[str, Proof]) -> None:
        """One more training forward, seen to its end; of the first it is said what it proved."""
        for history in (self.history, self.overall):
            history.add(effect)
        if self.overall.trained > 1:
            return
        lines = [f"first training forward of {type(model).__name__}", *str(effect).split("\n")]
        for path, proof in proofs.items():
            lines.append(f"{path}, from the next one on:")
            lines.append(f"  {proof.schedule}")
        logger.info("%s", "\n  ".join(lines))
