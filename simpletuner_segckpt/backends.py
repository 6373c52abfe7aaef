"""How the blocks run: what ``gradient_checkpointing_backend`` and the keys beside it stand for."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch.utils.checkpoint
from torch.nn import Module
from torch.utils import _pytree as pytree

from .accelerator import Accelerator
from .config_schema import CheckpointingConfig
from .keep import Contexts, Kept, in_graph
from .offload import HostMemory, Offload
from .parts import Kind, Runner, tally, treated
from .pinned import BufferPool


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` and keep what its backward needs."""
    return function(*args, **kwargs)


def torch_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` now and again in backward, keeping only its arguments in between.

    Always the non-reentrant variant: it takes any argument, lets frozen parts be frozen and
    recomputes nothing where nothing needs a gradient.
    """
    return _torch_checkpoint({}, function, args, kwargs)


def _torch_checkpoint(
    options: dict[str, Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
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
    """``torch_checkpoint`` within ``contexts``, its arguments moved out by ``inputs``."""

    contexts: tuple[Contexts, ...] = ()
    inputs: Offload | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        options = {"context_fn": self._entered} if self.contexts else {}
        if self.inputs is None:
            return _torch_checkpoint(options, function, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))  # tensors in tuples are moved as well
        with self.inputs.hooks():
            return _torch_checkpoint(
                options, partial(_unflattened, function, spec), tuple(leaves), {}
            )

    def _entered(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        made = [contexts() for contexts in self.contexts]
        return _together([forward for forward, _ in made]), _together([again for _, again in made])


def _unflattened(function: Callable[..., Any], spec: pytree.TreeSpec, *leaves: Any) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return function(*args, **kwargs)


@contextmanager
def _together(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@dataclass(frozen=True)
class Runners:
    """How the covered blocks of one forward run, and how those in the gaps do.

    inputs, attention: what this forward has in CPU memory.
    """

    covered: Runner
    gap: Runner = plainly
    inputs: Offload | None = None
    attention: Offload | None = None

    def settle(self) -> None:
        """The forward is over."""
        for offload in (self.inputs, self.attention):
            if offload is not None:
                offload.settle()


class Backend:
    """Carries out the keys of a config for one model, from forward to forward."""

    def __init__(self, config: CheckpointingConfig):
        self.config = config
        self._start()

    def _start(self) -> None:
        self._host: HostMemory | None = None
        self._order: dict[int, int] = {}  # of the attentions in backward

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.config = state["config"]
        self._start()

    def in_graph(self, function: Runner, *args: Any, **kwargs: Any) -> Any:
        """Run what is to be recomputed in a graph that is being traced; nothing is moved there."""
        options = {"context_fn": in_graph(self.config.keep)} if self.config.keep else {}
        return _torch_checkpoint(options, function, args, kwargs)

    def begin(self, contexts: tuple[Contexts, ...] = ()) -> Runners:
        """For a forward; ``contexts`` are entered around whatever is recomputed."""
        config = self.config
        host = self._memory() if config.inputs_on_cpu or config.offload_attention else None
        inputs = Offload(host) if host and config.inputs_on_cpu else None
        attention = None
        if host and config.offload_attention:
            attention = Offload(host, self._order if config.prefetch else None)
        parts: dict[Kind, Runner] = {"attention": attention.run} if attention else {}
        gap = partial(_with_parts, parts) if parts else plainly
        if config.keep:
            contexts = (*contexts, lambda: Kept(config.keep).contexts())
        covered: Runner = Recompute(contexts, inputs)
        if config.feed_forward_only:
            recompute = partial(_counted, covered)
            covered = partial(_with_parts, {**parts, "feed_forward": recompute})
        return Runners(covered, gap, inputs, attention)

    def _memory(self) -> HostMemory | None:
        """The CPU memory that is offloaded to; None without an accelerator."""
        accelerator = Accelerator.current()
        if self._host is None and accelerator is not None:
            pool = BufferPool(self.config.pin_memory_max_buckets, accelerator.pinned)
            self._host = HostMemory(accelerator, pool)
        return self._host


def _with_parts(
    parts: Mapping[Kind, Runner], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with treated(parts):
        return function(*args, **kwargs)


def _counted(recompute: Runner, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    counting = tally()
    if counting is not None:
        counting.feed_forwards += 1
    return recompute(function, *args, **kwargs)


def lora_scale(model: Module) -> Contexts:
    """Contexts for a forward that runs with a LoRA scale.

    diffusers applies the ``scale`` of ``joint_attention_kwargs`` to the LoRA layers only while
    the model's forward runs. Here a recompute in backward gets the scaling that the forward had.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    @cache
    def layers_in_forward() -> list[tuple[Any, dict[str, float]]]:
        """The LoRA layers and the scaling that they have while the forward runs."""
        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        return [(layer, dict(layer.scaling)) for layer in layers]

    @contextmanager
    def scaled(layers: list[tuple[Any, dict[str, float]]]) -> Iterator[None]:
        in_backward = [dict(layer.scaling) for layer, _ in layers]
        try:
            for layer, scaling in layers:
                layer.scaling.update(scaling)
            yield
        finally:
            for (layer, _), scaling in zip(layers, in_backward, strict=True):
                layer.scaling.update(scaling)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), scaled(layers_in_forward())

    return contexts


# The arguments by which diffusers' models take a LoRA scale.
_SCALED = ("joint_attention_kwargs", "attention_kwargs", "cross_attention_kwargs")


def has_lora_scale(arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments of a model's forward hold a LoRA scale other than 1."""
    given = (arguments.get(name) for name in _SCALED)
    return any(isinstance(g, dict) and g.get("scale") not in (None, 1.0) for g in given)
