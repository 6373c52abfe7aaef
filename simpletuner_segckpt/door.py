"""The way into a model's loop: its checkpoint function and the two ends of its forward.

diffusers models ask ``self._gradient_checkpointing_func(block, *args)`` to run each block, and
``enable_gradient_checkpointing(gradient_checkpointing_func=...)`` is the public way to supply
that function. :class:`Door` is such a function. A forward pre-hook decides how the blocks of
this forward run, an always-called forward hook ends it. Where a loop must not or cannot ask its
checkpoint function, the calls of the blocks themselves lead to the door (see ``intercept``).

Between two forwards a door keeps no activation alive, and a copy of the model has a door of its
own: deep copies and pickles of a model with a door are independent.
"""

import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.nn import Module
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from .backends import Backend, Runners, has_lora_scale, lora_scale, plainly
from .conditions import CALL_CONDITIONS, call_conditions
from .config_schema import CheckpointingConfig
from .gates import FLAG, Gates
from .hooks import model_conditions
from .intercept import DOOR, intercept, original_call, release
from .links import Handed, inside_checkpoint, plain_tree
from .parts import Kind, Part, Runner, intercept_parts
from .recording import RecordingRun
from .report import UNITS, Condition, Effect, StackReport, shortfalls
from .schedule import Schedule, make_schedules
from .segments import (
    Forward,
    Proof,
    SegmentedRun,
    Stack,
    StackRun,
    UnitsRun,
)
from .stacks import blocks_of, is_compiled

logger = logging.getLogger("simpletuner_segckpt")

# The forwards that run in a thread, outermost first: the frame that each runs in, and its record
# (None: not a training forward).
Running = list[tuple[FrameType, Forward | None]]

# What tells one shape of call from another: its arguments, by presence.
CallShape = tuple[Any, ...]


class Door:
    """Stands in for a model's checkpoint function.

    parameters: names of the parameters of the model's ``forward``.
    gates: the submodules that ask for a checkpoint function.
    conditions: arguments of the forward that force per-block.
    gap_blocks: for calls that are compiled, which find their place by identity.
    intercepts: whether the loop reaches the door through its blocks, and must not ask the gates.
    carried: what the family says is carried in each stack; None when no family describes it.
    parts: attribute paths in the blocks of each stack of what does not run as the rest of them.
    off: why checkpointing stays switched off, if it does.
    """

    def __init__(
        self,
        stacks: Sequence[StackReport],
        config: CheckpointingConfig,
        parameters: Sequence[str],
        gates: Gates,
        conditions: Sequence[Condition] = (),
        *,
        gap_blocks: Iterable[Module] = (),
        intercepts: bool = False,
        carried: Mapping[str, Mapping[str, int]] | None = None,
        parts: Mapping[str, Mapping[Kind, Sequence[str]]] | None = None,
        off: str = "",
    ):
        self.stacks = tuple(stack for stack in stacks if stack.path != UNITS)
        self.paths = [stack.path for stack in self.stacks]
        counted = (stack.schedule for stack in stacks if stack.path == UNITS)
        self.units = next(counted, Schedule(0, ()))
        self.config = config
        self.backend = Backend(config)
        self.parameters = tuple(parameters)
        self.gates = gates
        named = {condition.name for condition in conditions}
        general = (c for c in CALL_CONDITIONS if c.name not in named)
        self.conditions = (*conditions, *general)
        self.intercepts = intercepts
        self.described = carried is not None
        self.carried = dict(carried or {})
        self.parts = dict(parts or {})
        self.off = off
        self.on = False  # whether the last forward was to recompute
        self.effect: Effect | None = None
        self.handles: list[RemovableHandle] = []
        self.gap_blocks = list(gap_blocks)
        self._proven: dict[tuple[CallShape, str], Proof] = {}
        self._said: set[str] = set()
        self._compiled_on = False  # of the forward that is being traced
        self._trying_out = False  # whether segments are, which asks no block to be recomputed
        self._forget_runs()

    def _forget_runs(self) -> None:
        # By thread.
        self._running: dict[int, Running] = {}
        # The model and the shallow copies of it that regional compilation makes.
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()

    @property
    def stride(self) -> int:
        return self.config.stride or self.config.interval

    def __getstate__(self) -> dict[str, Any]:
        of_this_process = ("_running", "_models")
        return {key: value for key, value in self.__dict__.items() if key not in of_this_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_runs()

    @property
    def proofs(self) -> dict[str, Proof]:
        """By stack path, what the latest recorded forward showed."""
        return {path: proof for (_, path), proof in self._proven.items()}

    @property
    def last_effect(self) -> Effect | None:
        """What the last training forward did; of one in a compiled graph, that it was one."""
        if self.effect is None and self._compiled_on:
            reason = "compiled as a whole: what is covered is recomputed one by one, unobserved"
            if self.backend.moves:
                reason += "; nothing is moved to CPU memory"
            return Effect((), (Condition("model", "torch.compile", reason),))
        return self.effect

    # Called from the model's loop.

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``block``, or hand on what its segment returned."""
        owner = getattr(block, "__self__", None)
        if isinstance(owner, Module) and block.__func__ in (type(owner).__call__, Module.__call__):
            block = owner  # some models hand over `block.__call__`
        if torch.compiler.is_compiling():
            # A traced call keeps no books, so nothing can be proven: block by block.
            call = original_call(block)
            if self.config.feed_forward_only or any(gap is block for gap in self.gap_blocks):
                return call(*args, **kwargs)
            return self.backend.in_graph(call, *args, **kwargs)
        forward = self._forward
        if forward is not None:
            return forward.step(block, args, kwargs)
        if inside_checkpoint() or self._trying_out:
            return block(*args, **kwargs)  # of a block that asks for it once more
        self._say(
            logging.WARNING,
            "the model's forward was entered past its hooks (was `.forward` called directly?); "
            "every block runs as one that is covered, by itself",
        )
        runners = self.backend.begin()
        result = runners.covered(original_call(block), *args, **kwargs)
        if runners.offload is not None:
            runners.offload.settle()
        return result

    @property
    def open_for_blocks(self) -> bool:
        """Whether a call of an intercepted block is to come through here."""
        if torch.compiler.is_compiling():
            return self._compiled_on and torch.is_grad_enabled()
        # A block that the model itself runs under a checkpoint call is left to that.
        forward = self._forward
        return forward is not None and inside_checkpoint() == forward.inside_checkpoint

    @property
    def _forward(self) -> Forward | None:
        """The record of the training forward that runs in this thread."""
        running = self._running.get(threading.get_ident())
        return running[-1][1] if running else None

    # Hooks of the model.

    def open(
        self, module: Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Forward pre-hook of the model: decide how the blocks of this forward run.

        Returns other arguments where the model would fill a cache that a recompute fills again.
        """
        if torch.compiler.is_compiling():
            self._prepare_compiled(module)
            return None
        running = self._running.get(threading.get_ident(), [])
        while running and not _is_live(running[-1][0]):
            # Ended by a KeyboardInterrupt, for which torch calls no hook.
            interrupted = self._end(module, running)
            if interrupted is not None:
                interrupted.abandon()
        forward = None
        arguments = dict(zip(self.parameters, args, strict=False)) | kwargs
        if torch.is_grad_enabled():
            self.on = self._enabled(module)
            forward = self._plan(module, arguments) if self.on else None
        running.append((sys._getframe(1), forward))
        self._running[threading.get_ident()] = running
        if forward is None:
            return None
        if self.intercepts:
            self.gates.switch(module, False)  # until close: the loop takes its plain branch
        if "use_cache" in self.parameters[len(args) :] and self._would_cache(module, arguments):
            self._say(
                logging.WARNING,
                "use_cache is off while gradient checkpointing trains: "
                "recompute would fill it again",
            )
            return args, kwargs | {"use_cache": False}
        return None

    def close(self, module: Module, args: tuple, output: Any) -> Any:
        """Forward hook of the model: settle what ran; ``output`` is None when it raised."""
        if torch.compiler.is_compiling():
            if self.intercepts and self._compiled_on:
                self.gates.switch(module, True)
            return None
        running = self._running.get(threading.get_ident())
        if not running:
            return None  # installed while this forward ran
        forward = self._end(module, running)
        if forward is None:
            return None
        if output is None:
            forward.abandon()
            return None
        forward.finish()
        self.effect = forward.effect()
        self._learn(forward)
        kept = any(isinstance(leaf, Handed) for leaf in pytree.tree_leaves(output))
        return plain_tree(output) if kept else None

    # What they need.

    @staticmethod
    def _would_cache(module: Module, arguments: Mapping[str, Any]) -> bool:
        """Whether a transformers model would make a KV cache, as it does unless told not to."""
        given = arguments.get("use_cache")
        wanted = getattr(getattr(module, "config", None), "use_cache", False)
        return bool(wanted if given is None else given)

    def _end(self, module: Module, running: Running) -> Forward | None:
        """Take the innermost forward off this thread's list."""
        forward = running.pop()[1]
        if not running:
            self._running.pop(threading.get_ident(), None)
        if forward is not None and self.intercepts and not self._any_running():
            self.gates.switch(module, True)
        return forward

    def _plan(self, module: Module, arguments: Mapping[str, Any]) -> Forward:
        """How the blocks of a training forward with these arguments run."""
        conditions = call_conditions(self.conditions, arguments)
        inside = inside_checkpoint()
        if inside:
            reason = "the whole model runs inside another checkpoint call"
            conditions.append(Condition("call", "torch.utils.checkpoint", reason))
        shape = call_shape(arguments, module.training)
        contexts = (lora_scale(module),) if has_lora_scale(arguments) else ()
        # Only what is kept needs to know, and this is a walk over the whole model.
        compiled = bool(self.config.keep) and any(map(is_compiled, module.modules()))
        runners = self.backend.begin(contexts, compiled)
        runs = [self._run(module, s, runners, conditions, shape) for s in self.stacks]
        # Units have no feed-forward of their own.
        interval = 0 if self.config.feed_forward_only else self.config.interval
        units = UnitsRun(self.units, runners.covered, interval, self.stride)
        return Forward(runs, units, conditions, inside, runners.offload)

    def _run(
        self,
        module: Module,
        planned: StackReport,
        runners: Runners,
        conditions: Sequence[Condition],
        shape: CallShape,
    ) -> StackRun:
        blocks = blocks_of(module, planned.path)
        carried = self.carried.get(planned.path, {})
        covered, gap = runners.covered, runners.gap
        stack = Stack(planned.path, planned.schedule, blocks, covered, gap, carried)
        found = [str(c) for c in conditions if c.concerns(planned.path)]
        if len(blocks) != planned.blocks:
            changed = (
                f"it has {len(blocks)} blocks now and had {planned.blocks} when the schedule was "
                "installed; call apply() again"
            )
            self._say(logging.WARNING, f"{planned.path}: {changed}")
            found.append(changed)
        if planned.strategy == "segmented" and not found:
            found += map(str, model_conditions(planned.path, blocks))
        if found and planned.strategy == "segmented":
            self._say_per_block(planned.path, found[0])
        if found or planned.strategy != "segmented":
            return StackRun(stack, found[0] if found else planned.reason)
        key = shape, planned.path
        proof = self._proven.get(key)
        if proof is None:
            return RecordingRun(stack, shape, replay=not self.described)
        if proof.reason:
            self._say_per_block(planned.path, proof.reason)
        stack = Stack(planned.path, proof.schedule, blocks, covered, gap)
        return SegmentedRun(stack, proof, partial(self._distrust, key, planned))

    def _learn(self, forward: Forward) -> None:
        """What this forward showed for those that follow."""
        planned = {stack.path: stack for stack in self.stacks}
        for run in forward.runs:
            if run.cached:
                message = "blocks that are given a KV cache run without being recomputed"
                self._say(logging.WARNING, f"{run.stack.path}: {message}")
            if run not in forward.reached:
                self._say(
                    logging.WARNING,
                    f"{run.stack.path} was not reached: the model does not run its blocks through "
                    "its checkpoint function, so nothing of it is recomputed",
                )
            elif isinstance(run, RecordingRun):
                self._trying_out = True
                try:
                    self._proven[run.shape, run.stack.path] = run.proof()
                finally:
                    self._trying_out = False
            self._say_shortfalls(planned[run.stack.path], run)
        if not self.stacks and "attention" in self.config.keep:
            only_units = StackReport(UNITS, "per-block", self.units, kept=("attention",))
            self._say_shortfalls(only_units, forward.units)
        counts = {stack.path: stack.blocks for stack in self.stacks}
        units = len(forward.units.spans)
        if units and units != self.units.blocks and not self.config.feed_forward_only:
            # Modules that run more than once count each time.
            self.units = self._schedules(counts | {UNITS: units})[UNITS]
        reached = [planned[r.stack.path] for r in forward.reached if r is not forward.units]
        if not self.described and reached and reached != list(self.stacks):
            # What keep_last keeps goes by execution order, which nobody described, and lists that
            # only looked like stacks must not use it up.
            schedules = self._schedules({stack.path: stack.blocks for stack in reached})
            self.stacks = tuple(replace(stack, schedule=schedules[stack.path]) for stack in reached)
            if self.config.keep_last:
                self._proven.clear()

    def _schedules(self, counts: Mapping[str, int]) -> dict[str, Schedule]:
        config = self.config
        return make_schedules(counts, config.interval, config.stride, config.keep_last)

    def _distrust(self, key: tuple[CallShape, str], planned: StackReport, reason: str) -> None:
        """Segments were wrong for this shape of call: no more of them."""
        boundaries = [reason] * (planned.blocks - 1)
        self._proven[key] = Proof.of(planned.schedule, boundaries)

    def _enabled(self, module: Module) -> bool:
        """Whether the trainer wants checkpointing now; takes back what was put over ours."""
        paused = self.intercepts and self._any_running()
        wanted = self.gates.on(module)
        if self.off and self.gates.names and wanted:
            self._say(logging.WARNING, f"gradient checkpointing is off again: {self.off}")
            self.gates.switch(module, False)
        if self.off or not (wanted or paused):
            reason = self.off or "it was switched off on the model"
            self.effect = Effect((), (Condition("model", FLAG, reason, off=True),))
            return False
        if module not in self._models:
            self._models.add(module)
            self.intercept(module)
        self.intercept_parts(module)
        if not self.gates.asks(module, self):
            self.claim(module)
        return True

    def _any_running(self) -> bool:
        """Whether a training forward of the model runs in any thread."""
        for ident in self._running.keys() - {thread.ident for thread in threading.enumerate()}:
            del self._running[ident]  # of a thread that was ended in the middle of one
        return any(record for running in list(self._running.values()) for _, record in running)

    def _prepare_compiled(self, module: Module) -> None:
        """What ``_enabled`` does, in what a traced forward may do: no message, no books."""
        self.on = self._compiled_on = not self.off and self.gates.on(module)
        self.effect = None  # see ``last_effect``
        if self.gates.on(module):
            # An intercepting door is reached by the loop's plain branch, until close.
            self.gates.switch(module, self._compiled_on and not self.intercepts)
            self.gates.ask(module, self)

    # How apply() and remove() change the model.

    def attach(self, module: Module) -> None:
        """Be what the loops of ``module`` go through, or keep its checkpointing off."""
        if self.off:
            self.gates.switch(module, False)
        else:
            self.claim(module)
            self.intercept(module)
            self.intercept_parts(module)
            if self.intercepts:
                self.gates.switch(module, True)
            else:
                enable: Any = module.enable_gradient_checkpointing
                enable(gradient_checkpointing_func=self)
        self.handles = [
            module.register_forward_pre_hook(self.open, with_kwargs=True),
            module.register_forward_hook(self.close, always_call=True),
        ]

    def claim(self, module: Module) -> None:
        """Be the checkpoint function of every gate of ``module``."""
        for function in self.gates.ask(module, self):
            self._say(
                logging.WARNING,
                f"the checkpoint function {getattr(function, '__qualname__', function)} that was "
                "set on the model is replaced by the schedule",
            )

    def intercept(self, module: Module) -> None:
        """Lead the calls of the blocks of ``module`` here."""
        for stack in self.stacks if self.intercepts else ():
            intercept(blocks_of(module, stack.path), self)

    def intercept_parts(self, module: Module) -> None:
        """Have the parts of the blocks run as the block around them wants it.

        In every forward: an adapter or a compiler may have put something else in their place.
        """
        for stack in self.stacks:
            for kind, paths in self.parts.get(stack.path, {}).items():
                for index, block in enumerate(blocks_of(module, stack.path)):
                    recomputed = self.config.feed_forward_only and index in stack.covered
                    part = Part(kind, self, recomputed and kind == "feed_forward")
                    intercept_parts(block, paths, part)

    def feed_forward(self, call: Runner, *args: Any, **kwargs: Any) -> Any:
        """Run a feed-forward that is recomputed by itself, in a graph that is being traced."""
        return (self.backend.in_graph if self.on else plainly)(call, *args, **kwargs)

    def detach(self, module: Module) -> None:
        """Leave ``module``, and every copy of it that shared this door, as it was before."""
        for handle in self.handles:
            handle.remove()
        for model in {module, *self._models}:
            # Not by their paths: an adapter may have been put around a part since.
            release(module for module in model.modules() if self._leads_here(module))
            self.gates.restore(model)
        self.backend.close()

    def _leads_here(self, module: Module) -> bool:
        way = module.__dict__.get(DOOR)
        return way is self or (isinstance(way, Part) and way.owner is self)

    def _say_shortfalls(self, planned: StackReport, run: StackRun) -> None:
        compiled = any(map(is_compiled, run.stack.blocks))
        moves = self.backend.moves
        for shortfall in shortfalls(planned, run.effect(), compiled=compiled, moves=moves):
            self._say(logging.WARNING, f"{run.stack.path}: {shortfall}")

    def _say_per_block(self, path: str, reason: str) -> None:
        self._say(logging.WARNING, f"{path} runs block by block: {reason}")

    def _say(self, level: int, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.log(level, message)


def _is_live(frame: FrameType) -> bool:
    """Whether ``frame`` is one of those that are running in this thread."""
    running: FrameType | None = sys._getframe(1)
    while running is not None and running is not frame:
        running = running.f_back
    return running is not None


def call_shape(arguments: Mapping[str, Any], training: bool) -> CallShape:
    """The names of the arguments that are given, with flags and the keys of dicts."""

    def mark(value: Any) -> Any:
        if isinstance(value, dict):
            return tuple(sorted(map(str, value)))
        return value if isinstance(value, bool) else None

    given = ((name, mark(value)) for name, value in arguments.items() if value is not None)
    return (training, *sorted(given, key=lambda item: item[0]))
