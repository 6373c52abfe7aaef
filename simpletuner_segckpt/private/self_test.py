"""What each private name is for, what happens without it, and whether it is still what it was.

``segckpt check`` runs this. Each test uses a name as the rest of this package does.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from . import of_fake_tensors, of_libraries, of_simpletuner, of_tomlkit, of_torch


@dataclass(frozen=True)
class PrivateName:
    """A name that another library may change without a word.

    purpose: what it is for here. without: what becomes of that when it is gone. works: whether it
    does what is wanted of it; raising is no.
    """

    name: str
    purpose: str
    without: str
    works: Callable[[], bool]


def drifted() -> Iterator[str]:
    """A sentence for each name that does not do any more what it is used for."""
    for entry in NAMES:
        try:
            fault = "" if entry.works() else "does something else"
        except Exception as error:  # whatever a changed library does
            fault = f"raises {type(error).__name__}: {error}"
        if fault:
            yield (
                f"{entry.name} {fault}; it is there {entry.purpose}, and without it {entry.without}"
            )


def _pytree() -> bool:
    tree = ({"a": torch.ones(1)}, [2, None])
    leaves, spec = of_torch.pytree.tree_flatten(tree)
    path: Any = of_torch.pytree.tree_flatten_with_path(tree)[0][0][0]
    return of_torch.pytree.tree_unflatten(leaves, spec) == tree and path[1].key == "a"


def _dispatch_mode() -> bool:
    seen = []

    class Mode(of_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1) + 1
    return torch.ops.aten.add.Tensor in seen


def _exchanges() -> bool:
    operators: Any = torch.ops._c10d_functional
    exchanges = (operators.all_to_all_single.default, operators.all_gather_into_tensor.default)
    tensor = torch.ones(1)
    others = (operators.all_reduce.default, operators.wait_tensor.default)
    known = all(map(of_torch.is_exchange, exchanges)) and not any(map(of_torch.is_exchange, others))
    return known and of_torch.finished(tensor) is tensor


def _disabled_subclass() -> bool:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError

    with of_torch.DisableTorchFunctionSubclass():
        return torch.ones(1).as_subclass(Loud).add(1).item() == 2


def _inside_checkpoint() -> bool:
    seen = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(of_torch.inside_checkpoint())
        return tensor

    checkpoint(look, torch.ones(1, requires_grad=True), use_reentrant=False)
    return seen == [True] and not of_torch.inside_checkpoint()


def _attention_backend() -> bool:
    from diffusers.models.attention_dispatch import attention_backend

    before = of_libraries.attention_backend()
    with attention_backend("_native_math"):
        inside = of_libraries.attention_backend()
        of_libraries.set_attention_backend(before)
        put = of_libraries.attention_backend()
    return inside is not before and put is before


def _current_backward() -> bool:
    seen = []
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda _: seen.append(of_torch.current_backward()))
    for _ in range(2):
        tensor.sum().backward()
    return len(set(seen)) == 2 and None not in seen and of_torch.current_backward() is None


def _kept_outputs() -> bool:
    found = []

    class Mode(of_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            detached = of_torch.detached_below_autograd(result)
            found.append((of_torch.dispatch_modes(), detached, of_torch.version(detached)))
            return result

    with Mode():
        inside = of_torch.dispatch_modes()
        result = torch.ones(2, requires_grad=True) * 2
    result.mul_(3)
    below, detached, before = found[-1]
    counted = (below, of_torch.dispatch_modes()) == (inside - 1, inside - 1)
    written = of_torch.version(detached) == before + 1 and not detached.requires_grad
    return counted and written and of_torch.memory_of(detached) == of_torch.memory_of(result)


def _versions() -> bool:
    tensor = torch.zeros(2)
    view = tensor[:1]
    before = of_torch.version(view)
    tensor.add_(1)
    return of_torch.version(view) == before + 1 and of_torch.base_of(view) is tensor


def _saved_by_nodes() -> bool:
    weight = torch.ones(3, requires_grad=True)
    result = (weight * torch.ones(3)).exp()
    return [tensor.numel() for tensor in of_torch.saved_by(result.grad_fn)] == [3]


def _backward_ends() -> bool:
    told: list[bool] = []
    weight = torch.ones(3, requires_grad=True)
    middle = weight * 2
    middle.register_hook(lambda gradient: of_torch.when_backward_ends(lambda: told.append(True)))
    weight.register_hook(lambda gradient: told.append(False))
    middle.sum().backward()
    return told == [False, True]


def _optimized_module() -> bool:
    compiled: Any = torch.compile(inner := nn.Linear(1, 1), backend="eager")
    return of_torch.is_optimized(compiled) and compiled._modules[of_torch.ORIGINAL] is inner


def _compiled_in_place() -> bool:
    module = nn.Linear(1, 1)
    before = of_torch.is_compiled_in_place(module)
    module.compile(backend="eager")
    return of_torch.is_compiled_in_place(module) and not before


def _compiled_order() -> bool:
    return of_torch.set_most_recent_first is not None


def _wrappers() -> bool:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    fsdp1: Any = import_module("torch.distributed.fsdp.fully_sharded_data_parallel")
    wrapped = checkpoint_wrapper(inner := nn.Linear(1, 1))
    own = {*wrapped._modules, fsdp1.FSDP_WRAPPED_MODULE}
    return (
        own == set(of_torch.WRAPPED[1:])
        and next(iter(wrapped.children())) is inner
        and of_torch.CHECKPOINT_WRAPPER_FUNCTION in wrapped.__dict__
    )


def _hooks() -> bool:
    module = nn.Linear(1, 1)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_forward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    tables = all(table in module.__dict__ for table in of_torch.FORWARD_HOOK_TABLES)
    return tables and len(list(of_torch.hooks_on(module))) == 4


def _arguments_by_name() -> bool:
    seen = []

    def hook(module: nn.Module, args: tuple) -> None:
        seen.append(of_torch.arguments_by_name(sys._getframe(1)))

    handle = register_module_forward_pre_hook(hook)
    try:
        nn.Linear(1, 1)(input=torch.ones(1))
    finally:
        handle.remove()
    return [list(found) for found in seen] == [["input"]]


def _checkpoint_variants() -> bool:
    def look(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(of_torch.inside_checkpoint() or not torch.is_grad_enabled())
        return tensor

    seen: list[bool] = []
    script = {"__name__": "a script", "checkpoint": checkpoint, "look": look}  # no call of ours
    script["tensor"] = torch.ones(1, requires_grad=True)
    for plain in ([look], []):
        with of_torch.plain_checkpoints(lambda function, args, plain=plain: function in plain):  # type: ignore[misc]
            for reentrant in (False, True):
                eval(f"checkpoint(look, tensor, use_reentrant={reentrant})", script)
    return seen == [False, False, True, True]


def _global_hooks() -> bool:
    before = len(list(of_torch.global_forward_hooks()))
    handles = [
        nn.modules.module.register_module_forward_pre_hook(lambda *_: None),
        nn.modules.module.register_module_forward_hook(lambda *_: None),
    ]
    try:
        return len(list(of_torch.global_forward_hooks())) == before + 2
    finally:
        for handle in handles:
            handle.remove()


def _mixed_precision() -> bool:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return "_mp_policy" in FSDPState.init.__code__.co_names  # what needs a process group is not run


def _forward_prefetch() -> bool:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    setter = FSDPModule.set_modules_to_forward_prefetch.__code__
    return of_torch.FORWARD_PREFETCH in setter.co_names and hasattr(
        FSDPState(), of_torch.FORWARD_PREFETCH
    )


def _fake_tensors() -> bool:
    mode = of_fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
    with of_fake_tensors.constants_up_to(8), of_fake_tensors.parameters_replaced(), mode:
        model = nn.Linear(2, 2).to(torch.float64)
        loss = model(torch.ones(1, 2, dtype=torch.float64)).sum()
        of_fake_tensors.backward([loss])
        with of_fake_tensors.unset_fake_temporarily():
            real = torch.ones(1)
    fake = isinstance(loss, of_fake_tensors.FakeTensor)
    return fake and type(real) is torch.Tensor and model.weight.grad is not None


def _diffusers_model() -> bool:
    from diffusers import ModelMixin

    def function(*_: object) -> None: ...

    model = type("Model", (ModelMixin,), {of_libraries.SUPPORTS_CHECKPOINTING: True})()
    model.gradient_checkpointing = False
    model.enable_gradient_checkpointing(gradient_checkpointing_func=function)
    asked = getattr(model, of_libraries.CHECKPOINT_FUNCTION) is function
    asked = asked and of_libraries.takes_checkpoint_function(model)
    model.enable_gradient_checkpointing()
    stock = getattr(model, of_libraries.CHECKPOINT_FUNCTION)
    stock = getattr(stock, "func", stock)
    known = (of_libraries.STOCK_FUNCTIONS_MODULE, torch.utils.checkpoint.__name__)
    names = (of_libraries.KEEP_IN_FP32, of_libraries.SET_CHECKPOINTING)
    there = all(hasattr(ModelMixin, name) for name in names)
    return asked and there and stock.__module__ in known


def _input_gradients() -> bool:
    from transformers import CLIPTextConfig, CLIPTextModel

    width = {"hidden_size": 2, "intermediate_size": 2, "num_attention_heads": 1}
    model = CLIPTextModel(CLIPTextConfig(vocab_size=4, num_hidden_layers=1, **width))
    model.enable_input_require_grads()
    embeddings = model.get_input_embeddings()
    [(_, hook)] = of_torch.hooks_on(embeddings, "forward hook")
    of_torch.drop_forward_hooks(embeddings, [hook])
    known = hook.__qualname__.startswith(of_libraries.INPUT_GRADIENTS_HOOK)
    return known and not list(of_torch.hooks_on(embeddings))


def _diffusers_hooks() -> bool:
    from diffusers.hooks import HookRegistry, ModelHook

    class Stateful(ModelHook):
        _is_stateful = True

    module = nn.Linear(1, 1)
    before = bool(of_libraries.diffusers_hooks(module))
    HookRegistry.check_if_exists_or_initialize(module).register_hook(Stateful(), "mine")
    hooks = of_libraries.diffusers_hooks(module)
    return not before and of_libraries.is_stateful(hooks["mine"]) and not ModelHook._is_stateful


def _sides_of_hooks() -> bool:
    found = []
    for library in ("diffusers", "accelerate"):
        base: Any = import_module(f"{library}.hooks").ModelHook
        after = type("After", (base,), {"post_forward": lambda *_: None})()
        found += [of_libraries.overridden(after, f"{side}_forward") for side in ("pre", "post")]
        found.append(of_libraries.overridden(base(), "post_forward"))
    return found == [False, True, False] * 2


def _context_parallel() -> bool:
    hooks: Any = import_module("diffusers.hooks.context_parallel")
    kinds = (hooks.ContextParallelSplitHook, hooks.ContextParallelGatherHook)
    from diffusers import ContextParallelConfig, ModelMixin

    model = ModelMixin()
    there = not of_libraries.has_ring_attention(model)
    model._parallel_config = SimpleNamespace(context_parallel_config=ContextParallelConfig(2))
    there = there and of_libraries.has_ring_attention(model)
    return there and all(of_libraries.splits_context(kind({}, None)) for kind in kinds)


def _peft() -> bool:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraModel

    model = get_peft_model(nn.Sequential(nn.Linear(1, 1)), LoraConfig(r=1, target_modules=["0"]))
    state = dict(model.named_modules())["base_model.model.0"].__dict__
    method = of_libraries.RECOMPUTE_HOOK.rstrip(".").rpartition(".")[2]
    return (
        state.get(of_libraries.ADAPTERS_DISABLED) is False
        and of_libraries.ACTIVE_ADAPTER in state
        and hasattr(LoraModel, method)
    )


def _simpletuner() -> bool:
    """True where it is not installed, too."""
    if of_simpletuner.package_folder() is None:
        return True
    return of_simpletuner.argument_parser() is not None and of_simpletuner.starter() is not None


def _accelerate() -> bool:
    from accelerate.hooks import ModelHook, add_hook_to_module

    module = add_hook_to_module(nn.Linear(1, 1), ModelHook())
    return of_libraries.ACCELERATE_HOOK in module.__dict__


def _tomlkit() -> bool:
    import tomlkit

    text = "# mine\na = 1\n  b.c = 2\n\n[d]\ne = 3\n"
    items = list(of_tomlkit.toml_items(tomlkit.parse(text)))
    found = {key.key: (offset, rendered) for key, _, offset, rendered in items if key is not None}
    return found == {"a": (7, "a = 1\n"), "b": (13, "  b.c = 2\n")}


# Names, purpose, what happens without, test.
NAMES = tuple(
    PrivateName(*entry)
    for entry in (
        (
            "torch.utils._pytree",
            "to look into nested arguments as torch.utils.checkpoint does",
            "its public namesake is used",
            _pytree,
        ),
        (
            "torch.utils._python_dispatch.TorchDispatchMode",
            "to count bytes and to meet the operators that keep is about",
            "the estimator counts nothing, and nothing is kept",
            _dispatch_mode,
        ),
        (
            "torch.ops._c10d_functional",
            "to keep what processes exchange for an attention",
            "keep repeats that communication",
            _exchanges,
        ),
        (
            "torch._C.DisableTorchFunctionSubclass",
            "to carry on with a watched tensor's own value",
            "no model can have a schedule",
            _disabled_subclass,
        ),
        (
            "torch._C._autograd._top_saved_tensors_default_hooks",
            "to see a checkpoint call of somebody else around the model, to explain what torch "
            "says of a recompute, and when keep has to look",
            "such a call is not noticed, torch's own text is what users get, and keep looks at "
            "every operator",
            _inside_checkpoint,
        ),
        (
            "torch.utils.checkpoint._checkpoint_without_reentrant_generator, CheckpointFunction",
            "so that a script's own checkpoint calls around blocks give way to the schedule",
            "such blocks are left to these calls",
            _checkpoint_variants,
        ),
        (
            "args and kwargs in Module._call_impl",
            "to know the arguments of the forward in which a model is noticed",
            "conditions on arguments are not seen in that first forward",
            _arguments_by_name,
        ),
        (
            "diffusers.models.attention_dispatch._AttentionBackendRegistry._active_backend",
            "to recompute attention with the kernel that its forward had",
            "a backend that was left before backward is not put back",
            _attention_backend,
        ),
        (
            "torch._C._current_graph_task_id",
            "to give diffusers' ring attention what it saved more than once",
            "it has no backward under a checkpoint call",
            _current_backward,
        ),
        (
            "_len_torch_dispatch_stack, _SetExcludeDispatchKeyGuard, UntypedStorage._cdata",
            "to look for what is to be kept without getting in the way of a block's own modes",
            "keep looks at more operators, and does not notice writes to what it keeps",
            _kept_outputs,
        ),
        (
            "Tensor._version and Tensor._base",
            "to see writes in place, and parameters behind views",
            "no model can have a schedule",
            _versions,
        ),
        (
            "Node._saved_*",
            "to count what lies between blocks in a memory budget",
            "a budget holds that much less exactly",
            _saved_by_nodes,
        ),
        (
            "Variable._execution_engine.queue_callback",
            "to know when the memory of a step is free again",
            "two forwards before one backward share a memory budget less exactly",
            _backward_ends,
        ),
        (
            "torch._dynamo.eval_frame.OptimizedModule",
            "to unwrap torch.compile(model)",
            "a compiled model must be passed as it was before",
            _optimized_module,
        ),
        (
            "Module._compiled_call_impl",
            "to see module.compile()",
            "a model compiled in place is taken for one that is not",
            _compiled_in_place,
        ),
        (
            "torch._C._dynamo.eval_frame._set_lru_cache",
            "to have a recompute run the compiled code that its forward ran",
            "blocks must be compiled with dynamic=True",
            _compiled_order,
        ),
        (
            "batchnorm._NormBase",
            "to restore running statistics, which are written past their version",
            "the public batch and instance norms stand for it",
            lambda: isinstance(nn.BatchNorm1d(1), of_torch.NormBase),
        ),
        (
            "_fsdp_wrapped_module, _checkpoint_wrapped_module, checkpoint_fn",
            "to find the blocks inside FSDP1's and torch's checkpoint wrappers",
            "such blocks are of a class that no family knows",
            _wrappers,
        ),
        (
            "Module._forward_pre_hooks and its siblings",
            "to see hooks of others on blocks, and to put them back in a recompute",
            "hooks that need each block by itself are not seen",
            _hooks,
        ),
        (
            "module._global_forward_hooks, _global_forward_pre_hooks",
            "to see hooks on all modules",
            "these are not seen",
            _global_hooks,
        ),
        (
            "FSDPState._mp_policy",
            "to warn of torch 2.11 and 2.12, which do not repeat FSDP2's cast of inputs",
            "that warning is not given",
            _mixed_precision,
        ),
        (
            "FSDPState._states_to_forward_prefetch",
            "so that a recompute gathers no weights ahead (set_modules_to_forward_prefetch)",
            "segments gather weights for nothing in backward, and ranks that differ may hang",
            _forward_prefetch,
        ),
        (
            "torch._subclasses, Module._apply, graph._engine_run_backward",
            "to run a training step without memory",
            "segckpt estimate and plan cannot run",
            _fake_tensors,
        ),
        (
            "_supports_gradient_checkpointing, _gradient_checkpointing_func, "
            "_set_gradient_checkpointing, _keep_in_fp32_modules",
            "to be the function that a diffusers model asks",
            "calls of the blocks themselves are intercepted",
            _diffusers_model,
        ),
        (
            "_diffusers_hook, ModelHook._is_stateful",
            "to see offloading and caches of diffusers",
            "they are not refused where they are wrong",
            _diffusers_hooks,
        ),
        (
            "diffusers.hooks.hooks and accelerate.hooks, where ModelHook is",
            "to see on which side of a block one of their hooks acts",
            "segments end on both sides of such blocks",
            _sides_of_hooks,
        ),
        (
            "diffusers.hooks.context_parallel, ModelMixin._parallel_config",
            "to know the hooks that hand each process its part of a tensor, and ring attention",
            "segments end at the blocks that carry them, and ring attention has no backward",
            _context_parallel,
        ),
        (
            "transformers.utils.output_capturing",
            "to know the hooks that capture outputs from those of others",
            "a model that has captured once runs block by block",
            lambda: find_spec(of_libraries.OUTPUT_CAPTURING) is not None,
        ),
        (
            "PreTrainedModel.enable_input_require_grads.<locals>",
            "to know the hook that PEFT has transformers put on the embeddings",
            "remove() leaves one more of them than would be there",
            _input_gradients,
        ),
        (
            "_disable_adapters, _active_adapter, LoraModel._enable_peft_forward_hooks",
            "to recompute with the adapters of the forward",
            "a switch of adapters before backward gives other gradients, and aLoRA runs per-block",
            _peft,
        ),
        (
            "_hf_hook",
            "to see accelerate's hooks on blocks",
            "offloading by accelerate is not seen",
            _accelerate,
        ),
        (
            f"{of_simpletuner.PARSER}, {of_simpletuner.STARTER}",
            "to launch SimpleTuner with our keys in its config",
            "its parser ends on them, and `simpletuner train` cannot be launched",
            _simpletuner,
        ),
        (
            "Container.body of tomlkit",
            "to find the places of keys in TOML files",
            "findings about TOML files have no lines, and plan --write cannot change them",
            _tomlkit,
        ),
    )
)
