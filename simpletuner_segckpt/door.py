"""The way into a model's loop: its checkpoint function and the two ends of its forward.

diffusers models ask ``self._gradient_checkpointing_func(block, *args)`` to run each block, and
``enable_gradient_checkpointing(gradient_checkpointing_func=...)`` is the public way to supply
that function. :class:`Door` is such a function. A forward pre-hook decides how the blocks of
this forward run, an always-called forward hook ends it. Where a loop must not or cannot ask its
checkpoint function, views of its lists lead to the door instead (see ``view``).

Between two forwards a door keeps no activation alive, and a copy of the model has a door of its
own: deep copies and pickles of a model with a door are independent.
"""

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from .backends import BACKENDS
from .conditions import CALL_CONDITIONS, call_conditions
from .config_schema import CheckpointingConfig
from .hooks import model_conditions
from .links import Handed, plain_tree
from .report import UNITS, Condition, Effect, StackReport
from .schedule import Schedule
from .segments import (
    Forward,
    Proof,
    RecordingRun,
    SegmentedRun,
    Stack,
    StackRun,
    UnitsRun,
)
from .stacks import blocks_of
from .view import put_view, take_view

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
        self.checkpoint = BACKENDS[config.backend]
        self.parameters = tuple(parameters)
        self.gates = tuple(gates)
        named = {condition.name for condition in conditions}
        general = (c for c in CALL_CONDITIONS if c.name not in named)
        self.conditions = (*conditions, *general)
        self.viewed = viewed
        self.off = off
        self.effect: Effect | None = None
        self.handles: list[RemovableHandle] = []
        # The GATE_STATE that each gate had before (a function may be lost in a copy: None).
        self.before: dict[str, dict[str, Any]] = {}
        self.gap_blocks: list[Module] = []  # only for calls that are being compiled
        self._proven: dict[tuple[CallShape, str], Proof] = {}
        self._said: set[str] = set()
        self._forget_runs()

    def _forget_runs(self) -> None:
        self._running: dict[int, Forward] = {}  # by thread
        # The model and the shallow copies of it that regional compilation makes.
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        before = {
            name: {key: None if _is_local(value) else value for key, value in state.items()}
            for name, state in self.before.items()
        }
        state = {key: value for key, value in self.__dict__.items() if key not in _OF_ONE_PROCESS}
        return state | {"before": before}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_runs()

    # Called from the model's loop.

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``block``, or hand on what its segment returned."""
        owner = getattr(block, "__self__", None)
        if isinstance(owner, Module) and block.__func__ in (type(owner).__call__, Module.__call__):
            block = owner  # some models hand over `block.__call__`
        if torch.compiler.is_compiling():
            # A traced call keeps no books, so nothing can be proven: block by block.
            if any(gap is block for gap in self.gap_blocks):
                return block(*args, **kwargs)
            return self.checkpoint(block, *args, **kwargs)
        forward = self._running.get(threading.get_ident())
        if forward is None:
            self._say(
                logging.WARNING,
                "the model's forward was entered past its hooks (was `.forward` called "
                "directly?); every block is recomputed alone",
            )
            return self.checkpoint(block, *args, **kwargs)
        return forward.step(block, args, kwargs)

    @property
    def running(self) -> bool:
        """Whether the blocks of a training forward in this thread are to come through here."""
        if torch.compiler.is_compiling():
            return not self.off and torch.is_grad_enabled()
        return threading.get_ident() in self._running

    # Hooks of the model.

    def open(self, module: Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: decide how the blocks of this forward run."""
        if torch.compiler.is_compiling():
            self._prepare_compiled(module)
            return
        # One that a KeyboardInterrupt ended: torch then calls no hook.
        interrupted = self._running.pop(threading.get_ident(), None)
        if not torch.is_grad_enabled() or not self._enabled(module, interrupted is not None):
            return
        arguments = dict(zip(self.parameters, args, strict=False)) | kwargs
        conditions = call_conditions(self.conditions, arguments)
        shape = call_shape(arguments, module.training)
        runs = [self._run(module, stack, conditions, shape) for stack in self.stacks]
        units = UnitsRun(self.units, self.checkpoint, self.interval, self.stride)
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
        self.effect = forward.effect()
        for run in forward.runs:
            if not run.units and len(run.stack.blocks):
                self._say(
                    logging.WARNING,
                    f"{run.stack.path} was not reached: the model runs its blocks without asking "
                    "its checkpoint function, and nothing of it is recomputed",
                )
            elif isinstance(run, RecordingRun):
                self._proven[run.shape, run.stack.path] = run.proof()
        kept = any(isinstance(leaf, Handed) for leaf in pytree.tree_leaves(output))
        return plain_tree(output) if kept else None

    # What they need.

    def _run(
        self,
        module: Module,
        planned: StackReport,
        conditions: Sequence[Condition],
        shape: CallShape,
    ) -> StackRun:
        blocks = blocks_of(module, planned.path)
        stack = Stack(planned.path, planned.schedule, blocks, self.checkpoint)
        found = [str(c) for c in conditions if c.concerns(planned.path)]
        if len(blocks) != planned.blocks:
            found.append(
                f"it has {len(blocks)} blocks now and had {planned.blocks} when the schedule was "
                "installed; call apply() again"
            )
        if planned.strategy == "segmented" and not found:
            found += map(str, model_conditions(planned.path, blocks))
        if found:
            self._say_per_block(planned.path, found[0])
        if found or planned.strategy != "segmented":
            return StackRun(stack, found[0] if found else planned.reason)
        key = shape, planned.path
        proof = self._proven.get(key)
        if proof is None:
            return RecordingRun(stack, shape)
        if proof.reason:
            self._say_per_block(planned.path, proof.reason)
        stack = Stack(planned.path, proof.schedule, blocks, self.checkpoint)
        return SegmentedRun(stack, proof, partial(self._distrust, key, planned))

    def _distrust(self, key: tuple[CallShape, str], planned: StackReport, reason: str) -> None:
        """Segments were wrong for this shape of call: no more of them."""
        boundaries = [reason] * (planned.blocks - 1)
        self._proven[key] = Proof.of(planned.schedule, boundaries)

    def _enabled(self, module: Module, interrupted: bool) -> bool:
        """Whether the trainer wants checkpointing now; takes back what was put over ours."""
        paused = self.viewed and (interrupted or bool(self._running))
        wanted = all(_gate(module, name).gradient_checkpointing for name in self.gates[:1])
        if not wanted and not paused:
            return False
        if self.off:
            if self.gates:
                self._say(logging.WARNING, f"gradient checkpointing is off again: {self.off}")
                self.switch(module, False)
            return False
        if module not in self._models:
            self._models.add(module)
            if self.viewed:
                self.put_views(module)
        if any(_gate(module, n)._gradient_checkpointing_func is not self for n in self.gates[:1]):
            self.claim(module)
        return True

    def _prepare_compiled(self, module: Module) -> None:
        """What ``_enabled`` does, in what a traced forward may do: no message, no books."""
        for name in self.gates:
            gate = _gate(module, name)
            if gate.gradient_checkpointing:
                gate.gradient_checkpointing = not self.off and not self.viewed
                gate._gradient_checkpointing_func = self

    # How apply() and remove() change the model.

    def claim(self, module: Module) -> None:
        """Be the checkpoint function of every gate of ``module``."""
        for name in self.gates:
            gate = _gate(module, name)
            function = getattr(gate, "_gradient_checkpointing_func", None)
            if function is not self and not is_stock_function(function):
                self._say(
                    logging.WARNING,
                    f"the checkpoint function {getattr(function, '__qualname__', function)} "
                    "that was set on the model is replaced by the schedule",
                )
            gate._gradient_checkpointing_func = self

    def switch(self, module: Module, on: bool) -> None:
        """Set the flag by which each gate of ``module`` asks for a checkpoint function."""
        for name in self.gates:
            _gate(module, name).gradient_checkpointing = on

    def put_views(self, module: Module) -> None:
        """Lead the loops of ``module`` here through views of its stacks."""
        for stack in self.stacks:
            put_view(module, stack.path, self)

    def detach(self, module: Module) -> None:
        """Leave ``module``, and every copy of it that shared this door, as it was before."""
        for handle in self.handles:
            handle.remove()
        flag, function = GATE_STATE
        for model in {module, *self._models}:
            for stack in self.stacks:
                take_view(model, stack.path)
            for name, state in self.before.items():
                gate = _gate(model, name)
                for key in GATE_STATE:
                    if key in state:
                        setattr(gate, key, state[key])
                    else:
                        gate.__dict__.pop(key, None)
            if any(state.get(flag) and not state.get(function) for state in self.before.values()):
                # In a copy of the model: the stock function could not be copied with it.
                enable: Any = model.enable_gradient_checkpointing
                enable()

    def _say_per_block(self, path: str, reason: str) -> None:
        self._say(logging.WARNING, f"{path} runs block by block: {reason}")

    def _say(self, level: int, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.log(level, message)


_OF_ONE_PROCESS = ("_running", "_models")


def _gate(module: Module, name: str) -> Any:
    return module.get_submodule(name)


def is_stock_function(function: Any) -> bool:
    """Whether ``function`` is what diffusers itself sets on enable and disable."""
    return (
        function is None
        or function is torch.utils.checkpoint.checkpoint
        or getattr(function, "__module__", "") == "diffusers.models.modeling_utils"
    )


def _is_local(value: Any) -> bool:
    """Whether ``value`` is a function made inside another one, which cannot be pickled."""
    return "<locals>" in getattr(value, "__qualname__", "")


def call_shape(arguments: Mapping[str, Any], training: bool) -> CallShape:
    """The names of the arguments that are given, with flags and the keys of dicts."""

    def mark(value: Any) -> Any:
        if isinstance(value, dict):
            return tuple(sorted(map(str, value)))
        return value if isinstance(value, bool) else None

    given = ((name, mark(value)) for name, value in arguments.items() if value is not None)
    return (training, *sorted(given, key=lambda item: item[0]))
