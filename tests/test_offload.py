"""Offloading, on an accelerator whose copies happen only when somebody waits for them."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from accelerators import FakeAccelerator, no_copy_is_late
from training import add_lora, entry_of, keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.messages.units import readable
from simpletuner_segckpt.offload import buffers
from simpletuner_segckpt.offload import saved_tensors as offload
from simpletuner_segckpt.offload.buffers import BufferPool, bucket_size
from simpletuner_segckpt.offload.device import Accelerator
from simpletuner_segckpt.offload.saved_tensors import MOST_LEAVING, HostMemory, Offload, Stored
from simpletuner_segckpt.verify.step import loss_of, step

OFFLOAD = {"gradient_checkpointing_offload_attention": True}
PREFETCH = {**OFFLOAD, "gradient_checkpointing_offload_prefetch": True}
BACKEND = "gradient_checkpointing_backend"
BUCKETS = "gradient_checkpointing_offload_pin_memory_max_buckets"
NO_RECOMPUTE = {"gradient_checkpointing_keep_last": 100}


@pytest.fixture
def accelerator(monkeypatch):
    fake = FakeAccelerator()
    monkeypatch.setattr(offload, "SMALLEST", 1)
    monkeypatch.setattr(Accelerator, "current", classmethod(lambda cls: fake))
    return fake


def host(accelerator, buckets=12):
    return HostMemory(accelerator, BufferPool(buckets, accelerator.pinned))


def pool_of(installation):
    return entry_of(installation).backend.host.pool


class Saves(torch.autograd.Function):
    """Saves tensors, and shows what comes back in backward."""

    @staticmethod
    def forward(ctx, x, back, *tensors):
        ctx.back = back
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.back += ctx.saved_tensors
        return (gradient, None, *[None] * len(ctx.needs_input_grad[2:]))


def round_trip(accelerator, *tensors):
    """What comes back of ``tensors`` after a trip through CPU memory."""
    x = torch.ones(3, requires_grad=True)
    back: list[torch.Tensor] = []
    moving = Offload(host(accelerator))
    y = moving.run("inputs", Saves.apply, x, back, *tensors)
    moving.finish()
    y.sum().backward()
    return back


FUSED = torch.arange(120.0).view(2, 5, 12)
SAVED = {
    "contiguous": [torch.ones(4, 6)],
    "transposed": [FUSED[0].t()],
    "sliced": [FUSED[0][1:, ::2]],
    "expanded": [torch.ones(4, 1).expand(4, 6)],
    "channels last": [torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last)],
    "bfloat16": [torch.ones(7).bfloat16()],
    "integers with an offset": [torch.arange(9)[3:]],
    "booleans": [torch.arange(5) > 2],
    "complex": [torch.ones(3, 4, dtype=torch.complex64)],
    "conjugated": [torch.full((3, 4), 1j).conj()],
    "a scalar": [torch.tensor(2.5)],
    "empty": [torch.empty(0, 4)],
    "three of one": list(FUSED.chunk(3, -1)),
    "overlapping": [FUSED, FUSED[0], FUSED.view(-1)],
}


@pytest.mark.parametrize("tensors", SAVED.values(), ids=SAVED.keys())
def test_what_comes_back_is_what_was_saved(accelerator, tensors):
    back = round_trip(accelerator, *tensors)
    for before, after in zip(tensors, back, strict=True):
        assert torch.equal(before, after)
        assert (after.shape, after.stride(), after.dtype) == (
            before.shape,
            before.stride(),
            before.dtype,
        )
        assert after.storage_offset() == before.storage_offset()
    assert no_copy_is_late(accelerator)


def test_views_of_one_storage_are_moved_once(accelerator):
    back = round_trip(accelerator, *FUSED.chunk(3, -1))
    assert accelerator.stored == accelerator.restored == 1
    assert len({tensor.untyped_storage().data_ptr() for tensor in back}) == 1
    assert back[0].untyped_storage().data_ptr() != FUSED.untyped_storage().data_ptr()


def test_a_storage_that_was_written_since_is_moved_again(accelerator):
    x = torch.ones(3, requires_grad=True)
    back: list[torch.Tensor] = []
    state = torch.zeros(400)
    moving = Offload(host(accelerator))
    first = moving.run("inputs", Saves.apply, x, back, state)
    moving.finish()
    state += 1
    second = moving.run("inputs", Saves.apply, first, back, state)
    moving.finish()
    second.sum().backward()
    assert [tensor.mean().item() for tensor in back] == [1.0, 0.0]
    assert accelerator.stored == 2


def test_a_write_into_a_storage_that_is_being_moved_is_an_error(accelerator):
    state = torch.zeros(400)
    moving = Offload(host(accelerator))
    moving.run("inputs", Saves.apply, torch.ones(3, requires_grad=True), [], state)
    state += 1
    with pytest.raises(RuntimeError, match=r"shape \(400,\) that backward needs was written"):
        moving.finish()


def test_parameters_and_their_views_stay(accelerator):
    layer = torch.nn.Linear(64, 64)
    x = torch.randn(2, 64, requires_grad=True)
    moving = Offload(host(accelerator))
    y = moving.run("inputs", layer, x)
    assert accelerator.stored == 1  # x; the weight is saved as a transposed view
    y.sum().backward()


def test_only_a_few_tensors_wait_for_their_copies(accelerator):
    x = torch.ones(3, requires_grad=True)
    moving = Offload(host(accelerator))
    for _ in range(MOST_LEAVING + 3):
        x = moving.run("inputs", Saves.apply, x, [], torch.randn(300))
        assert len(moving._leaving) <= MOST_LEAVING
    done = accelerator.streams[0].done
    moving.finish()
    assert accelerator.streams[0].done > done
    assert not moving._leaving
    assert no_copy_is_late(accelerator)


def test_tensors_that_stay_where_they_are(accelerator, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST", 1024)

    class Special(torch.Tensor):
        pass

    x = torch.ones(3, requires_grad=True)
    moving = Offload(host(accelerator))
    for bytes_of_it, moved in ((1023, 0), (1024, 1)):
        x = moving.run("inputs", Saves.apply, x, [], torch.zeros(bytes_of_it, dtype=torch.uint8))
        assert accelerator.stored == moved
    moving.run("inputs", Saves.apply, x, [], torch.zeros(2000).as_subclass(Special))
    moving.run("inputs", Saves.apply, x, [], torch.zeros(2000).to_sparse())
    assert accelerator.stored == 1


def test_a_buffer_is_not_filled_again_while_it_is_read(accelerator):
    """The accelerator checks it: see ``FakeAccelerator._start``."""
    place = host(accelerator)
    first = torch.ones(300)
    for value in (first, first * 2):
        stored = Stored(place, torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()))
        stored.fetch()  # and nobody waits for it
        memory = stored.buffer.memory
        del stored
        assert place.pool.buckets[1280][0].memory is memory
    assert accelerator.pinned_sizes == [1280]


def test_the_bytes_that_a_forward_has_in_cpu_memory(accelerator):
    moving = Offload(host(accelerator, buckets=1))
    x, pinned, pageable = torch.ones(3, requires_grad=True), torch.ones(300), torch.ones(301)
    moving.run("inputs", Saves.apply, x, [], pinned, pinned[5:], pageable)
    assert (moving.cpu_bytes, moving.pinned_bytes) == (1280 + 1280, 2560)
    moving.run("inputs", Saves.apply, x, [], torch.ones(400))
    assert (moving.cpu_bytes, moving.pinned_bytes) == (2560 + 1600, 2560)  # 1792 if pinned


# The pool.


def sizes(pool):
    return {size: len(free) for size, free in pool.buckets.items()}


def test_buffers_are_used_again(accelerator):
    pool = BufferPool(2, accelerator.pinned)
    first = pool.take(100)
    pool.give(first)
    assert pool.take(99) is first  # of about the same size
    assert pool.take(100) is not first
    assert accelerator.pinned_sizes == [112, 112]


def test_sizes_beyond_the_limit_are_pageable(accelerator, caplog):
    pool = BufferPool(2, accelerator.pinned)
    assert [pool.take(n).pinned for n in (320, 224, 160, 128)] == [True, True, False, False]
    assert sizes(pool) == {320: 0, 224: 0}
    assert [record.message for record in caplog.records] == [
        "SEG611 tensors of more than 2 sizes are offloaded; those that are asked for least wait in "
        "pageable memory, which is slower (gradient_checkpointing_offload_pin_memory_max_buckets)"
    ]


def test_the_least_asked_for_bucket_gives_way(accelerator):
    """To what is asked for more than twice as much."""
    pool = BufferPool(2, accelerator.pinned)
    large, small = pool.take(320), pool.take(224)
    assert [pool.take(160).pinned for _ in range(3)] == [False, False, True]  # 480 for 224 bytes
    assert sizes(pool) == {320: 0, 160: 0}
    assert pool.pinned_bytes == 320 + 224 + 160
    pool.give(small)  # nobody asks for it any more
    pool.give(large)
    assert sizes(pool) == {320: 1, 160: 0}
    assert pool.pinned_bytes == 320 + 160
    pool.close()
    assert pool.pinned_bytes == 160  # in use


def test_what_was_asked_for_long_ago_counts_less(accelerator, monkeypatch):
    monkeypatch.setattr(buffers, "HALF_LIFE", 100)
    pool = BufferPool(1, accelerator.pinned)
    for _ in range(1000):
        pool.give(pool.take(320))
    taken = [pool.take(160).pinned for _ in range(300)]
    assert not taken[0]
    assert taken[-1]
    assert sizes(pool) == {160: 0}


def test_a_bucket_wastes_less_than_a_quarter():
    for nbytes in [*range(1, 3000), 10**9 + 1, 2**31 - 1, 2**31, 2**31 + 1]:
        size = bucket_size(nbytes)
        assert nbytes <= size < nbytes * 1.25
        assert bucket_size(size) == size
    assert len({bucket_size(nbytes) for nbytes in range(2**20 + 1, 2**21 + 1)}) == 4


ALIKE = [1000, 1007, 1015, 1022, 1030]
MANY = [1024 * 5**n // 4**n for n in range(20)]


@pytest.mark.parametrize("wanted", [ALIKE, MANY, MANY[::-1], [*MANY[10:], *MANY[:10]], [640] * 3])
@pytest.mark.parametrize("held", ["one by one", "together"])
def test_sizes_that_alternate_do_not_drive_each_other_out(accelerator, wanted, held):
    """As 30 steps ask for them: what is pinned at the end of the second stays."""
    pool = BufferPool(4, accelerator.pinned)
    pinned = []
    for _ in range(30):
        in_use = []
        for nbytes in wanted * 5:
            in_use.append(pool.take(nbytes))
            if held == "one by one":
                pool.give(in_use.pop())
        for buffer in in_use:
            pool.give(buffer)
        pinned.append(len(accelerator.pinned_sizes))
    assert pinned[1:] == [pinned[1]] * 29
    assert pool.pinned_bytes == sum(size * len(free) for size, free in pool.buckets.items())
    if wanted is ALIKE:
        assert pinned[0] == (25 if held == "together" else 2)
    else:
        assert max(pool.buckets) == bucket_size(max(wanted))  # the largest are worth it


def test_no_bucket_at_all_never_pins(accelerator):
    pool = BufferPool(0, accelerator.pinned)
    assert not pool.take(100).pinned
    assert accelerator.pinned_sizes == []


def test_a_failed_pin_falls_back_and_is_said_once(caplog):
    accelerator = FakeAccelerator(pinnable=250)
    pool = BufferPool(12, accelerator.pinned)
    taken = [pool.take(112) for _ in range(4)]
    assert [buffer.pinned for buffer in taken] == [True, True, False, False]
    assert [record.message for record in caplog.records] == [
        "SEG611 no memory can be pinned, so all that is offloaded waits in pageable memory, which "
        "is slower: cannot lock so much memory; "
        "gradient_checkpointing_offload_pin_memory_max_buckets of 0 pins none"
    ]
    for buffer in taken:
        pool.give(buffer)
    assert not pool.take(112).pinned
    assert pool.pinned_bytes == 0


# Whole models.


@pytest.mark.parametrize("name", ["flux", "wan", "sd3"])
@pytest.mark.parametrize(
    "config",
    [
        {BACKEND: "unsloth"},
        {BACKEND: "unsloth", **keys(2)},
        {BACKEND: "unsloth", **keys(2, 4, 1), **OFFLOAD},
        {BACKEND: "unsloth-ffn", **PREFETCH},
        {**keys(2, 4), **OFFLOAD, BUCKETS: 0},
        {**keys(1, 2), **PREFETCH, BUCKETS: 1},
        {**NO_RECOMPUTE, **PREFETCH},
    ],
    ids=str,
)
def test_gradients(accelerator, name, config):
    model, inputs = model_and_inputs(name)
    add_lora(model)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, config)
    for _ in range(3):
        used = accelerator.in_use
        assert step(model, inputs) == expected
    assert accelerator.stored == accelerator.restored > 0
    assert no_copy_is_late(accelerator)
    views = sum(stack.offloaded for stack in installation.effect.stacks)
    assert accelerator.in_use - used == views > 0


def test_what_a_checkpoint_call_keeps_is_moved(accelerator):
    """Segmented and block by block: one tensor for each call, and shared ones once."""
    model, inputs = model_and_inputs("wan")
    for config in (keys(2), {**keys(2), "crepa_enabled": True}):
        installation = simpletuner_segckpt.apply(model, {BACKEND: "unsloth", **config})
        step(model, inputs)
        stored = accelerator.stored
        step(model, inputs)
        calls = len(installation.effect["blocks"].segments)
        assert calls == (5 if "crepa_enabled" in config else 3)
        # hidden_states of each call; encoder_hidden_states, timestep_proj and the two rotary
        # tensors are the same ones in all of them.
        assert accelerator.stored - stored == calls + 4
        assert installation.effect["blocks"].offloaded == calls * 5


def test_a_tensor_that_several_calls_save_is_moved_once(accelerator):
    """Also where one of them is a checkpoint call, and another one an attention."""
    model, inputs = model_and_inputs("wan")

    def stored(**config):
        installation = simpletuner_segckpt.apply(model, {**keys(1, 2), **config})
        step(model, inputs)
        before = accelerator.stored
        step(model, inputs)
        installation.remove()
        return accelerator.stored - before

    together = stored(**{BACKEND: "unsloth"}, **OFFLOAD)
    shared = 3  # the text, and the two rotary tensors
    assert together == stored(**{BACKEND: "unsloth"}) + stored(**OFFLOAD) - shared


def test_the_torch_backend_moves_nothing(accelerator):
    model, inputs = model_and_inputs("wan")
    installation = simpletuner_segckpt.apply(model, keys(2, 4))
    step(model, inputs)
    assert accelerator.stored == 0
    assert installation.effect["blocks"].offloaded == 0


def test_only_attention_of_blocks_that_keep_it_is_moved(accelerator):
    model, inputs = model_and_inputs("wan")
    installation = simpletuner_segckpt.apply(model, {**keys(2, 4), **OFFLOAD})
    for _ in range(2):
        step(model, inputs)
        spans = installation.effect["blocks"].spans
        assert {b: s.tally.offloaded["attention"] > 0 for s in spans for b in s.blocks} == {
            0: False,
            1: False,
            2: True,
            3: True,
            4: False,
        }
    assert installation.report.stacks[0].offloaded == (2, 3)


def test_every_buffer_comes_back(accelerator):
    model, inputs = model_and_inputs("flux")
    installation = simpletuner_segckpt.apply(model, {BACKEND: "unsloth", **keys(2, 4), **OFFLOAD})
    for _ in range(2):
        step(model, inputs)
    pinned = list(accelerator.pinned_sizes)
    for _ in range(3):
        step(model, inputs)
        assert accelerator.pinned_sizes == pinned
        assert sum(sizes(pool_of(installation)).values()) == len(pinned)
    effect = installation.effect
    assert 0 < effect.cpu_bytes <= effect.pinned_bytes == sum(pinned)
    assert str(effect).endswith(
        f"\nin CPU memory: {readable(effect.cpu_bytes)}; pinned buffers: {readable(sum(pinned))}"
    )


def in_cpu_memory():
    return sum(type(thing) is Stored for thing in gc.get_objects())


def test_a_forward_without_backward_leaves_nothing(accelerator):
    gc.disable()
    try:
        model, inputs = model_and_inputs("flux")
        simpletuner_segckpt.apply(model, {BACKEND: "unsloth", **keys(2, 4), **PREFETCH})
        for _ in range(3):
            loss = loss_of(model(**inputs))
            assert in_cpu_memory()
            del loss
            assert not in_cpu_memory()
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing(accelerator, where):
    model, inputs = model_and_inputs("wan")
    expected = step(model, inputs)
    simpletuner_segckpt.apply(model, {BACKEND: "unsloth", **keys(2, 4), **OFFLOAD})
    step(model, inputs)

    def fail(*args):
        if where == "forward" or failing:
            raise ArithmeticError("in the middle")
        return original(*args)

    failing = False
    module = model.blocks[3].attn1.to_out[0] if where == "forward" else model.blocks[1].ffn
    original, module.forward = module.forward, fail
    if where == "forward":
        with pytest.raises(ArithmeticError):
            model(**inputs)
    else:
        loss = loss_of(model(**inputs))
        failing = True  # which the recompute meets
        with pytest.raises(ArithmeticError):
            loss.backward()
        del loss
    del module.forward
    gc.collect()
    assert not in_cpu_memory()
    assert step(model, inputs) == expected
    assert no_copy_is_late(accelerator)


def test_nothing_stays_on_the_device(accelerator):
    """After a forward what is on its way, after a backward what came back."""
    model, inputs = model_and_inputs("wan")
    simpletuner_segckpt.apply(model, {BACKEND: "unsloth", **keys(2, 4), **PREFETCH})
    step(model, inputs)
    for _ in range(2):
        loss = loss_of(model(**inputs))
        things = gc.get_objects()
        forwards = [thing for thing in things if type(thing) is Offload]
        assert any(forward._groups for forward in forwards)
        assert not any(forward._leaving for forward in forwards)
        loss.backward(retain_graph=True)
        stored = [thing for thing in gc.get_objects() if type(thing) is Stored]
        assert stored
        assert all(thing._on_device is None for thing in stored)
        del loss, things, forwards, stored


@pytest.mark.parametrize("config", [OFFLOAD, {BACKEND: "unsloth-ffn"}], ids=str)
def test_compiled_blocks_hide_what_could_be_moved(accelerator, config, caplog):
    model, inputs = model_and_inputs("wan")
    simpletuner_segckpt.apply(model, {**keys(1, 2), **config})
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    for _ in range(2):
        step(model, inputs)
    assert accelerator.stored == 0
    said = [r.message for r in caplog.records if r.name == "simpletuner_segckpt"]
    assert len(said) == 1
    assert said[0].endswith("compiled blocks hide it")
    torch._dynamo.reset()


def test_a_model_that_is_not_on_the_accelerator(accelerator, caplog):
    accelerator.device_type = "meta"
    model, inputs = model_and_inputs("wan")
    simpletuner_segckpt.apply(model, {BACKEND: "unsloth", **keys(1, 2), **OFFLOAD})
    step(model, inputs)
    assert [record.message for record in caplog.records] == [
        "SEG607 blocks: nothing of attention is in CPU memory, blocks 1 3: it saved nothing that "
        "can be moved",
        "SEG607 blocks: nothing that enters a checkpoint call is in CPU memory: none of it can be "
        "moved",
    ]


def test_what_attention_saves_is_told_from_what_feed_forwards_are_given(accelerator, caplog):
    model, inputs = model_and_inputs("wan")
    model.requires_grad_(False)
    for block in model.blocks[:2]:
        block.ffn.requires_grad_(True)
    model.blocks[2:].requires_grad_(True)
    installation = simpletuner_segckpt.apply(model, {BACKEND: "unsloth-ffn", **OFFLOAD})
    step(model, inputs)
    first = installation.effect["blocks"].spans[0].tally
    assert first.offloaded == {"inputs": 1}
    assert [record.message for record in caplog.records] == [
        "SEG607 blocks: nothing of attention is in CPU memory, blocks 0: it saved nothing that "
        "can be moved"
    ]


def test_gradient_accumulation_with_all_forwards_first(accelerator):
    model, inputs = model_and_inputs("wan")
    batches = [inputs, {**inputs, "hidden_states": inputs["hidden_states"] * 2}]

    def gradients():
        model.zero_grad()
        losses = [loss_of(model(**batch)) for batch in batches]
        for loss in losses:
            loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    simpletuner_segckpt.apply(model, {BACKEND: "unsloth", **keys(2, 4), **PREFETCH})
    for _ in range(3):
        assert all(map(torch.equal, gradients(), expected))


def test_two_models_at_once(accelerator):
    pairs = [model_and_inputs(name) for name in ("wan", "sd3")]
    expected = [step(*pair) for pair in pairs]
    config = {BACKEND: "unsloth", **keys(2, 4), **PREFETCH}
    installations = [simpletuner_segckpt.apply(model, config) for model, _ in pairs]
    for _ in range(2):
        losses = []
        for model, inputs in pairs:
            torch.manual_seed(11)
            model.zero_grad()
            losses.append(loss_of(model(**inputs)))
        for loss in losses:
            loss.backward()
        for (model, _), before in zip(pairs, expected, strict=True):
            assert all(
                torch.equal(p.grad, before.gradients[name])
                for name, p in model.named_parameters()
                if p.grad is not None
            )
    assert pool_of(installations[0]) is not pool_of(installations[1])


def test_backward_twice(accelerator):
    model, inputs = model_and_inputs("wan")
    simpletuner_segckpt.apply(model, {BACKEND: "unsloth", **keys(2, 4), **PREFETCH})
    gradients = []
    loss = loss_of(model(**inputs))
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))


def test_copies_of_a_model_have_memory_of_their_own(accelerator):
    model, inputs = model_and_inputs("wan")
    expected = step(model, inputs)
    simpletuner_segckpt.apply(model, {BACKEND: "unsloth", **keys(2, 4), **PREFETCH})
    step(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        stored = accelerator.stored
        for _ in range(2):
            assert step(other, inputs) == expected
        assert accelerator.stored > stored
        assert simpletuner_segckpt.remove(other) is None
        stored = accelerator.stored
        assert step(other, inputs) == expected
        assert accelerator.stored == stored


def test_a_forward_past_the_hooks(accelerator):
    """What is on its way is let go there, too."""
    model, inputs = model_and_inputs("wan")
    simpletuner_segckpt.apply(model, {BACKEND: "unsloth"})
    expected = step(model, inputs)
    assert step(model, inputs, run=model.forward) == expected
    loss = loss_of(model.forward(**inputs))
    forwards = [thing for thing in gc.get_objects() if type(thing) is Offload]
    assert any(forward._groups for forward in forwards)
    assert not any(forward._leaving for forward in forwards)
    loss.backward()


def test_pinned_memory_is_given_back(accelerator):
    model, inputs = model_and_inputs("wan")
    installation = simpletuner_segckpt.apply(model, {BACKEND: "unsloth"})
    loss = loss_of(model(**inputs))
    pool = pool_of(installation)
    installation.remove()
    loss.backward()
    del loss
    assert not pool.buckets
    assert not accelerator.pinned_memory


def test_threads_do_not_mix_their_tensors(accelerator):
    model, inputs = model_and_inputs("wan")
    with torch.no_grad():
        batches = [{**inputs, "hidden_states": inputs["hidden_states"] * (n + 1)} for n in range(4)]

    def losses_and_gradients(batch):
        loss = loss_of(model(**batch))
        return torch.autograd.grad(loss, [model.patch_embedding.weight])[0]

    expected = [losses_and_gradients(batch) for batch in batches]
    simpletuner_segckpt.apply(model, {BACKEND: "unsloth", **keys(2, 4), **PREFETCH})
    losses_and_gradients(inputs)
    found: dict[int, torch.Tensor] = {}

    def work(number):
        found[number] = losses_and_gradients(batches[number])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[n], expected[n]) for n in range(4))


def test_prefetch_brings_the_next_attention_while_one_is_in_use(accelerator):
    model, inputs = model_and_inputs("wan")
    expected = step(model, inputs)

    def most_at_once(config):
        """How many groups of tensors were fetched before anything waited for them."""
        installation = simpletuner_segckpt.apply(model, {**NO_RECOMPUTE, **config})
        step(model, inputs)
        order = dict(entry_of(installation).backend.order)
        waiting = []
        original = FakeAccelerator.use

        def use(self, tensor, stream):
            waiting.append(len(self.streams[-1].queue))
            original(self, tensor, stream)

        FakeAccelerator.use = use
        try:
            assert step(model, inputs) == expected
        finally:
            FakeAccelerator.use = original
        return order, max(waiting)

    order, at_once = most_at_once(OFFLOAD)
    assert (order, at_once) == ({}, 0)
    order, at_once = most_at_once(PREFETCH)
    # Blocks 4 to 0, in each the cross-attention before the self-attention.
    assert order == {n: n - 1 for n in range(9, 0, -1)}
    assert at_once > 0


def test_without_an_accelerator_it_is_said_once(caplog):
    model, inputs = model_and_inputs("wan")
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, {BACKEND: "unsloth", **keys(2)})
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == (range(0, 2), range(2, 4), range(4, 5))
    assert [record.message for record in caplog.records] == [
        "SEG304 warning: `gradient_checkpointing_backend` moves nothing: there is no accelerator, "
        "so everything is in CPU memory already"
    ]


def report_lines(name, config):
    model, _ = model_and_inputs(name)
    installation = simpletuner_segckpt.apply(model, config)
    installation.remove()
    return installation.report.lines()


def test_the_report_says_what_happens_inside_the_blocks(accelerator):
    config = {
        **keys(2, 4),
        BACKEND: "unsloth",
        "gradient_checkpointing_keep": ["attention", "ffn"],
        **OFFLOAD,
    }
    assert report_lines("wan", config)[1:] == [
        "blocks: 5 blocks, segmented",
        "  [0 1] 2 3 [4]",
        "  3 recomputed in 2 checkpoint calls, 2 run normally",
        "  their outputs of attention and ffn stay in memory and are not recomputed",
        "  the inputs of each checkpoint call wait in CPU memory",
        "  what attention saves waits in CPU memory: blocks 2 3",
    ]
    assert report_lines("wan", {BACKEND: "unsloth-ffn", **OFFLOAD, **keys(1, 2)})[1:] == [
        "blocks: 5 blocks, per-block (unsloth-ffn recomputes each feed-forward by itself)",
        "  [0] 1 [2] 3 [4]",
        "  feed-forwards (ffn) of 3 blocks recomputed, 2 run normally",
        "  the inputs of each checkpoint call wait in CPU memory",
        "  what attention saves waits in CPU memory: all blocks",
    ]


def test_the_report_promises_no_move_without_an_accelerator():
    lines = report_lines("wan", {BACKEND: "unsloth", **keys(2, 4), **OFFLOAD})
    assert lines[1:] == [
        "blocks: 5 blocks, segmented",
        "  [0 1] 2 3 [4]",
        "  3 recomputed in 2 checkpoint calls, 2 run normally",
    ]


def test_prefetch_serves_inputs_too(accelerator):
    model, inputs = model_and_inputs("wan")
    expected = step(model, inputs)
    config = {BACKEND: "unsloth", "gradient_checkpointing_offload_prefetch": True}
    installation = simpletuner_segckpt.apply(model, config)
    for _ in range(2):
        assert step(model, inputs) == expected
    assert entry_of(installation).backend.order == {4: 3, 3: 2, 2: 1, 1: 0}
