"""How a single block can run: the words of the keys, for one block.

``plain`` keeps what backward needs, ``covered`` is recomputed as a whole, ``ffn`` recomputes its
feed-forward only; ``+inputs`` after that means that what enters it waits in CPU memory.
``+attention`` and ``+ffn`` after ``covered`` are operators whose outputs stay;
``+offload`` after the others means that what attention saves goes to CPU memory.
"""

from ...schedules.report import StackReport

PLAIN = "plain"


COVERED = "covered"


FFN = "ffn"


INPUTS = "+inputs"


OFFLOAD = "+offload"


ALL = (
    PLAIN,
    COVERED,
    "covered+attention",
    "covered+ffn",
    "covered+attention+ffn",
    FFN,
    FFN + INPUTS,
    PLAIN + OFFLOAD,
    FFN + OFFLOAD,
    FFN + INPUTS + OFFLOAD,
)


def of_block(stack: StackReport, index: int) -> str:
    """The treatment that a schedule gives to a block."""
    offloaded = OFFLOAD if index in stack.offloaded else ""
    if index in stack.gap:
        return PLAIN + offloaded
    if stack.feed_forward:
        return FFN + (INPUTS if stack.inputs_on_cpu else "") + offloaded
    return "+".join((COVERED, *(kind for kind in ("attention", "ffn") if kind in stack.kept)))


def instead_of(treatment: str) -> tuple[str, ...]:
    """``treatment``, then what happens to a block that lacks the part that it is about."""
    covered = treatment.startswith(COVERED)
    rest = treatment.removesuffix("+ffn") if covered else PLAIN
    if treatment.endswith(OFFLOAD):
        return treatment, PLAIN + OFFLOAD, PLAIN
    return treatment, rest, COVERED if covered else PLAIN
