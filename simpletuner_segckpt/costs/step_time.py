"""How long a step takes on a card: a roofline, and the time that Python needs to launch kernels.

A card that has all the work it wants multiplies matrices at a share of its data sheet's rate, and
everything else waits for its memory. With little work for each kernel it is the host that is
waited for; then FLOPs say nothing, and only the number of kernels does.
"""

from dataclasses import dataclass

from .cards import Card
from .records import Work

# Shares of the data sheet that large matrix products, fused attention and everything else reach.
# Assumptions from common experience, not fitted to any published step time.
PRODUCTS = 0.65


ATTENTION = 0.50


MEMORY = 0.85


# Seconds that the host needs for a kernel that Python launches, and for one that autograd does.
# The first is fitted to the published difference between `layer` and `none` of three families
# (48 to 71 us for Lumina 2, LTX-Video and Z-Image on an H100); the second is an assumption.
LAUNCH = 60e-6


LAUNCH_BACKWARD = 10e-6


@dataclass(frozen=True)
class Time:
    """Seconds for a step: what the card, the host and the link to CPU memory each need."""

    card: float
    host: float
    link: float

    def __add__(self, other: "Time") -> "Time":
        return Time(self.card + other.card, self.host + other.host, self.link + other.link)

    @property
    def total(self) -> float:
        """The step. What is moved is not hidden behind the rest."""
        return max(self.card, self.host) + self.link

    @property
    def launch_bound(self) -> bool:
        """Whether the card waits for the host, so that FLOPs say nothing about the time."""
        return self.host > self.card


def time_for(forward: Work, backward: Work, recomputed: Work, moved: float, card: Card) -> Time:
    """The time of some work on ``card``; ``backward`` contains ``recomputed``.

    moved: bytes to CPU memory, which come back as well. All of it is linear, so that the times of
    the blocks add up to that of the step.
    """
    work = forward + backward
    launched = forward.kernels + recomputed.kernels
    return Time(
        card=work.products / (card.flops * PRODUCTS)
        + work.attention / (card.flops * ATTENTION)
        + work.traffic / (card.bandwidth * MEMORY),
        host=launched * LAUNCH + (work.kernels - launched) * LAUNCH_BACKWARD,
        link=2 * moved / card.link,
    )
