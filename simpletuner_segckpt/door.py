"""The way into a model's loop: its checkpoint function and the two ends of its forward.

diffusers models ask ``self._gradient_checkpointing_func(block, *args)`` to run each block, and
``enable_gradient_checkpointing(gradient_checkpointing_func=...)`` is the public way to supply
that function. :class:`Door` is such a function. A forward pre-hook decides how the blocks of
this forward run, an always-called forward hook ends it.

Between two forwards a door holds plain data only, no module and no tensor, so a model with a
door can be deep-copied and pickled, and the copy is independent.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from .backends import BACKENDS
from .conditions import CALL_CONDITIONS, call_conditions, model_conditions
from .config_schema import CheckpointingConfig
from .links import Handed, plain_tree
from .report import UNITS, Condition, Effect, StackReport
from .schedule import Schedule
from .segments import Boundary, Forward, RecordingRun, SegmentedRun, StackRun, UnitsRun
from .stacks import blocks_of

logger = logging.getLogger("simpletuner_segckpt")

# By these attributes a module knows whether and how to checkpoint.
GATE_STATE = ("gradient_checkpointing", "_gradient_checkpointing_func")

# What tells one shape of call from another: its arguments, by presence.
CallShape = tuple[Any, ...]


class Door:
    """Stands in for a model's checkpoint function.

    ``parameters`` are the names of the parameters of the model's ``forward``, ``gates`` the
    names of the submodules that ask for a checkpoint function, ``conditions`` the arguments that
    force per-block. ``viewed``: the loop reaches the door through views of its lists, and must
    not ask its checkpoint function. ``off``: why the model's checkpointing stays switched off.
    """

    def __init__(
        self,
        stacks: Sequence[StackReport],
        config: CheckpointingConfig,
        parameters: Sequence[str],
        gates: Sequence[str],
        conditions: Sequence[Condition] = (),
        viewed: bool = False,
        off: str = "",
    ):
        self.stacks = tuple(stack for stack in stacks if stack.path != UNITS)
        counted = (stack.schedule for stack in stacks if stack.path == UNITS)
        self.units = next(counted, Schedule(0, ()))
        self.interval = config.interval
        self.stride = config.stride or config.interval
        self.backend = config.backend
        self.parameters = tuple(parameters)
        self.gates = tuple(gates)
        named = {condition.name for condition in conditions}
        general = (c for c in CALL_CONDITIONS if c.name not in named)
        self.conditions = (*conditions, *general)
        self.viewed = viewed
        self.off = off
        self.handles: list[RemovableHandle] = []
        # The GATE_STATE that each gate had before (a function may be lost in a copy: None).
        self.before: dict[str, dict[str, Any]] = {}
        self.effect: Effect | None = None
        self.gap_blocks: list[Module] = []  # only for calls that are being compiled
        self.proven: dict[tuple[CallShape, str], Sequence[Boundary]] = {}
        self._said: set[str] = set()
        self._running: dict[int, Forward] = {}  # one per thread

    def __getstate__(self) -> dict[str, Any]:
        before = {
            name: {key: None if _is_local(value) else value for key, value in state.items()}
            for name, state in self.before.items()
        }
        return self.__dict__ | {"_running": {}, "before": before}

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``block``, or hand on what its segment returned."""
        block = getattr(block, "__self__", block)  # some models pass `block.__call__`
        if torch.compiler.is_compiling():
            # A traced call keeps no books, so nothing can be proven: block by block.
            if any(gap is block for gap in self.gap_blocks):
                return block(*args, **kwargs)
            return BACKENDS[self.backend](block, *args, **kwargs)
        forward = self._running.get(threading.get_ident())
        if forward is None:
            self._say(
                logging.WARNING,
                "the model's forward was entered past its hooks (was `.forward` called "
                "directly?); every block is recomputed alone",
            )
            return BACKENDS[self.backend](block, *args, **kwargs)
        return forward.step(block, args, kwargs)

    @property
    def running(self) -> bool:
        """Whether a training forward of the model runs in this thread."""
        return threading.get_ident() in self._running

    def open(self, module: Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: decide how the blocks of this forward run."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if not self._enabled(module):
            return
        arguments = dict(zip(self.parameters, args, strict=False)) | kwargs
        conditions = call_conditions(self.conditions, arguments)
        shape = call_shape(arguments, module.training)
        runs = [self._run(module, stack, conditions, shape) for stack in self.stacks]
        checkpoint = BACKENDS[self.backend]
        units = UnitsRun(self.units, checkpoint, self.interval, self.stride)
        self._running[threading.get_ident()] = Forward(runs, units, conditions)
        if self.viewed:
            self.switch(module, False)  # until close: the loop takes its plain branch

    def close(self, module: Module, args: tuple, output: Any) -> Any:
        """Forward hook of the model: settle what ran; ``output`` is None when it raised."""
        if torch.compiler.is_compiling():
            return None
        forward = self._running.pop(threading.get_ident(), None)
        if forward is None:
            return None
        if self.viewed and not self._running:
            self.switch(module, True)
        if output is None:
            forward.abandon()
            return None
        forward.finish()
        for run in forward.runs:
            if isinstance(run, RecordingRun):
                self.proven[run.shape, run.path] = tuple(run.boundaries)
        self.effect = forward.effect()
        kept = any(isinstance(leaf, Handed) for leaf in pytree.tree_leaves(output))
        return plain_tree(output) if kept else None

    def _run(
        self, module: Module, stack: StackReport, conditions: list[Condition], shape: CallShape
    ) -> StackRun:
        blocks = blocks_of(module, stack.path)
        if len(blocks) != stack.blocks:
            self._say(
                logging.WARNING,
                f"{stack.path} has {len(blocks)} blocks now and had {stack.blocks} when the "
                "schedule was installed; call apply() again",
            )
        found = [c for c in conditions if c.concerns(stack.path)]
        if stack.strategy == "segmented" and not found:
            found = model_conditions(stack.path, blocks)
        if found:
            self._say(logging.WARNING, f"{stack.path} runs block by block: {found[0]}")
        common = (stack.path, stack.schedule, blocks, BACKENDS[self.backend])
        if found or stack.strategy != "segmented":
            return StackRun(*common, reason=str(found[0]) if found else stack.reason)
        boundaries = self.proven.get((shape, stack.path))
        if boundaries is None:
            return RecordingRun(*common, shape)

        def distrust(path: str, reason: str) -> None:
            self.proven[shape, path] = [reason] * len(boundaries)

        run = SegmentedRun(*common, boundaries=boundaries, on_broken=distrust)
        if run.reason:
            self._say(logging.WARNING, f"{stack.path} runs block by block: {run.reason}")
        return run

    def _enabled(self, module: Module) -> bool:
        """Whether the trainer wants checkpointing now; takes back a function put over ours."""
        if not self.gates:
            return not self.off
        gate: Any = module.get_submodule(self.gates[0])
        if not gate.gradient_checkpointing:
            return False
        if self.off:
            self._say(logging.WARNING, f"gradient checkpointing was enabled; off again: {self.off}")
            for name in self.gates:
                module.get_submodule(name).gradient_checkpointing = False  # type: ignore[assignment]
            return False
        if gate._gradient_checkpointing_func is not self:
            self.claim(module)
        return True

    def switch(self, module: Module, on: bool) -> None:
        """Set the flag by which each gate of ``module`` asks for a checkpoint function."""
        for name in self.gates:
            gate: Any = module.get_submodule(name)
            gate.gradient_checkpointing = on

    def claim(self, module: Module) -> None:
        """Be the checkpoint function of every gate of ``module``."""
        for name in self.gates:
            gate: Any = module.get_submodule(name)
            function = getattr(gate, "_gradient_checkpointing_func", None)
            if function is not self and not is_stock_function(function):
                self._say(
                    logging.WARNING,
                    f"the checkpoint function {getattr(function, '__qualname__', function)} "
                    "that was set on the model is replaced by the schedule",
                )
            gate._gradient_checkpointing_func = self

    def _say(self, level: int, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.log(level, message)


def is_stock_function(function: Any) -> bool:
    """Whether ``function`` is what diffusers itself sets on enable and disable."""
    return (
        function is None
        or function is torch.utils.checkpoint.checkpoint
        or getattr(function, "__module__", "") == "diffusers.models.modeling_utils"
    )


def _is_local(function: Any) -> bool:
    """Whether ``function`` was made inside another one and so cannot be pickled."""
    return "<locals>" in getattr(function, "__qualname__", "")


def call_shape(arguments: Mapping[str, Any], training: bool) -> CallShape:
    """The names of the arguments that are given, with the values of flags and modes."""

    def mark(value: Any) -> Any:
        if isinstance(value, (bool, str)):
            return value
        return tuple(sorted(map(str, value))) if isinstance(value, dict) else None

    given = ((name, mark(value)) for name, value in arguments.items() if value is not None)
    return (training, *sorted(given, key=lambda item: item[0]))
