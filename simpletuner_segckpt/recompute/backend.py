"""How the blocks run: what ``gradient_checkpointing_backend`` and the keys beside it stand for."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch.utils.checkpoint
from torch.nn import Module

from ..config_schema import CheckpointingConfig
from ..model.foreign_hooks import has_hook_inside
from ..offload.buffers import BufferPool
from ..offload.device import Accelerator
from ..offload.saved_tensors import HostMemory, Offload
from ..private.of_torch import pytree
from ..schedules.schedule import Kept
from ..schedules.tally import tally
from .containers import is_container
from .contexts import Contexts, Together
from .kept_operators import in_graph
from .kept_outputs import Keeping
from .state import OfModules
from .submodules import CallWrapper, SubmoduleKind, treated


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` and keep what its backward needs."""
    return function(*args, **kwargs)


def torch_checkpoint(
    options: dict[str, Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Call ``function`` now and again in backward, keeping only its arguments in between.

    Always the non-reentrant variant: it takes any argument, lets frozen parts be frozen and
    recomputes nothing where nothing needs a gradient. ``options`` are torch's own.
    """
    if kwargs:
        # Passed on by position: tensors that checkpoint gets as such can be seen and moved by
        # saved-tensor hooks, and some of checkpoint's own parameters have plain names.
        function = partial(_call, function, tuple(kwargs))
        args = (*args, *kwargs.values())
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **options)


def _call(function: Callable[..., Any], names: tuple[str, ...], *args: Any) -> Any:
    split = len(args) - len(names)
    return function(*args[:split], **dict(zip(names, args[split:], strict=True)))


@dataclass(frozen=True)
class Recompute:
    """``torch_checkpoint`` within ``contexts``; ``offload`` moves what enters it.

    keeping: what is not recomputed.
    """

    contexts: tuple[Contexts, ...] = ()
    keeping: Keeping | None = None
    offload: Offload | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        options: dict[str, Any] = {}
        modules: Sequence[Module] = ()
        if isinstance(function, OfModules):
            modules = function.modules
            if has_hook_inside(modules, function.everything):
                # Hooks that empty weights after a module's pass fill them again for its backward,
                # after torch would compare the shapes of what the whole recompute has saved.
                options["determinism_check"] = "none"
        if self.contexts or self.keeping is not None:
            options["context_fn"] = partial(self._entered, modules)
        if self.offload is None:
            return torch_checkpoint(options, function, args, kwargs)
        # Tensors in tuples are moved as well; containers stay the same objects, to be written to.
        values = (*args, *kwargs.values())
        leaves, spec = pytree.tree_flatten(values, is_leaf=is_container)
        call = _Unflattened(partial(_call, function, tuple(kwargs)), values, spec)
        return self.offload.run("inputs", torch_checkpoint, options, call, tuple(leaves), {})

    def _entered(
        self, modules: Sequence[Module]
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        made = [contexts() for contexts in self.contexts]
        if self.keeping is not None:
            made.append(self.keeping.contexts(modules))
        if len(made) == 1:
            return made[0]
        forward, again = zip(*made, strict=True)
        return Together(*forward), Together(*again)


class _Unflattened:
    """Calls ``function`` with ``values``, and from the second time on with others like them."""

    def __init__(self, function: Callable[..., Any], values: tuple, spec: pytree.TreeSpec):
        self.function = function
        self._values: tuple | None = values
        self._spec = spec

    def __call__(self, *leaves: Any) -> Any:
        values, self._values = self._values, None  # which are not to stay until backward
        if values is None:
            values = pytree.tree_unflatten(leaves, self._spec)
        return self.function(*values)


@dataclass(frozen=True)
class BlockWrappers:
    """How the blocks of one forward run.

    gap: those that are not covered. whole: those that are recomputed as a whole, by what of them
    is kept. alone: the same of one that is only tried, so that nothing of it is moved. inside:
    those that are covered, where only parts of them are recomputed. offload: what this forward has
    in CPU memory.
    """

    gap: CallWrapper
    whole: Callable[[Kept], CallWrapper]
    alone: Callable[[Kept], CallWrapper]
    inside: CallWrapper | None = None
    offload: Offload | None = None

    def covered(self, kept: Kept = ()) -> CallWrapper:
        """How a block runs that is covered and keeps the outputs of these operators."""
        return self.whole(kept) if self.inside is None else self.inside


class Backend:
    """Carries out the keys of a config for one model, from forward to forward."""

    def __init__(self, config: CheckpointingConfig, accelerator: Accelerator | None):
        self.config = config
        self.order: dict[int, int] = {}  # in which backward wants what was offloaded
        self.host: HostMemory | None = None
        self._keeping: dict[Kept, Keeping] = {}
        asked = config.enabled and (config.inputs_on_cpu or config.offload_attention)
        if asked and accelerator is not None:
            pool = BufferPool(config.pin_memory_max_buckets, accelerator.pinned)
            self.host = HostMemory(accelerator, pool)

    def __reduce__(self) -> Any:
        return _anew, (self.config,)

    def close(self) -> None:
        """Let the buffers go that are free; those in use go when backward is done with them."""
        if self.host is not None:
            self.host.pool.close()

    @property
    def moves(self) -> bool:
        """Whether tensors are moved to CPU memory: the keys ask for it, and it is elsewhere."""
        return self.host is not None

    def in_graph(self, function: CallWrapper, *args: Any, **kwargs: Any) -> Any:
        """Run what is to be recomputed in a graph that is being traced; nothing is moved there."""
        options = {"context_fn": in_graph(self.config.keep)} if self.config.keep else {}
        return torch_checkpoint(options, function, args, kwargs)

    def begin(self, contexts: tuple[Contexts, ...] = ()) -> BlockWrappers:
        """For a forward; ``contexts`` are entered around whatever is recomputed."""
        config = self.config
        offload = None
        if self.host is not None:
            offload = Offload(self.host, self.order if config.prefetch else None)
        parts: dict[SubmoduleKind, CallWrapper] = {}
        if offload is not None and config.offload_attention:
            parts["attention"] = partial(offload.run, "attention")
        gap = partial(with_submodules, parts) if parts else plainly
        inputs = offload if config.inputs_on_cpu else None

        @cache
        def whole(kept: Kept) -> CallWrapper:
            return Recompute(contexts, self._keeping_of(kept), inputs)

        def alone(kept: Kept) -> CallWrapper:
            return Recompute(contexts, self._keeping_of(kept))

        inside = None
        if config.feed_forward_only:
            recompute = partial(_counted, whole(()))
            inside = partial(with_submodules, {**parts, "feed_forward": recompute})
        return BlockWrappers(gap, whole, alone, inside, offload)

    def _keeping_of(self, kept: Kept) -> Keeping | None:
        """What was learned of calls that keep these, from forward to forward."""
        if kept and kept not in self._keeping:
            self._keeping[kept] = Keeping(kept)
        return self._keeping.get(kept)


def _anew(config: CheckpointingConfig) -> Backend:
    """That of a copy of a model, which has CPU memory of its own, on the machine where it is."""
    return Backend(config, Accelerator.current())


def with_submodules(
    parts: Mapping[SubmoduleKind, CallWrapper],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``function``, a block or what runs one, with its parts run as ``parts`` says."""
    with treated(parts):
        return function(*args, **kwargs)


def _counted(
    recompute: CallWrapper, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    counting = tally()
    if counting is not None:
        counting.feed_forwards += 1
    return recompute(function, *args, **kwargs)
