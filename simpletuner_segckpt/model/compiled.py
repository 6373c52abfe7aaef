"""What compiled code needs so that a recompute runs what its forward ran.

For one function ``torch.compile`` may have several pieces of code that fit a call: made first for
the shapes of that call alone, and later for any. It tries the one that ran last first, so that a
recompute can get other code than its forward had (when another shape came in between, as it does
where gradients accumulate); that code saves other tensors, and torch stops the backward with a
``CheckpointError`` (pytorch/pytorch#166926). Tried in the order in which they were made, the code
that fitted the forward fits the recompute first as well.
"""

import weakref
from typing import Any

import torch

from ..private.of_torch import set_most_recent_first

_holders: set[object] = set()


def try_oldest_first(holder: Any) -> weakref.finalize:
    """Have compiled code tried in the order in which it was made, as long as ``holder`` lives.

    Calling what is returned ends it earlier.
    """
    token = object()
    _holders.add(token)
    _set_order()
    return weakref.finalize(holder, _let_go, token)


def _let_go(token: object) -> None:
    _holders.discard(token)
    _set_order()


def _set_order() -> None:
    if set_most_recent_first is not None:
        set_most_recent_first(not _holders)


# Of a model that is compiled as a whole.
AS_A_WHOLE = "compiled as a whole: what is covered is recomputed unobserved"

SEGMENTS_IN_GRAPHS = torch.__version__ >= "2.14"

NO_SEGMENTS = (
    "block by block, since segments of several blocks in one graph can get wrong gradients from "
    "inductor before torch 2.14"
)

NO_BUDGET = (
    "every block recomputed, since a graph has one plan and a memory budget asks for one for each "
    "shape of call; compile the blocks instead (regional compilation)"
)

NOT_SHOWN = (
    "block by block, since no family file and no eager forward of this shape of call has shown "
    "what its blocks carry"
)
