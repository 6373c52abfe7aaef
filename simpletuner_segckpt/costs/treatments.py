"""How a single block can run: the words of the keys, for one block.

``plain`` keeps what backward needs, ``covered`` is recomputed as a whole, ``ffn`` recomputes its
feed-forward only; ``+inputs`` after that means that what enters it waits in CPU memory.
``+attention``, ``+cross-attention``, ``+ffn`` after ``covered`` are operators whose outputs stay;
``+offload`` after the others means that what attention saves goes to CPU memory.
"""

from collections.abc import Collection, Sequence
from itertools import combinations

from ..config_schema.keys import KEEP
from ..schedules.report import StackReport
from ..schedules.schedule import Kept, Schedule

PLAIN = "plain"


COVERED = "covered"


FFN = "ffn"


INPUTS = "+inputs"


OFFLOAD = "+offload"


KEPT = tuple(kinds for count in range(len(KEEP) + 1) for kinds in combinations(KEEP, count))


def keeping(kinds: Collection[str]) -> str:
    """The treatment of a block that is recomputed but for the outputs of these operators."""
    return "+".join((COVERED, *(kind for kind in KEEP if kind in kinds)))


def kept_in(treatment: str) -> Kept:
    """The operators whose outputs stay with a treatment."""
    return tuple(treatment.split("+")[1:]) if treatment.startswith(COVERED) else ()


def schedule_of(treatments: Sequence[str]) -> Schedule:
    """The schedule in which the blocks of a stack, each by itself, are treated so."""
    covered = (b for b, treatment in enumerate(treatments) if treatment.startswith(COVERED))
    kept = tuple(map(kept_in, treatments))
    segments = tuple(range(block, block + 1) for block in covered)
    return Schedule(len(treatments), segments, kept if any(kept) else ())


CROSS = keeping(["cross-attention"])


ALL = (
    PLAIN,
    *map(keeping, KEPT),
    FFN,
    FFN + INPUTS,
    PLAIN + OFFLOAD,
    FFN + OFFLOAD,
    FFN + INPUTS + OFFLOAD,
)


# What of the operators to keep the blocks of a stack may lack.
_LACKING = ((), ("ffn",), ("cross-attention",), ("cross-attention", "ffn"))


def of_block(stack: StackReport, index: int) -> str:
    """The treatment that a schedule gives to a block."""
    offloaded = OFFLOAD if index in stack.offloaded else ""
    if index in stack.gap:
        return PLAIN + offloaded
    if stack.feed_forward:
        return FFN + (INPUTS if stack.inputs_on_cpu else "") + offloaded
    return keeping(stack.schedule.kept_by(index))


def instead_of(treatment: str) -> tuple[str, ...]:
    """``treatment``, then what happens to a block that lacks the part that it is about."""
    if treatment.startswith(COVERED):
        kinds = kept_in(treatment)
        return tuple(keeping([kind for kind in kinds if kind not in gone]) for gone in _LACKING)
    if treatment.endswith(OFFLOAD):
        return treatment, PLAIN + OFFLOAD, PLAIN
    return treatment, PLAIN
