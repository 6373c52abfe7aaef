"""Where a model's loop hands its blocks to this package, and the two ends of each forward.

diffusers models ask ``self._gradient_checkpointing_func(block, *args)`` to run each block, and
``enable_gradient_checkpointing(gradient_checkpointing_func=...)`` is the public way to supply
that function: here, a :class:`CheckpointEntry`. A forward pre-hook plans how the blocks of this
forward run, one forward hook notes that it returned, and one that is always called ends it. Where a
loop must not or cannot ask its checkpoint function, the blocks themselves lead their calls here
(see ``model.interception``).

Between two forwards an entry keeps no activation alive. A deep copy of the model, or a pickle, has
an entry of its own that knows what was proven and has seen no forward. Shallow copies, such as
regional compilation makes, share theirs.
"""

import copy
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ..messages.log import logger
from ..model.compiled import AS_A_WHOLE, try_oldest_first
from ..model.flags import SWITCH, CheckpointFlags, described
from ..model.interception import (
    RECEIVER,
    block_function,
    intercept,
    original_call,
    release,
)
from ..model.kv_cache import cache_makers
from ..model.stacks import blocks_of, units_of
from ..private.of_torch import hooks_on, inside_checkpoint
from ..recompute.backend import plainly
from ..recompute.submodules import CallWrapper, SubmoduleHook, SubmoduleKind, intercept_submodules
from ..schedules.conditions import Condition
from ..schedules.effect import Effect
from ..schedules.history import History
from ..schedules.report import Report
from .forward import Forward
from .outside import Notice
from .planner import ForwardPlanner
from .runs import recomputable
from .traced import OpenSegment, TracedStack, given_in, segment_call
from .watched import plain_tree, watched_in


@dataclass(slots=True)
class Running:
    """A forward that runs: in which frame, its record if it trains, whether it has returned.

    paused: whether no gradients are wanted of one that would be recomputed otherwise.
    """

    frame: FrameType
    record: Forward | None
    paused: bool = False
    returned: bool = False


_installed = count()

# What ``_begin_anew`` sets.
OF_ONE_MODEL = (
    *("on", "effect", "history", "overall"),
    *("_compiled_on", "_traced", "_open_segment"),
    *("_outside", "running", "_models", "_oldest_first"),
)


class CheckpointEntry:
    """The checkpoint function of a model that has a schedule, and its hooks.

    report: what is installed on the model.
    forwards: says how the blocks of each forward run.
    parameters: names of the parameters of the model's ``forward``.
    flags: the modules that ask for a checkpoint function.
    blocks: of each stack, for calls that are compiled, which find their place by identity.
    intercepts: whether calls come from the blocks themselves, so that the loop must not ask.
    functions: by stack path, the function that runs its blocks, where the loop calls no block.
    units: paths of the modules of no stack that run one by one, in which ``*`` is any name.
    parts: attribute paths in the blocks of each stack of what does not run as the rest of them.
    """

    def __init__(
        self,
        report: Report,
        forwards: ForwardPlanner,
        parameters: Sequence[str],
        flags: CheckpointFlags,
        *,
        blocks: Mapping[str, Sequence[Module]] | None = None,
        intercepts: bool = False,
        functions: Mapping[str, str] | None = None,
        units: Sequence[str] = (),
        parts: Mapping[str, Mapping[SubmoduleKind, Sequence[str]]] | None = None,
    ):
        self.report = report
        self.forwards = forwards
        self.backend = forwards.backend
        self.messages = forwards.messages
        self.parameters = tuple(parameters)
        self.flags = flags
        self.intercepts = intercepts
        self.functions = dict(functions or {})
        self.units = tuple(units)
        self.parts = dict(parts or {})
        # A text, since compiled code is held to the texts that its trace has read: for another
        # schedule other code is made.
        self.schedule = f"{report}{next(_installed)}"
        # Why checkpointing stays switched off, if it does.
        self.off = next((str(condition) for condition in report.conditions if condition.off), "")
        self.handles: list[RemovableHandle] = []
        self.blocks = {path: list(own) for path, own in (blocks or {}).items()}
        self._begin_anew()

    def _begin_anew(self) -> None:
        """What a copy does not have of the original."""
        self.on = False  # whether the last forward was to recompute
        self.effect: Effect | None = None
        self.history = History()
        # The same of this model and of its deep copies in this process together.
        self.overall = History()
        # Of the forward that is being traced: whether it recomputes, how, and what has begun.
        self._compiled_on = False
        self._traced: tuple[TracedStack, ...] = ()
        self._open_segment: OpenSegment | None = None
        # The model, if its blocks were called past its forward.
        self._outside: weakref.ref[Module] | None = None
        # By thread, outermost first.
        self.running: dict[int, list[Running]] = {}
        # The model and the shallow copies of it that regional compilation makes.
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()
        self._oldest_first = try_oldest_first(self)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in OF_ONE_MODEL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CheckpointEntry":
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.overall = self.overall
        return twin

    @property
    def last_effect(self) -> Effect | None:
        """What the last training forward did; of one in a compiled graph, that it was one."""
        if self.effect is None and self._compiled_on:
            return Effect((), (self._compiled,))
        return self.effect

    @property
    def _compiled(self) -> Condition:
        reasons = [AS_A_WHOLE, *self._lost_when_compiled()]
        return Condition("model", "torch.compile", "; ".join(reasons))

    def _lost_when_compiled(self) -> Iterator[str]:
        """Why something that was planned does not happen in a model that is one graph."""
        yield from dict.fromkeys(self.forwards.lost_in_graph.values())
        if self.backend.moves:
            yield "nothing is moved to CPU memory"

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _plan_traced(self, given: tuple[Any, ...] | None, schedule: str) -> tuple[TracedStack, ...]:
        """How the blocks of a traced forward run; asked by the compiler itself.

        It also says what is lost, since a traced forward cannot. given: as ``given_in``. schedule:
        ``self.schedule``, to which the code that is made is held.
        """
        plan = self.forwards.plan_traced(self.blocks, given)
        if any(self._lost_when_compiled()):
            self.messages.warn("compiled", str(self._compiled))
        return plan

    # Called from the model's loop.

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``block``, or hand on what its segment returned."""
        owner = getattr(block, "__self__", None)
        if isinstance(owner, Module) and block.__func__ in (type(owner).__call__, Module.__call__):
            block = owner  # some models hand over `block.__call__`
        if torch.compiler.is_compiling():
            return self._call_traced(block, args, kwargs)
        forward = self._forward
        if forward is not None:
            return forward.call_block(block, args, kwargs)
        if inside_checkpoint() or self.forwards.trying_out or not torch.is_grad_enabled():
            # Of a block that asks for it once more, or of a loop that asks without gradients too.
            return block(*args, **kwargs)
        if self._outside is None:
            self.messages.warn(
                "past-the-hooks",
                "the model's forward was entered past its hooks (was `.forward` called directly?); "
                "every block runs as one that is covered, by itself",
            )
        for history in (self.history, self.overall):
            history.past_the_hooks += 1
            history.recomputed = True
        reason = "each block that came ran as one that is covered, by itself"
        self.effect = Effect((), (Condition("call", "past the model's forward", reason),))
        wrappers = self.backend.begin()
        recompute = wrappers.covered(self.forwards.config.keep)
        result = recompute(recomputable(block), *args, **kwargs)
        if wrappers.offload is not None:
            wrappers.offload.finish()
        return result

    def _call_traced(self, block: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The same in a forward that is being traced: see ``traced``."""
        call = original_call(block)
        if self.forwards.config.feed_forward_only:
            return call(*args, **kwargs)
        for plan in self._traced:
            for index, one in enumerate(self.blocks[plan.path]):
                if one is block:
                    return self._run_traced(plan, index, call, args, kwargs)
        return self.backend.in_graph(call, *args, **kwargs)

    def _run_traced(
        self, plan: TracedStack, index: int, call: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run a block of a stack, or the segment that it begins, or hand on what that returned."""
        if self._open_segment is not None:
            result = self._open_segment.follow(index, args, kwargs)
            if index + 1 == self._open_segment.stop:
                self._open_segment = None
            return result
        stop = plan.stops[index]
        if stop < 0:
            return call(*args, **kwargs)
        if stop == index + 1:
            return self.backend.in_graph(call, *args, **kwargs)
        calls = [original_call(member) for member in self.blocks[plan.path][index:stop]]
        result = self.backend.in_graph(segment_call(plan, calls), *args, **kwargs)
        self._open_segment = OpenSegment(plan, index, args, kwargs, result)
        return self._open_segment.held

    @property
    def takes_calls(self) -> bool:
        """Whether a call of an intercepted block is to come through here."""
        if torch.compiler.is_compiling():
            return self._compiled_on and torch.is_grad_enabled()
        forward = self._forward
        if forward is not None:
            # A block that the model itself runs under a checkpoint call is left to that.
            return self.intercepts and inside_checkpoint() == forward.inside_checkpoint
        model = None if self._outside is None else self._outside()
        return model is not None and self._is_outside(model)

    def _is_outside(self, model: Module) -> bool:
        """Whether a block that is called now is called past the forward of ``model``."""
        return (
            torch.is_grad_enabled()
            and not self.running.get(threading.get_ident())
            and not inside_checkpoint()
            and not self.forwards.trying_out
            and not self.off
            and self.flags.is_on(model)
        )

    @property
    def is_training(self) -> bool:
        """Whether a training forward with this schedule runs in this thread."""
        return self._forward is not None

    @property
    def _forward(self) -> Forward | None:
        """The record of the training forward that runs in this thread."""
        running = self.running.get(threading.get_ident(), ())
        return next((r.record for r in reversed(running) if _is_live(r.frame)), None)

    # Hooks of the model.

    def open(self, module: Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: decide how the blocks of this forward run."""
        if torch.compiler.is_compiling():
            self._prepare_compiled(module, args, kwargs)
        else:
            self.open_in(sys._getframe(1), module, args, kwargs)

    def open_in(
        self, frame: FrameType, module: Module, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """The same of a forward that calls its hooks in ``frame``."""
        running = self._live(module)
        arguments = dict(zip(self.parameters, args, strict=False)) | kwargs
        if torch.is_grad_enabled():
            self.on = self._enabled(module)
            forward = self.forwards.plan(module, arguments) if self.on else None
            self._begin(module, Running(frame, forward), running)
        else:
            for history in (self.history, self.overall):
                history.without_gradients += 1
            self._begin(module, Running(frame, None, self._pauses(module)), running)

    def open_part(self, model: Module, part: Module, args: tuple) -> None:
        """Forward pre-hook of a part of the model, which may be called by itself."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self._forward is not None:
            return
        running = self._live(model)
        self._begin(model, Running(sys._getframe(1), None, self._pauses(model)), running)

    def close_part(self, model: Module, part: Module, args: tuple, output: Any) -> None:
        """Forward hook of the same part."""
        if torch.compiler.is_compiling():
            return
        running = self._live(model)
        if running and running[-1].frame is sys._getframe(1):
            self._end(model, running)

    def notice(self, model: Module, block: Module) -> None:
        """The first block of a stack is called: another module may run the blocks.

        Its loop does not ask the checkpoint function, so the blocks are intercepted from now on.
        """
        if (
            torch.compiler.is_compiling()
            or self._outside is not None
            or not self._is_outside(model)
        ):
            return
        self._outside = weakref.ref(model)
        for stack in self.forwards.stacks:
            intercept(blocks_of(model, stack.path), self)
        self.messages.warn(
            "past-the-hooks",
            f"a {type(block).__name__} of {type(model).__name__} was called past the forward of "
            "that model, by a loop of another module: from the next one on, every block runs as "
            "one that is covered, by itself; call apply() on the outer model for its schedule",
        )

    def say_cache_is_off(self) -> None:
        """A part of the model wanted a KV cache (see ``cache``)."""
        if not torch.compiler.is_compiling():
            self.messages.warn(
                "no-cache",
                "use_cache is off while gradient checkpointing trains: "
                "recompute would fill it again",
            )

    def note_return(self, module: Module, args: tuple, output: Any) -> None:
        """Forward hook of the model, before ``close``: its forward did not raise.

        torch calls ``close`` with None when it did, which is also what a forward may return.
        """
        if not torch.compiler.is_compiling() and (running := self._live(module)):
            running[-1].returned = True

    def close(self, module: Module, args: tuple, output: Any) -> Any:
        """Forward hook of the model, called in any case: settle what ran."""
        if torch.compiler.is_compiling():
            if self.intercepts and self._compiled_on:
                self.flags.switch(module, True)
            self._traced = ()
            self._open_segment = None
            return None
        running = self._live(module)  # of a forward that raised the frame has ended
        if not running or not running[-1].returned:
            return None  # not begun here, such as one during which this was installed
        forward = self._end(module, running)
        if forward is None:
            return None
        forward.finish()
        if not forward.reached:
            # The loop does not ask its checkpoint function, whatever its class says.
            self.intercepts = True
        self.effect = forward.effect()
        self.forwards.learn(forward)
        for history in (self.history, self.overall):
            history.add(self.effect)
        if self.overall.trained == 1:
            self._say_first(module)
        return plain_tree(output) if watched_in(output) else None

    # What they need.

    def _live(self, module: Module) -> list[Running]:
        """The forwards that run in this thread, without those that an exception has ended.

        torch calls no hook where that is a KeyboardInterrupt.
        """
        running = self.running.get(threading.get_ident(), [])
        while running and not _is_live(running[-1].frame):
            ended = self._end(module, running)
            if ended is not None:
                ended.abandon()
        return running

    def _begin(self, module: Module, begun: Running, running: list[Running]) -> None:
        """Put a forward on this thread's list."""
        running.append(begun)
        self.running[threading.get_ident()] = running
        if self.intercepts and (begun.record is not None or begun.paused):
            self.flags.switch(module, False)  # until its end: the loop takes its plain branch

    def _end(self, module: Module, running: list[Running]) -> Forward | None:
        """Take the innermost forward off this thread's list."""
        ended = running.pop()
        if not running:
            self.running.pop(threading.get_ident(), None)
        switched = ended.record is not None or ended.paused
        if self.intercepts and switched and not self._any_running():
            self.flags.switch(module, True)
        return ended.record

    def _pauses(self, module: Module) -> bool:
        """Whether a forward without gradients is to find checkpointing switched off.

        Layers of transformers before 5.24 ask the switch and training mode only, and run without
        the KV cache that they were given. A loop that asks for gradients too needs no pause: the
        switch is that of all threads.
        """
        return self.intercepts and (self.flags.is_on(module) or self._any_running())

    def _enabled(self, module: Module) -> bool:
        """Whether the trainer wants checkpointing now; takes back what was put over ours."""
        paused = self.intercepts and self._any_running()
        wanted = self.flags.is_on(module)
        if self.off and self.flags.names and wanted:
            self.messages.warn("off-again", f"gradient checkpointing is off again: {self.off}")
            self.flags.switch(module, False)
        if self.off or not (wanted or paused):
            reason = self.off or "it was switched off on the model"
            self.effect = Effect((), (Condition("model", SWITCH, reason, off=True),))
            for history in (self.history, self.overall):
                history.switched_off += 1
            return False
        if module not in self._models:
            self._models.add(module)
            self._watch(module)
        self.intercept(module)
        self.intercept_submodules(module)
        if not self.flags.has_function(module, self):
            self.claim(module)
        return True

    def _say_first(self, module: Module) -> None:
        """What the first training forward did, and what it proved for those that follow."""
        lines = [
            f"first training forward of {type(module).__name__}",
            *str(self.effect).split("\n"),
        ]
        for path, proof in self.forwards.proofs.items():
            lines.append(f"{path}, from the next one on:")
            lines.append(f"  {proof.schedule}")
        logger.info("%s", "\n  ".join(lines))

    def _any_running(self) -> bool:
        """Whether a forward for which the switch is off runs in any thread."""
        for ident in self.running.keys() - {thread.ident for thread in threading.enumerate()}:
            del self.running[ident]  # of a thread that was ended in the middle of one
        threads = list(self.running.values())
        return any(f.record is not None or f.paused for running in threads for f in running)

    def _prepare_compiled(self, module: Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """What ``_enabled`` does, in what a traced forward may do: no message, no books."""
        self.on = self._compiled_on = not self.off and self.flags.is_on(module)
        self.effect = None  # see ``last_effect``
        if self._compiled_on and torch.is_grad_enabled():
            for history in (self.history, self.overall):
                history.compiled = True
            arguments = dict(zip(self.parameters, args, strict=False)) | kwargs
            self._traced = self._plan_traced(given_in(arguments, module.training), self.schedule)
        if self.flags.is_on(module):
            # An intercepting entry is reached by the loop's plain branch, until close.
            self.flags.switch(module, self._compiled_on and not self.intercepts)
            self.flags.set_function(module, self)

    # How apply() and remove() change the model.

    def attach(self, module: Module) -> None:
        """Be what the loops of ``module`` go through, or keep its checkpointing off."""
        if self.off:
            self.flags.switch(module, False)
        else:
            self.claim(module)
            self.intercept(module)
            self.intercept_submodules(module)
            if self.intercepts:
                self.flags.switch(module, True)
            else:
                enable: Any = module.enable_gradient_checkpointing
                enable(gradient_checkpointing_func=self)
        self.handles = [
            module.register_forward_pre_hook(self.open, with_kwargs=True),
            module.register_forward_hook(self.note_return),
            module.register_forward_hook(self.close, always_call=True),
        ]
        self._watch(module)
        for part, hook in cache_makers(module, (s.path for s in self.forwards.stacks), self):
            self.handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
            if part is not module:
                begin, end = partial(self.open_part, module), partial(self.close_part, module)
                self.handles.append(part.register_forward_pre_hook(begin))
                self.handles.append(part.register_forward_hook(end))

    def _watch(self, module: Module) -> None:
        """Have the first block of each stack tell when it is called."""
        for stack in self.forwards.stacks:
            for block in blocks_of(module, stack.path)[:1]:
                hooks = [hook for _, hook in hooks_on(block, "forward pre-hook")]
                if not any(isinstance(hook, Notice) and not hook.is_idle for hook in hooks):
                    self.handles.append(block.register_forward_pre_hook(Notice(self, module)))

    def claim(self, module: Module) -> None:
        """Be the checkpoint function of ``module``."""
        if self.flags.is_uneven(module):
            self.messages.warn(
                "replaced",
                "checkpointing was switched on for some of the model's layers only "
                "(every_n_layers?); the schedule takes its place",
            )
        for function in self.flags.set_function(module, self):
            self.messages.warn(
                "replaced",
                f"the checkpoint function {described(function)} that was set on the model is "
                "replaced by the schedule",
            )

    def intercept(self, module: Module) -> None:
        """Lead the calls of the blocks of ``module`` here.

        In every forward: a compiler or FSDP may have put a wrapper around them.
        """
        for stack in self.forwards.stacks if self.intercepts or self._outside is not None else ():
            name = self.functions.get(stack.path)
            function = block_function(type(module), name) if name else None
            intercept(blocks_of(module, stack.path), self, function)
        if self.intercepts and self.units:
            stacks = [stack.path for stack in self.forwards.stacks]
            intercept(map(module.get_submodule, units_of(module, self.units, stacks)), self)

    def intercept_submodules(self, module: Module) -> None:
        """Have the parts of the blocks run as the block around them wants it.

        In every forward: an adapter or a compiler may have put something else in their place.
        """
        for stack in self.forwards.stacks:
            for kind, paths in self.parts.get(stack.path, {}).items():
                blocks = blocks_of(module, stack.path)
                for index, block in enumerate(blocks):
                    recomputed = self.forwards.config.feed_forward_only and index in stack.covered
                    part = SubmoduleHook(kind, self, recomputed and kind == "feed_forward", blocks)
                    intercept_submodules(block, paths, part)

    def feed_forward(self, call: CallWrapper, *args: Any, **kwargs: Any) -> Any:
        """Run a feed-forward that is recomputed by itself, in a graph that is being traced."""
        return (self.backend.in_graph if self.on else plainly)(call, *args, **kwargs)

    def step_aside(self, module: Module) -> None:
        """Leave ``module``, and every copy of it that shares this entry, as it was before."""
        for handle in self.handles:
            handle.remove()
        for model in self.models(module):
            # Not by their paths: an adapter may have been put around a part since.
            release(module for module in model.modules() if self._leads_here(module))
            self.flags.restore(model)

    def let_go(self) -> None:
        """Give back what is held for the whole process."""
        self.backend.close()
        self._oldest_first()

    def models(self, module: Module) -> set[Module]:
        """``module``, and every copy of it that shares this entry."""
        return {module, *self._models}

    def _leads_here(self, module: Module) -> bool:
        way = module.__dict__.get(RECEIVER)
        return way is self or (isinstance(way, SubmoduleHook) and way.owner is self)


def _is_live(frame: FrameType) -> bool:
    """Whether ``frame`` is one of those that are running in this thread."""
    running: FrameType | None = sys._getframe(1)
    while running is not None and running is not frame:
        running = running.f_back
    return running is not None
