"""Where a model's loop hands its blocks to this package, and the two ends of each forward.

diffusers models ask ``self._gradient_checkpointing_func(block, *args)`` to run each block, and
``enable_gradient_checkpointing(gradient_checkpointing_func=...)`` is the public way to supply
that function: here, a :class:`CheckpointEntry`. A forward pre-hook plans how the blocks of this
forward run, one forward hook notes that it returned, and one that is always called ends it. Where a
loop must not or cannot ask its checkpoint function, the blocks themselves lead their calls here
(see ``patches``).

Between two forwards an entry keeps no activation alive. A deep copy of the model, or a pickle, has
an entry of its own that knows what was proven and has seen no forward. Shallow copies, such as
regional compilation makes, share theirs.
"""

import copy
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ..model.compiled import try_oldest_first
from ..model.flags import SWITCH
from ..model.kv_cache import cache_makers
from ..private.of_torch import inside_checkpoint
from ..recompute.backend import plainly
from ..recompute.submodules import CallWrapper
from ..schedules.conditions import Condition
from ..schedules.effect import Effect
from ..schedules.report import Report
from .observed import Observed
from .outside import OutsideCalls, watch_first_blocks
from .patches import ModelPatches
from .planner import ForwardPlanner
from .running import Running, RunningForwards
from .traced_forward import TracedForward
from .watched import plain_tree, watched_in

_installed = count()

# What ``_begin_anew`` sets.
OF_ONE_MODEL = (
    *("on", "observed", "running", "traced", "outside"),
    *("_models", "_oldest_first"),
)


class CheckpointEntry:
    """The checkpoint function of a model that has a schedule, and its hooks.

    report: what is installed on the model.
    forwards: says how the blocks of each forward run.
    patches: what makes the calls of the model's blocks come here.
    parameters: names of the parameters of the model's ``forward``.
    blocks: of each stack, for calls that are compiled, which find their place by identity.
    """

    def __init__(
        self,
        report: Report,
        forwards: ForwardPlanner,
        patches: ModelPatches,
        parameters: Sequence[str],
        blocks: Mapping[str, Sequence[Module]],
    ):
        self.report = report
        self.forwards = forwards
        self.backend = forwards.backend
        self.messages = forwards.messages
        self.patches = patches
        self.flags = patches.flags
        self.parameters = tuple(parameters)
        self.blocks = {path: list(own) for path, own in blocks.items()}
        self.schedule = f"{report}{next(_installed)}"
        # Why checkpointing stays switched off, if it does.
        self.off = next((str(condition) for condition in report.conditions if condition.off), "")
        self.handles: list[RemovableHandle] = []
        self._begin_anew()

    def _begin_anew(self) -> None:
        """What a copy does not have of the original."""
        self.on = False  # whether the last forward was to recompute
        self.observed = Observed()
        self.running = RunningForwards(self.patches)
        self.traced = TracedForward(self.forwards, self.blocks, self.schedule)
        self.outside = OutsideCalls(self.forwards)
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
        twin.observed.overall = self.observed.overall
        return twin

    # How apply() and remove() change the model.

    def attach(self, module: Module) -> None:
        """Be what the loops of ``module`` go through, or keep its checkpointing off."""
        if self.off:
            self.flags.switch(module, False)
        else:
            self.patches.claim(module, self)
            self._intercept(module)
            if self.patches.intercepts:
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

    def _intercept(self, module: Module) -> None:
        """In every forward: an adapter, a compiler or FSDP may have put something around blocks."""
        if self.patches.intercepts or self.outside.seen:
            self.patches.intercept_blocks(module, self)
        self.patches.intercept_parts(module, self)

    def _watch(self, module: Module) -> None:
        """Be told when the blocks of ``module`` are called past its forward."""
        paths = (stack.path for stack in self.forwards.stacks)
        self.handles.extend(watch_first_blocks(module, paths, self))

    def models(self, module: Module) -> set[Module]:
        """``module``, and every copy of it that shares this entry."""
        return {module, *self._models}

    def step_aside(self, module: Module) -> None:
        """Leave ``module``, and every copy of it that shares this entry, as it was before."""
        for handle in self.handles:
            handle.remove()
        for model in self.models(module):
            self.patches.undo(model, self)

    def let_go(self) -> None:
        """Give back what is held for the whole process."""
        self.backend.close()
        self._oldest_first()

    # A forward begins: hooks of the model.

    def open(self, module: Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: decide how the blocks of this forward run."""
        if torch.compiler.is_compiling():
            self._open_traced(module, args, kwargs)
        else:
            self.open_in(sys._getframe(1), module, args, kwargs)

    def open_in(
        self, frame: FrameType, module: Module, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """The same of a forward that calls its hooks in ``frame``."""
        self.running.drop_ended(module)
        if torch.is_grad_enabled():
            self.on = self._enabled(module)
            forward = self.forwards.plan(module, self._by_name(args, kwargs)) if self.on else None
            self.running.begin(module, Running(frame, forward))
        else:
            self.observed.without_gradients()
            self.running.begin(module, Running(frame, None, self.running.pauses(module)))

    def _enabled(self, module: Module) -> bool:
        """Whether the trainer wants checkpointing now; takes back what was put over ours."""
        paused = self.running.keep_switch_off
        wanted = self.flags.is_on(module)
        if self.off and self.flags.names and wanted:
            self.messages.warn("off-again", f"gradient checkpointing is off again: {self.off}")
            self.flags.switch(module, False)
        if self.off or not (wanted or paused):
            reason = self.off or "it was switched off on the model"
            self.observed.switched_off(Condition("model", SWITCH, reason, off=True))
            return False
        if module not in self._models:
            self._models.add(module)
            self._watch(module)
        self._intercept(module)
        if not self.flags.has_function(module, self):
            self.patches.claim(module, self)
        return True

    def _open_traced(self, module: Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """What ``_enabled`` does, in what a traced forward may do: no message, no books."""
        self.on = self.traced.recomputes = not self.off and self.flags.is_on(module)
        self.observed.effect = None  # see ``last_effect``
        if self.on and torch.is_grad_enabled():
            self.observed.compiled()
            self.traced.begin(self._by_name(args, kwargs), module.training)
        if self.flags.is_on(module):
            # An intercepting entry is reached by the loop's plain branch, until close.
            self.flags.switch(module, self.on and not self.patches.intercepts)
            self.flags.set_function(module, self)

    def _by_name(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the model's forward."""
        return dict(zip(self.parameters, args, strict=False)) | kwargs

    def open_part(self, model: Module, part: Module, args: tuple) -> None:
        """Forward pre-hook of a part of the model, which may be called by itself."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.is_training:
            return
        self.running.drop_ended(model)
        begun = Running(sys._getframe(1), None, self.running.pauses(model))
        self.running.begin(model, begun)

    # Its blocks are called.

    @property
    def takes_calls(self) -> bool:
        """Whether a call of an intercepted block is to come through here."""
        if torch.compiler.is_compiling():
            return self.traced.recomputes and torch.is_grad_enabled()
        forward = self.running.training
        if forward is not None:
            # A block that the model itself runs under a checkpoint call is left to that.
            return self.patches.intercepts and inside_checkpoint() == forward.inside_checkpoint
        model = self.outside.model
        return model is not None and self._is_outside(model)

    def _is_outside(self, model: Module) -> bool:
        """Whether a block that is called now is called past the forward of ``model``."""
        return (
            torch.is_grad_enabled()
            and not self.running.in_this_thread
            and not inside_checkpoint()
            and not self.forwards.trying_out
            and not self.off
            and self.flags.is_on(model)
        )

    @property
    def is_training(self) -> bool:
        """Whether a training forward with this schedule runs in this thread."""
        return self.running.training is not None

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``block``, or hand on what its segment returned."""
        owner = getattr(block, "__self__", None)
        if isinstance(owner, Module) and block.__func__ in (type(owner).__call__, Module.__call__):
            block = owner  # some models hand over `block.__call__`
        if torch.compiler.is_compiling():
            return self.traced.call_block(block, args, kwargs)
        forward = self.running.training
        if forward is not None:
            return forward.call_block(block, args, kwargs)
        if inside_checkpoint() or self.forwards.trying_out or not torch.is_grad_enabled():
            # Of a block that asks for it once more, or of a loop that asks without gradients too.
            return block(*args, **kwargs)
        self.observed.past_the_forward(self.outside.condition)
        return self.outside.run(block, args, kwargs)

    def feed_forward(self, call: CallWrapper, *args: Any, **kwargs: Any) -> Any:
        """Run a feed-forward that is recomputed by itself, in a graph that is being traced."""
        return (self.backend.in_graph if self.on else plainly)(call, *args, **kwargs)

    def notice(self, model: Module, block: Module) -> None:
        """The first block of a stack is called: another module may run the blocks.

        Its loop does not ask the checkpoint function, so the blocks are intercepted from now on.
        """
        if torch.compiler.is_compiling() or self.outside.seen or not self._is_outside(model):
            return
        self.outside.see(model, block)
        self.patches.intercept_blocks(model, self)

    def say_cache_is_off(self) -> None:
        """A part of the model wanted a KV cache (see ``model.kv_cache``)."""
        if not torch.compiler.is_compiling():
            self.messages.warn(
                "no-cache",
                "use_cache is off while gradient checkpointing trains: "
                "recompute would fill it again",
            )

    # It ends: hooks of the model.

    def close_part(self, model: Module, part: Module, args: tuple, output: Any) -> None:
        """Forward hook of a part that ``open_part`` is one of."""
        if torch.compiler.is_compiling():
            return
        running = self.running.innermost(model)
        if running is not None and running.frame is sys._getframe(1):
            self.running.end(model)

    def note_return(self, module: Module, args: tuple, output: Any) -> None:
        """Forward hook of the model, before ``close``: its forward did not raise.

        torch calls ``close`` with None when it did, which is also what a forward may return.
        """
        if torch.compiler.is_compiling():
            return
        running = self.running.innermost(module)
        if running is not None:
            running.returned = True

    def close(self, module: Module, args: tuple, output: Any) -> Any:
        """Forward hook of the model, called in any case: settle what ran."""
        if torch.compiler.is_compiling():
            if self.patches.intercepts and self.traced.recomputes:
                self.flags.switch(module, True)
            self.traced.end()
            return None
        running = self.running.innermost(module)  # of a forward that raised the frame has ended
        if running is None or not running.returned:
            return None  # not begun here, such as one during which this was installed
        forward = self.running.end(module)
        if forward is None:
            return None
        forward.finish()
        forward.returned(output)
        if not forward.reached:
            # The loop does not ask its checkpoint function, whatever its class says.
            self.patches.intercepts = True
        effect = self.observed.effect = forward.effect()
        self.forwards.learn(forward)
        self.observed.trained(module, effect, self.forwards.proofs)
        return plain_tree(output) if watched_in(output) else None

    @property
    def last_effect(self) -> Effect | None:
        """What the last training forward did; of one in a compiled graph, that it was one."""
        if self.observed.effect is None and self.traced.recomputes:
            return Effect((), (self.traced.condition,))
        return self.observed.effect
