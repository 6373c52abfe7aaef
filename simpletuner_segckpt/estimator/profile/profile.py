"""Measure a model that has no memory: one step of it, and each kind of its blocks alone.

The step is run without checkpointing on the model with most of its blocks taken out, since blocks
that are alike cost alike. It shows which values the blocks hand on, and what lies between and
around them. Then a block of each kind runs alone in every way that the keys know.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from ...costs import treatments
from ...costs.build import build_of
from ...costs.ledger import rounded
from ...costs.records import Run, Work
from ...private.of_torch import pytree
from ..workload import build as building
from ..workload.workload import Workload, training_of
from . import fake_tensors as fakes
from .cuda import CudaSemantics
from .known_values import KnownValues
from .lone_block import Hole, run_alone
from .recorder import Call, Event, Recorder, record_step
from .records import Block, BlockProfile, Glue, Profile
from .thinning import extended, one_after_another, places_of, put_blocks, thinned
from .walk import gradient_of, shared_gradients
from .walk import levels as levels_of

# Workloads that were measured last in this process: whoever asks for a plan asks for an estimate.
_recent: deque[tuple[Workload, Profile]] = deque(maxlen=4)


def profile(work: Workload) -> Profile:
    """Measure a workload: seconds, and no memory to speak of. Raises ``WorkloadError``.

    One of the last few workloads is not measured again.
    """
    for known, found in tuple(_recent):
        if known == work:
            return found
    found = _profiled(work)
    _recent.append((work, found))
    return found


def _profiled(work: Workload) -> Profile:
    experts = training_of(work.family).experts
    with fakes.without_memory(), KnownValues(experts), fakes.explained(work.family.title):
        model = building.build(work)
        whole = places_of(model, work.family)
        few = thinned(whole, work.family)
        put_blocks(model, few)
        try:
            recorder = record_step(model, few, work)
            thin = one_after_another(recorder.calls)
        except Exception:
            if len(few) == len(whole):
                raise
            thin = False  # a loop that counts on all of its blocks being there
        if not thin and len(few) < len(whole):
            few = whole
            put_blocks(model, whole)
            recorder = record_step(model, whole, work)
        small = _measured(recorder, work)
        put_blocks(model, whole)
        found = extended(small, recorder.calls, whole) if len(few) < len(whole) else small
        counts = dict(Counter(place.stack for place in whole))
        return with_weights(replace(found, counts=counts), model, work)


def _measured(recorder: Recorder, work: Workload) -> Profile:
    """The profile of the model that the recorder watched."""
    kinds: list[BlockProfile] = []
    known: dict[Any, int] = {}
    blocks = []
    cuda = CudaSemantics.of(work)
    for call in recorder.calls:
        leaves, spec = pytree.tree_flatten(call.arguments)
        called = [replace(x, itself=None) if isinstance(x, Hole) else repr(x) for x in leaves]
        key = build_of(call.place.module), str(spec), tuple(called), call.place.stack
        if key not in known:
            known[key] = len(kinds)
            kinds.append(_kind(call, recorder.sizes, work, cuda))
        place = call.place
        blocks.append(Block(place.stack, place.index, known[key], call.takes, call.gives))
    bare = tuple(Glue() for _ in range(len(blocks) + 1))
    held = {
        value
        for block in blocks
        for value, held in (
            *zip(block.takes, kinds[block.kind].run(treatments.PLAIN).holds, strict=True),
            *zip(block.gives, kinds[block.kind].run(treatments.PLAIN).results, strict=True),
        )
        if held
    }
    between = recorder.alive - held
    found = Profile(
        tuple(kinds), {}, tuple(blocks), bare, weights=0, trained=0, states=0, between=between
    )
    return replace(found, glue=_glue(found, recorder))


def _kind(call: Call, sizes: dict[int, int], work: Workload, cuda: CudaSemantics) -> BlockProfile:
    stack = work.family.stack_at(call.place.stack)
    block = call.place.module
    holes = [x for x in pytree.tree_leaves(call.arguments) if isinstance(x, Hole)]
    has_ffn = stack is not None and stack.feed_forward
    has_projections = stack is not None and stack.projections
    has_attention = stack is not None and stack.attention
    runs: dict[str, Run] = {}
    lacks_cross = False
    for treatment in treatments.ALL:
        if treatment.startswith(treatments.FFN) and not has_ffn:
            continue
        if treatment.endswith("+ffn") and not has_projections:
            continue
        if treatment.endswith(treatments.OFFLOAD) and not has_attention:
            continue
        if lacks_cross and "cross-attention" in treatment:
            continue
        runs[treatment] = run_alone(block, call.arguments, stack, treatment, cuda, work.accumulates)
        if treatment == treatments.CROSS and runs[treatment].own == runs[treatments.COVERED].own:
            lacks_cross = True
            del runs[treatment]
    return BlockProfile(
        takes=tuple(sizes[value] for value in call.takes),
        takes_gradient=tuple(
            any(hole.gradient for hole in holes if hole.value == position)
            for position in range(len(call.takes))
        ),
        gives=tuple(sizes[value] for value in call.gives),
        gives_gradient=call.gives_gradient,
        trained=trained_bytes([block]),
        runs=runs,
    )


def _glue(found: Profile, recorder: Recorder) -> tuple[Glue, ...]:
    """What the step had beside its blocks: the difference to what the blocks add up to."""
    assert recorder.head is not None
    assert recorder.end is not None
    levels, _ = levels_of(found)
    glue: list[Glue] = []
    extra = 0
    count = len(found.blocks)
    for at in range(count + 1):
        event = recorder.entered[at] if at < count else recorder.head
        kept = event.level - levels[at] - extra
        extra += kept
        begin = recorder.left[at - 1].level if at else 0
        above = recorder.head if at == count else recorder.out_of.get(at)
        below = recorder.into.get(at - 1) if at else recorder.end
        if above is None or below is None or (at < count and at not in recorder.between):
            above = below = Event(0, 0, Work())
        glue.append(
            Glue(
                kept=kept,
                forward_peak=event.peak - begin,
                backward_peak=max(0, below.peak - above.level),
                forward=event.work,
                backward=below.work,
            )
        )
    for at, freed in enumerate(_freed(replace(found, glue=tuple(glue)), recorder)):
        glue[at] = replace(glue[at], freed=freed)
    return tuple(glue)


def _freed(found: Profile, recorder: Recorder) -> list[int]:
    """By how much the backward of the glue lowers the level, from the levels between blocks.

    Where no gradient comes by, all that is left goes at the end.
    """
    _, begun = levels_of(found)
    left = sum(part.kept for part in found.glue)
    freed = [0] * len(found.glue)
    gradients = shared = done = 0
    of_all = shared_gradients(found)
    for at in reversed(range(len(found.blocks))):
        event = recorder.into.get(at)
        if event is not None:
            there = event.level - gradient_of(found, at) - gradients - shared
            freed[at + 1] = begun[at] - done - there
            done += freed[at + 1]
            gradients += found.kinds[found.blocks[at].kind].trained
            shared = of_all
    freed[0] = left - done
    return freed


def with_weights(found: Profile, model: nn.Module, work: Workload) -> Profile:
    """``found`` with what is in memory during the whole step of ``model``."""
    weights = linear = 0
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owner = model.get_submodule(path.rpartition(".")[0])
        frozen_linear = not tensor.requires_grad and isinstance(owner, nn.Linear)
        size = rounded(tensor.numel() * tensor.element_size())
        if frozen_linear and work.weights_on_cpu:
            continue
        if frozen_linear and tensor.dim() == 2:
            linear += size
            size = int(size * min(1, work.base_bytes / tensor.element_size()))
        weights += size
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trained = trained_bytes([model])
    return replace(
        found,
        weights=weights + (trained if work.ema else 0),
        linear=linear,
        trained=trained,
        states=int(numbers * work.optimizer_bytes),
        stepping=trained * work.stepping,
        accumulates=work.accumulates,
    )


def trained_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of the gradients of all parameters that are trained."""
    return sum(
        rounded(p.numel() * p.element_size())
        for module in modules
        for p in module.parameters()
        if p.requires_grad
    )
