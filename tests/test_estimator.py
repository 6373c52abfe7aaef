"""The estimator: operators as on CUDA, exact bytes, and composing against whole steps."""

import gc
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, fake_tensor
from torch.nn import functional
from workloads import profiled, workload

from simpletuner_segckpt.config.settings import load_settings
from simpletuner_segckpt.costs.ledger import Ledger
from simpletuner_segckpt.costs.records import Work
from simpletuner_segckpt.estimator.predict.modes import planned
from simpletuner_segckpt.estimator.predict.peak import compose, spans_of
from simpletuner_segckpt.estimator.profile import cuda
from simpletuner_segckpt.estimator.profile import fake_tensors as fakes
from simpletuner_segckpt.estimator.profile.cuda import CudaSemantics
from simpletuner_segckpt.estimator.profile.known_values import KnownValues
from simpletuner_segckpt.estimator.profile.profile import profile, with_weights
from simpletuner_segckpt.estimator.profile.recorder import loss_of
from simpletuner_segckpt.estimator.profile.records import Profile
from simpletuner_segckpt.estimator.profile.trace import trace
from simpletuner_segckpt.estimator.workload import build as building
from simpletuner_segckpt.verify.memory import SavedBytes

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def keys(**values):
    names = {f"gradient_checkpointing_{name}": value for name, value in values.items()}
    return {key.removesuffix("_switch"): value for key, value in names.items()}


NONE = keys(switch=False)
LAYER = keys()
INTERVAL2 = keys(interval=2)
STRIDE = keys(interval=2, segment_stride=4)
ATTENTION = keys(keep="attention")
BOTH = keys(keep=["attention", "ffn"])
LAST = keys(keep_last=5)
MIXED = keys(interval=3, segment_stride=5, keep_last=2, keep=["attention", "ffn"])
FFN = keys(backend="torch-ffn")
UNSLOTH = keys(interval=2, backend="unsloth")
OFFLOAD = keys(interval=2, segment_stride=4, offload_attention=True)


def composed(found, family, config):
    report = planned(found, family, load_settings(config))
    return compose(found, spans_of(found, report.stacks))


FFN_OFFLOAD = keys(backend="unsloth-ffn", offload_attention=True)
FOUR = {"num_layers": 4, "num_single_layers": 4}
WAN = {"width": 480, "height": 480, "config": {"num_layers": 5}}
KREA = {"fused_qkv": True, "width": 512, "height": 512, "config": {"num_layers": 4}}

# Real widths, and the few blocks that are harder to get right than many; benchmarks/sweep has
# models at full depth. Each way of running a block on one model or more.
PAIRS = [
    ("wan", None, WAN, [UNSLOTH, OFFLOAD, FFN_OFFLOAD, ATTENTION]),
    ("flux", "dev", {"batch": 4, "config": FOUR}, [INTERVAL2, MIXED]),
    ("krea2", None, KREA, [LAST]),
]


@pytest.mark.parametrize(
    ("name", "flavour", "changes", "configs"),
    PAIRS,
    ids=[f"{name}-{at}" for at, (name, *_) in enumerate(PAIRS)],
)
def test_composing_is_the_whole_step(name, flavour, changes, configs):
    work = workload(name, flavour, **changes)
    found = profile(work)
    static = found.weights + found.states  # which both have from the same place
    for config in configs:
        peak, traced = composed(found, work.family, config).peak, trace(work, config)
        assert peak == pytest.approx(traced, rel=0.005), config
        assert peak - static == pytest.approx(traced - static, rel=0.01), config


def test_the_parts_of_a_peak_add_up():
    found, family = profiled("lumina2"), workload("lumina2").family
    for config in (NONE, LAYER, STRIDE, BOTH, FFN):
        step = composed(found, family, config)
        parts = (step.weights, step.gradients, step.states, step.kept, step.working)
        assert sum(parts) == step.peak
        assert min(parts) >= 0


def test_what_a_segment_recomputes_is_no_part_of_what_is_kept():
    found, family = profiled("lumina2"), workload("lumina2").family
    kept = {
        name: composed(found, family, config).kept
        for name, config in (("layer", LAYER), ("wide", INTERVAL2), ("stride", STRIDE))
    }
    assert kept["wide"] < kept["layer"] < kept["stride"]


def test_recompute_is_the_forward_of_what_is_covered():
    found, family = profiled("lumina2"), workload("lumina2").family
    none, layer = composed(found, family, NONE), composed(found, family, LAYER)
    stride, last = composed(found, family, STRIDE), composed(found, family, LAST)
    assert none.recomputed == Work()
    assert none.calls == 0
    assert layer.calls == 26
    assert stride.calls == 7
    each = layer.recomputed.flops / 26
    assert stride.recomputed.flops == pytest.approx(14 * each)
    assert last.recomputed.flops == pytest.approx(21 * each)
    assert replace(layer.forward, kernels=0) == replace(none.forward, kernels=0)
    exact = torch.__version__ >= "2.13"  # with 2.11 checkpointing takes 2% more of them
    assert layer.forward.kernels == pytest.approx(none.forward.kernels, rel=0 if exact else 0.02)
    assert layer.backward.flops == pytest.approx(none.backward.flops + layer.recomputed.flops)


def test_kept_operators_are_not_recomputed():
    found, family = profiled("lumina2"), workload("lumina2").family
    layer, kept = composed(found, family, LAYER), composed(found, family, ATTENTION)
    assert layer.recomputed.attention > 0
    assert kept.recomputed.attention == 0
    assert kept.recomputed.products == layer.recomputed.products
    # One output for each block: batch 1, 4,096 image and 16 text tokens, 2,304 wide, bf16; and
    # what the operator saves beside it, a float32 for each token and head.
    output = (4096 + 16) * 2304 * 2
    assert 26 * output < kept.kept - layer.kept < 26 * (output + 4 * 24 * 4300 + KIB)


def test_known_flops():
    """A block of Wan 1.3B: 2 x tokens x weights, and attention to the video and to the text."""
    found = profiled("wan", "1.3b", width=544, height=416)
    tokens, text, width = 21 * 34 * 26, 512, 1536
    attention = 4 * tokens * width * (tokens + text)
    plain = found.kinds[found.blocks[5].kind].run("plain").forward
    assert plain.attention == attention
    on_tokens = 2 * tokens * (6 * width**2 + 2 * width * 8960)
    on_text = 2 * text * 2 * width**2
    lora = 2 * 16 * 2 * width * (6 * tokens + 2 * text)
    assert plain.products == on_tokens + on_text + lora


def weighed(work):
    """What is in memory during a whole step, without a step."""
    empty = Profile((), {}, (), (), weights=0, trained=0, states=0)
    with fakes.without_memory():
        return with_weights(empty, building.build(work), work)


def test_weights_of_the_real_model():
    work = workload("wan", "t2v-480p-14b-2.1")
    found = weighed(work)
    trained = 40 * 8 * 2 * 16 * 5120  # rank 16 on four projections of two attentions
    assert found.trained == trained * 2
    assert found.states == trained * 6
    assert 14.2e9 < (found.weights - 2 * trained) / 2 < 14.4e9
    half = weighed(replace(work, base_bytes=1.0))
    # Those that are loaded in float32 lose three quarters.
    assert found.weights - half.weights == pytest.approx(found.linear / 2, rel=0.003)


def test_weights_in_cpu_memory_are_not_counted():
    streamed = weighed(workload("wan", "1.3b", weights_on_cpu=True))
    assert streamed.linear == 0
    assert streamed.weights < 0.1 * GIB


def test_a_fake_step_is_a_real_step():
    """The same bytes with memory and without: on the tiny model, with the operators of a CPU."""
    work = replace(
        workload("wan", width=64, height=64, frames=5, text=16, rank=4, dropout=0.1),
        config=workload("wan").family.tiny[0].config,
    )

    def peak():
        model, arguments = building.build(work), building.inputs(work)
        with Ledger() as ledger:
            loss = loss_of(model(**arguments))
            loss.backward()
        return ledger.peak, ledger.work.flops

    real = peak()
    with fakes.without_memory():
        assert peak() == real


# -- operators as on CUDA -------------------------------------------------------------------


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the lists are those of torch 2.13")
def test_autocast_has_the_lists_of_the_installed_torch():
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text("utf-8")

    def listed(name):
        body = text.split(f"#define AT_FORALL_{name}(_)", 1)[1].split("\n\n", 1)[0]
        return set(re.findall(r"_\((\w+)", body))

    assert listed("LOWER_PRECISION_FP") >= cuda.LOWER
    assert cuda.FLOAT32 - {"norm"} <= listed("FP32")
    assert listed("FP32_SET_OPT_DTYPE") >= cuda.FLOAT32_RESULT
    # What is left out cannot be in a forward of these models, or has another name in Python.
    assert (
        listed("LOWER_PRECISION_FP") - cuda.LOWER
        == {
            *("_convolution", "convolution", "conv_tbc", "linalg_vecdot", "linalg_multi_dot"),
            *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell"),
            *("rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention"),
            "conv_transpose3d",
        }
        - cuda.LOWER
    )


def saved_by(function, *shapes, autocast=torch.bfloat16, dtype=torch.bfloat16):
    with fakes.without_memory(), CudaSemantics(autocast):
        tensors = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        seen = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            seen[storage] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = function(*tensors)
        fakes.backward([result.float().sum()])
        assert all(tensor.grad is not None for tensor in tensors)
        return sum(seen.values()), result


HEADS = (2, 8, 1000, 64)
ONE = 2 * 8 * 1000 * 64 * 2


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        # query, key, value, output, and a float32 for each row; three numbers for the random state
        (functional.scaled_dot_product_attention, [HEADS] * 3, 4 * ONE + 2 * 8 * 1000 * 4 + 24),
        # the input in float32, mean and reciprocal deviation of each row
        (lambda x: functional.layer_norm(x, (64,)), [HEADS], 2 * ONE + 2 * 2 * 8 * 1000 * 4),
        (lambda x: functional.rms_norm(x, (64,)), [HEADS], 2 * ONE + 2 * 8 * 1000 * 4),
        # a byte for each element
        (lambda x: functional.dropout(x, 0.1), [HEADS], ONE // 2),
        (lambda x: functional.dropout(x, 0.0), [HEADS], 0),
        (functional.gelu, [HEADS], ONE),
        (lambda x: x.softmax(-1), [HEADS], 2 * ONE),
        (lambda x: x**2, [HEADS], 2 * ONE),
        (lambda x: x.sum(), [HEADS], 0),
    ],
    ids="attention layer_norm rms_norm dropout no-dropout gelu softmax power sum".split(),
)
def test_what_operators_save(function, shapes, expected):
    assert saved_by(function, *shapes)[0] == expected


def test_attention_with_a_mask():
    mask = torch.zeros(2, 1, 1, 1000, dtype=torch.bool)
    saved, result = saved_by(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        *[HEADS] * 3,
    )
    assert result.shape == HEADS
    padded = 2 * 1008 * 2  # rows of the mask begin at multiples of 16 elements
    row = 4 * 2 * 8 * 1024  # and those of the sums at multiples of 32
    assert abs(saved - 4 * ONE - padded - row) <= 24


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_queries(masked):
    mask = torch.ones(2, 1, 1000, 1000, dtype=torch.bool) if masked else None
    few = (2, 2, 1000, 64)
    saved, result = saved_by(
        lambda q, k, v: functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True
        ),
        HEADS,
        few,
        few,
    )
    assert result.shape == HEADS
    assert saved >= 2 * ONE + 2 * ONE // 4


def test_autocast_casts_as_cuda_does():
    linear = nn.Linear(64, 64)
    with fakes.without_memory(), CudaSemantics(torch.bfloat16):
        x = torch.empty(4, 64)
        assert functional.linear(x, torch.empty(8, 64)).dtype is torch.bfloat16
        assert (x.bfloat16() @ x.T).dtype is torch.bfloat16
        assert functional.layer_norm(x.bfloat16(), (64,)).dtype is torch.float32
        assert x.bfloat16().softmax(-1).dtype is torch.float32
        assert x.bfloat16().softmax(-1, dtype=torch.bfloat16).dtype is torch.bfloat16
        assert x.bfloat16().sum().dtype is torch.float32
        assert x.bfloat16().mean().dtype is torch.bfloat16
        assert x.bfloat16().pow(2).dtype is torch.float32
    with CudaSemantics(None):
        assert linear(torch.empty(4, 64)).dtype is torch.float32


def test_a_ledger_counts_what_is_alive():
    ledger = Ledger()
    with ledger:
        first = torch.empty(1000)
        view = first[:10]
        assert ledger.level == 4096
        second = first + 1
        assert ledger.level == 2 * 4096
        second += 1
        assert ledger.level == 2 * 4096
        del first
        assert ledger.level == 2 * 4096
        del view
        assert ledger.level == 4096
        del second
        assert ledger.level == 0
    assert ledger.peak == 2 * 4096
    ledger.mark()
    assert (ledger.peak, ledger.work) == (0, Work())


def test_a_ledger_counts_work():
    ledger = Ledger()
    with ledger:
        left, right = torch.empty(10, 20), torch.empty(20, 30)
        ledger.mark()
        (left @ right).view(300)
        left.expand(5, 10, 20) + 1
    assert ledger.work.products == 2 * 10 * 20 * 30
    assert ledger.work.traffic == 4 * (200 + 1000)  # what is expanded is read once
    assert ledger.work.kernels == 2


def test_saved_bytes_agree_with_real_tensors():
    """A block that has the same operators on a CPU: what autograd saves is what is kept."""
    layer = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    x = torch.randn(16, 32)
    with SavedBytes(layer) as saved:
        layer(x)
    with fakes.without_memory(), Ledger() as ledger:
        fake = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        start = torch.empty(16, 32)
        before = ledger.level
        result = fake(start)
        node = result.grad_fn
        del result
        kept = ledger.level - before
    assert node is not None
    assert saved.total == kept + 16 * 32 * 4


def test_numbers_that_can_be_known():
    with fakes.without_memory(), KnownValues(experts=4):
        assert torch.ones(3, dtype=torch.int64).tolist() == [1, 1, 1]
        assert torch.arange(4).tolist() == [0, 1, 2, 3]
        assert torch.zeros(2, 2, dtype=torch.bool).tolist() == [[False, False]] * 2
        tokens = torch.empty(100, 8)
        chosen = torch.empty(100).argmax() == torch.empty(100, dtype=torch.int64)
        assert tokens[chosen].shape == (25, 8)
        tokens[chosen] = torch.empty(25, 8)


# Other threads.


def restored():
    """What ``without_memory`` changes for the whole process, or for a thread."""
    return nn.Module._apply, gc.isenabled(), fake_tensor.CONSTANT_NUMEL_LIMIT, type(torch.ones(1))


def test_another_thread_has_memory_meanwhile():
    before = restored()
    entered, done = threading.Event(), threading.Event()
    types = []

    def estimate():
        with fakes.without_memory():
            layer = nn.Linear(2, 2)
            entered.set()
            done.wait(60)
            types.append(type(layer.double().weight.data))

    thread = threading.Thread(target=estimate)
    thread.start()
    assert entered.wait(60)
    layer = nn.Linear(3, 3)
    parameters = list(layer.parameters())
    layer.double()
    assert all(now is then for now, then in zip(layer.parameters(), parameters, strict=True))
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float64}
    layer(torch.ones(3, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0] * 3] * 3
    assert type(torch.ones(4)) is torch.Tensor
    assert torch.ones(4).data_ptr() != 0
    done.set()
    thread.join(60)
    assert types == [FakeTensor]
    assert restored() == before


def test_two_threads_without_memory():
    before = restored()
    start = threading.Barrier(2)
    inside, most, types = [], [], []

    def estimate():
        start.wait(60)
        for _ in range(20):
            with fakes.without_memory():
                inside.append(1)
                most.append(len(inside))
                types.append(type(nn.Linear(2, 2).double().weight.data))
                inside.pop()

    threads = [threading.Thread(target=estimate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert types == [FakeTensor] * 40
    assert set(most) == {1}  # one after the other
    assert restored() == before
