"""What of a budget the predicted peak of a step may reach."""

from ...config_schema import MemoryBudget
from ...costs.cards import Card
from ...costs.records import GIB

CONTEXT = 0.5 * GIB  # bytes that a CUDA context and its libraries take of the card


MARGIN = 0.05  # of the budget: twice the estimator's median error, see docs/estimator.md


def usable(budget: float, margin: float = MARGIN) -> float:
    """Of ``budget`` bytes of a card, those for the peak: without margin and CUDA context."""
    return budget * (1 - margin) - CONTEXT


def margin_beside(budget: MemoryBudget, margin: float = MARGIN) -> float:
    """The margin to take of a budget that may leave one itself."""
    return 0.0 if budget.leaves_margin else margin


def in_bytes(budget: MemoryBudget, on: Card | None) -> int | None:
    """Bytes of a budget on a card; None where it depends on the card and none is named."""
    if budget.of_device and on is None:
        return None
    return budget.in_bytes(int(on.memory * GIB) if on else 0)
