"""How often the parts of blocks run in a training step, counted where they run."""

from collections import Counter
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner_segckpt.model.stacks import blocks_of
from simpletuner_segckpt.recompute import kept_operators as keep
from simpletuner_segckpt.recompute.submodules import submodules_of
from simpletuner_segckpt.schedules.report import UNITS
from simpletuner_segckpt.verify.step import step


class Counts(TorchDispatchMode):
    """Runs of attention operators, and of projections that come down inside feed-forwards."""

    def __init__(self):
        super().__init__()
        self.attention = self.down = self.inside = 0

    @classmethod
    def ignore_compile_internals(cls):
        """As torch's own modes for checkpointing: compiled code is to run while this counts."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.attention += keep.is_attention(func)
        self.down += self.inside > 0 and keep.comes_down(func, args)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_parts(model, stacks, counts):
    """Calls of feed-forwards and attentions, by stack, block and kind."""
    calls = Counter()
    undo = []

    def counting(module, key):
        original = module.forward

        def forward(*args, **kwargs):
            calls[key] += 1
            counts.inside += key[2] == "feed_forward"
            try:
                return original(*args, **kwargs)
            finally:
                counts.inside -= key[2] == "feed_forward"

        module.forward = forward
        undo.append(module)

    for path, stack in stacks:
        for index, block in enumerate(blocks_of(model, path)):
            for kind, paths in (
                ("feed_forward", stack.projections),
                ("attention", stack.attention),
            ):
                for part in submodules_of(block, paths):
                    counting(part, (path, index, kind))
    try:
        yield calls
    finally:
        for module in undo:
            del module.forward


def watched(model, inputs, stacks):
    """A training step, with its counts."""
    counts = Counts()
    with counted_parts(model, stacks, counts) as calls, counts:
        result = step(model, inputs)
    return result, counts, calls


def described(fam, report):
    return [(s.path, fam.stack_at(s.path)) for s in report.stacks if s.path != UNITS]
