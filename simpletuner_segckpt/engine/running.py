"""Which forwards of a model run at this moment, and in which threads.

A model may be entered again from within its own forward, and by several threads at once. Where its
blocks are intercepted, its switch is off as long as a forward runs whose loop must not recompute
by itself, and the switch is that of all threads.
"""

import sys
import threading
from dataclasses import dataclass
from types import FrameType

from torch.nn import Module

from .forward import Forward
from .patches import ModelPatches


@dataclass(slots=True)
class Running:
    """A forward that runs: in which frame, its record if it trains, whether it has returned.

    paused: whether no gradients are wanted of one that would be recomputed otherwise.
    """

    frame: FrameType
    record: Forward | None
    paused: bool = False
    returned: bool = False

    @property
    def wants_switch_off(self) -> bool:
        """Whether its loop is to take its plain branch, where blocks are intercepted."""
        return self.record is not None or self.paused

    @property
    def is_live(self) -> bool:
        """Whether its frame is one of those that are running in this thread."""
        running: FrameType | None = sys._getframe(1)
        while running is not None and running is not self.frame:
            running = running.f_back
        return running is not None


class RunningForwards:
    """The forwards that run, of a model and of the copies that share its entry."""

    def __init__(self, patches: ModelPatches):
        self.patches = patches
        self.by_thread: dict[int, list[Running]] = {}  # outermost first

    @property
    def in_this_thread(self) -> list[Running]:
        """Those of this thread; it may hold some that an exception has ended."""
        return self.by_thread.get(threading.get_ident(), [])

    @property
    def training(self) -> Forward | None:
        """The record of the innermost that runs in this thread; None where it does not train."""
        return next((r.record for r in reversed(self.in_this_thread) if r.is_live), None)

    @property
    def keep_switch_off(self) -> bool:
        """Whether the switch is off because of one that runs, in whatever thread."""
        if not self.patches.intercepts:
            return False
        for ident in self.by_thread.keys() - {thread.ident for thread in threading.enumerate()}:
            del self.by_thread[ident]  # of a thread that was ended in the middle of one
        threads = list(self.by_thread.values())
        return any(one.wants_switch_off for running in threads for one in running)

    def pauses(self, module: Module) -> bool:
        """Whether a forward without gradients is to find checkpointing switched off.

        Layers of transformers before 5.24 ask the switch and training mode only, and run without
        the KV cache that they were given. A loop that asks for gradients too needs no pause: the
        switch is that of all threads.
        """
        patches = self.patches
        return patches.intercepts and (patches.flags.is_on(module) or self.keep_switch_off)

    def begin(self, module: Module, begun: Running) -> None:
        """One begins, within those of this thread."""
        threading.current_thread()  # or enumerate() lists none that Python did not start
        self.by_thread.setdefault(threading.get_ident(), []).append(begun)
        if self.patches.intercepts and begun.wants_switch_off:
            self.patches.flags.switch(module, False)

    def innermost(self, module: Module) -> Running | None:
        """The innermost of this thread, without those that an exception has ended."""
        self.drop_ended(module)
        return next(reversed(self.in_this_thread), None)

    def drop_ended(self, module: Module) -> None:
        """Let go of what an exception has ended: torch calls no hook for a KeyboardInterrupt."""
        while self.in_this_thread and not self.in_this_thread[-1].is_live:
            record = self.end(module)
            if record is not None:
                record.abandon()

    def end(self, module: Module) -> Forward | None:
        """The innermost of this thread is over; returns its record."""
        running = self.in_this_thread
        ended = running.pop()
        if not running:
            self.by_thread.pop(threading.get_ident(), None)
        if self.patches.intercepts and ended.wants_switch_off and not self.keep_switch_off:
            self.patches.flags.switch(module, True)
        return ended.record
