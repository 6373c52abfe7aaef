"""What training forwards have shown, by the shape of their call.

It holds for calls with the same arguments given, the same flags and, in dicts such as
``joint_attention_kwargs``, the same keys. What a key means to a loop nobody can tell, so each set
of keys is looked at by itself, until all of two or more have shown the same: then keys do not
matter, and another set of as many runs as those did. (Where a family file names what matters to
the loop, one set is enough.) Should that be wrong, the checks of its segments stop that forward
(``SegmentBroken``), and from then on keys matter again. Keys that are names of conditions always
do.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from .proof import Proof
from .recent import Recent

# Shapes of call that are remembered; the one that was not met for longest is forgotten.
MOST_SHAPES = 64

# Sets of keys that must have shown the same before others are taken to do so: of a model that a
# family file describes, and of any other.
AGREEING = {True: 1, False: 2}


class CallShape(NamedTuple):
    """What tells one shape of call from another.

    given: the arguments by name, with flags; of dicts how many keys they have, and which of these
        are names of conditions.
    keys: the other keys of each dict.
    """

    given: tuple[Any, ...]
    keys: tuple[tuple[str, ...], ...] = ()


def call_shape(
    arguments: Mapping[str, Any], training: bool, named: Collection[str] = ()
) -> CallShape:
    """The shape of a call with these arguments; ``named`` are the names of conditions."""
    given: list[tuple[Any, ...]] = []
    keys: list[tuple[str, ...]] = []
    for name, value in sorted(arguments.items()):
        if isinstance(value, dict):
            inside = sorted(map(str, value))
            given.append((name, len(inside), tuple(key for key in inside if key in named)))
            keys.append(tuple(key for key in inside if key not in named))
        elif value is not None:
            given.append((name, value if isinstance(value, bool) else None))
    return CallShape((training, *given), tuple(keys))


def with_hooks(shape: CallShape, hooks: Mapping[int, str]) -> CallShape:
    """The shape of a call during which these hooks of others act at boundaries between blocks."""
    return shape._replace(given=(*shape.given, *sorted(hooks.items())))


class ProofTable:
    """The proofs of one stack. Several threads may ask at once.

    described: whether a family file describes the model.
    """

    def __init__(self, described: bool = False):
        self._agreeing = AGREEING[described]
        self._proofs: Recent[CallShape, Proof] = Recent(MOST_SHAPES)

    def __len__(self) -> int:
        return len(self._proofs)

    def get(self, shape: CallShape) -> Proof | None:
        """What was shown for this shape, or alike for others that differ from it in keys."""
        proof = self._proofs.get(shape)
        if proof is not None:
            return proof
        alike = [(s, p) for s, p in self._proofs.items() if s.given == shape.given]
        if len(alike) < self._agreeing:
            return None
        latest, shown = alike[-1]
        for other, proof in alike:
            if not proof.links_as(shown):
                self._proofs.met(other)  # that keys matter is not forgotten while new ones come
                self._proofs.met(latest)
                return None
        self._proofs.met(latest)
        return shown

    def put(self, shape: CallShape, proof: Proof) -> None:
        """Remember what was shown for this shape."""
        self._proofs.put(shape, proof)
