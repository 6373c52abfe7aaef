"""Why diffusers' group offloading cannot work with a schedule, before or after it is on a model."""

from .report import StackReport

# Where several blocks are moved at a time and some are recomputed, formatted with their number.
MOVED_TOGETHER = (
    "group offloading moves {} blocks at a time, and when one of them is recomputed only the first "
    "brings their weights back"
)
# Of the blocks that ``needed_again`` returns, by whatever name.
TAKEN_AWAY = (
    "group offloading takes the weights away that the backward of {} needs, since they are not "
    "recomputed as a whole; cover every block (no stride, no keep_last, no backend for "
    "feed-forwards, no memory budget)"
)


def needed_again(planned: StackReport, blocks: int) -> list[int]:
    """Of the blocks of a stack in which some are recomputed, those that are not as a whole.

    Within a memory budget that may be any of them.
    """
    if planned.within_budget:
        return list(range(blocks))
    recomputed = () if planned.feed_forward else planned.covered
    return [b for b in range(blocks) if b not in recomputed] if planned.covered else []
