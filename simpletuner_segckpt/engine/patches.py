"""What is changed on a model so that the calls of its blocks reach its entry, and taken back.

Where a loop asks a checkpoint function, the entry is set as that. Where it must not or cannot, and
for what is treated inside a block, the modules themselves are intercepted (see
``model.interception``). All of it is looked at again before every training forward: an adapter, a
compiler or FSDP may have put something else there since.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.nn import Module

from ..model.flags import CheckpointFlags, described
from ..model.interception import RECEIVER, CallReceiver, block_function, intercept, release
from ..model.stacks import blocks_of, units_of
from ..recompute.submodules import Owner, SubmoduleHook, SubmoduleKind, intercept_submodules
from .planner import ForwardPlanner


class Receiver(CallReceiver, Owner, Protocol):
    """What the calls are led to."""


class ModelPatches:
    """What is changed on the modules of one model.

    forwards: of the model, for its stacks as they are scheduled now.
    flags: the modules that ask for a checkpoint function.
    intercepts: whether calls come from the blocks themselves, so that the loop must not ask.
    functions: by stack path, the function that runs its blocks, where the loop calls no block.
    units: paths of the modules of no stack that run one by one, in which ``*`` is any name.
    parts: attribute paths in the blocks of each stack of what does not run as the rest of them.
    """

    def __init__(
        self,
        forwards: ForwardPlanner,
        flags: CheckpointFlags,
        *,
        intercepts: bool = False,
        functions: Mapping[str, str] | None = None,
        units: Sequence[str] = (),
        parts: Mapping[str, Mapping[SubmoduleKind, Sequence[str]]] | None = None,
    ):
        self.forwards = forwards
        self.flags = flags
        self.intercepts = intercepts
        self.functions = dict(functions or {})
        self.units = tuple(units)
        self.parts = dict(parts or {})

    def claim(self, module: Module, entry: Receiver) -> None:
        """Make ``entry`` the checkpoint function of ``module``; says what it takes the place of."""
        messages = self.forwards.messages
        if self.flags.is_uneven(module):
            messages.warn(
                "replaced",
                "checkpointing was switched on for some of the model's layers only "
                "(every_n_layers?); the schedule takes its place",
            )
        for function in self.flags.set_function(module, entry):
            messages.warn(
                "replaced",
                f"the checkpoint function {described(function)} that was set on the model is "
                "replaced by the schedule",
            )

    def intercept_blocks(self, module: Module, entry: Receiver) -> None:
        """Lead the calls of the blocks of ``module`` to ``entry``, and those of its units."""
        stacks = [stack.path for stack in self.forwards.stacks]
        for path in stacks:
            name = self.functions.get(path)
            function = block_function(type(module), name) if name else None
            intercept(blocks_of(module, path), entry, function)
        if self.intercepts and self.units:
            intercept(map(module.get_submodule, units_of(module, self.units, stacks)), entry)

    def intercept_parts(self, module: Module, entry: Receiver) -> None:
        """Have the parts of the blocks run as the block around them wants it."""
        for stack in self.forwards.stacks:
            for kind, paths in self.parts.get(stack.path, {}).items():
                blocks = blocks_of(module, stack.path)
                for index, block in enumerate(blocks):
                    recomputed = self.forwards.config.feed_forward_only and index in stack.covered
                    part = SubmoduleHook(kind, entry, recomputed and kind == "feed_forward", blocks)
                    intercept_submodules(block, paths, part)

    def undo(self, module: Module, entry: Receiver) -> None:
        """Leave ``module`` as it was before."""

        def leads_there(part: Module) -> bool:
            way: Any = part.__dict__.get(RECEIVER)
            return way is entry or (isinstance(way, SubmoduleHook) and way.owner is entry)

        # Not by their paths: an adapter may have been put around a part since.
        release(part for part in module.modules() if leads_there(part))
        self.flags.restore(module)
