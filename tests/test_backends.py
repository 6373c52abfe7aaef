"""What runs once, what runs twice and what is kept inside the blocks, counted where it runs."""

import copy
import pickle
import warnings
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from counting import Counts, counted_parts, described, watched
from peft import LoraConfig
from simpletuner_segckpt.config_schema import CheckpointingConfig
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointError
from toys import WIDTH, WithDoor, toy
from training import REGISTRY, add_lora, family, installed, keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt.model.stacks import blocks_of
from simpletuner_segckpt.model.tiny import make_inputs, make_model
from simpletuner_segckpt.private.of_torch import inside_checkpoint
from simpletuner_segckpt.recompute import kept_operators as keep
from simpletuner_segckpt.recompute.backend import Backend, Recompute
from simpletuner_segckpt.recompute.kept_outputs import Keeping
from simpletuner_segckpt.recompute.reread import read_again
from simpletuner_segckpt.schedules.report import UNITS
from simpletuner_segckpt.schedules.tally import tallying
from simpletuner_segckpt.verify.memory import LiveBytes
from simpletuner_segckpt.verify.step import SEED, counted, loss_of, step

BACKEND = "gradient_checkpointing_backend"
KEEP = "gradient_checkpointing_keep"
OFFLOAD = "gradient_checkpointing_offload_attention"
FFN = {BACKEND: "torch-ffn"}
ATTENTIONS = ["attention", "cross-attention"]

# One family of each class.
TINY = {
    tiny.model_class.rpartition(".")[2]: (fam, tiny)
    for fam in REGISTRY
    for tiny in fam.tiny
    if installed(fam, tiny) and "ZImageControlNet" not in tiny.model_class
}


WITH_PARTS = [
    pytest.param(fam, tiny, id=name)
    for name, (fam, tiny) in TINY.items()
    if any(stack.feed_forward or stack.attention for stack in fam.stacks)
]


@pytest.mark.parametrize(("fam", "tiny"), WITH_PARTS)
def test_what_runs_twice_inside_the_blocks(fam, tiny):
    """Only feed-forwards with `torch-ffn`; with `keep` all but what is kept."""
    model, inputs = make_model(tiny).train(), make_inputs(tiny)
    installation = simpletuner_segckpt.apply(model, {}, family=fam)
    stacks = described(fam, installation.report)
    installation.remove()
    expected, counts, calls = watched(model, inputs, stacks)
    if any(stack.feed_forward for _, stack in stacks):
        installation = simpletuner_segckpt.apply(model, {**FFN, **keys(2, 3)}, family=fam)
        check_feed_forwards(fam, model, inputs, stacks, installation, expected, calls)
        installation.remove()
    if any(stack.attention for _, stack in stacks):
        kept = [
            *ATTENTIONS,
            *(["ffn"] if any(stack.projections for stack in fam.stacks) else []),
        ]
        installation = simpletuner_segckpt.apply(model, {**keys(2), KEEP: kept}, family=fam)
        segmented = installation.report.strategy == "segmented"
        for _ in range(2 if segmented else 1):  # the second time in segments
            check_kept(kept, model, inputs, stacks, installation, expected, counts, calls)


def check_feed_forwards(fam, model, inputs, stacks, installation, expected, once):
    with counted(model, [path for path, _ in stacks]) as block_calls:
        got, _, calls = watched(model, inputs, stacks)
    assert got == expected
    for planned in installation.report.stacks:
        if planned.path == UNITS:
            continue
        separable = fam.stack_at(planned.path).feed_forward
        assert planned.covered == (
            tuple(b for b in range(planned.blocks) if b % 3 < 2) if separable else ()
        )
        assert set(block_calls[planned.path].values()) == {1}
        for block in range(planned.blocks):
            key = (planned.path, block, "attention")
            assert calls[key] == once[key]
            key = (planned.path, block, "feed_forward")
            again = calls[key] - once[key]
            ran = installation.effect[planned.path].spans[block].tally.feed_forwards
            assert ran == (once[key] if block in planned.covered else 0)
            # The text half of a last block leads nowhere, so nothing needs it again.
            unused = block == planned.blocks - 1 and again == ran - 1
            assert again == ran or unused
    assert sum(calls.values()) > sum(once.values())


def check_kept(kept, model, inputs, stacks, installation, expected, once, calls_once):
    with counted(model, [path for path, _ in stacks]) as block_calls:
        got, counts, calls = watched(model, inputs, stacks)
    assert got == expected
    assert counts.attention == once.attention
    for path, stack in stacks:
        assert set(block_calls[path].values()) == {2}
        for index in range(len(blocks_of(model, path))):
            for kind in ("attention", "feed_forward") if stack.feed_forward else ("attention",):
                key = (path, index, kind)
                assert calls[key] == 2 * calls_once[key]
    if "ffn" in kept:
        assert counts.down == once.down > 0
        effects = [installation.effect[path] for path, stack in stacks if stack.projections]
        assert all(effect.kept["ffn"] > 0 for effect in effects)
    inside = [stack.kept for stack in installation.effect.stacks if stack.path != UNITS]
    kept_outputs = sum(each["attention"] + each["cross-attention"] for each in inside)
    assert 0 < kept_outputs <= once.attention


# The whole matrix: bit-equal gradients, or a refusal that says why.

SCHEDULES = {"1": keys(1), "2": keys(2), "2/4": keys(2, 4)}
KEPT = [[], ["attention"], ["ffn"], ["attention", "ffn"]]
BACKENDS = ["torch", "torch-ffn", "unsloth", "unsloth-ffn"]


@pytest.mark.parametrize(
    ("name", "kept"),
    [*(("flux", kept) for kept in KEPT), ("wan", [*ATTENTIONS, "ffn"]), ("sd3", KEPT[3])],
    ids=str,
)
def test_matrix(name, kept):
    """Every combination of keys is planned; of those that run alike on this machine, one runs."""
    model, inputs = model_and_inputs(name)
    add_lora(model)
    expected = step(model, inputs)
    ran = set()
    for backend, offload, schedule, keep_last, condition in product(
        BACKENDS, [False, True], SCHEDULES.values(), [0, 1], [{}, {"crepa_enabled": True}]
    ):
        config = {
            **schedule,
            **condition,
            BACKEND: backend,
            KEEP: kept,
            OFFLOAD: offload,
            "gradient_checkpointing_keep_last": keep_last,
        }
        whole = not backend.endswith("-ffn")
        if kept and not whole:
            with pytest.raises(simpletuner_segckpt.ConfigError, match="SEG305 error"):
                simpletuner_segckpt.apply(model, config)
            continue
        installation = simpletuner_segckpt.apply(model, config)
        report = installation.report
        segmented = schedule["gradient_checkpointing_interval"] > 1 and not condition and whole
        assert (report.strategy == "segmented") == segmented
        planned = tuple(replace(stack, reason="") for stack in report.stacks)
        if planned not in ran:
            ran.add(planned)
            check_plan(model, inputs, expected, installation)
        installation.remove()
    # With and without keep_last: interval 1, 2 and 2 with stride 4, the last also block by block.
    # And of feed-forwards every one and half of them; Flux's last block has none.
    assert len(ran) == 8 + (0 if kept else 2 if name == "flux" else 4)


def check_plan(model, inputs, expected, installation):
    for _ in range(2):
        assert step(model, inputs) == expected
    for planned in installation.report.stacks:
        effect = installation.effect[planned.path]
        assert set(effect.kept) == (set(planned.kept) if planned.covered else set())
        assert (effect.feed_forwards > 0) == bool(planned.feed_forward)
        assert effect.covered == planned.covered


# Each in more depth.


def test_bytes_that_are_kept():
    """An attention's output and log-sum-exp, and what the down-projection gives; nothing else."""
    model, inputs = model_and_inputs("wan")

    def kept(**config):
        installation = simpletuner_segckpt.apply(model, config)
        with LiveBytes() as live:
            output = model(**inputs)
        installation.remove()
        total = live.total
        del output
        assert not live.total
        return total

    tokens, width, heads, blocks, fp32 = 64, 32, 2, 5, 4
    layer = kept()
    attention = tokens * (width + heads) * fp32 * blocks  # its output and its log-sum-exp
    assert kept(**{KEEP: "attention"}) == layer + attention
    assert kept(**{KEEP: "cross-attention"}) == layer + attention
    assert kept(**{KEEP: ATTENTIONS}) == layer + 2 * attention
    projections = tokens * width * fp32 * blocks
    assert kept(**{KEEP: ["attention", "ffn"]}) == layer + attention + projections


def test_several_feed_forwards_in_a_block():
    model, inputs = model_and_inputs("flux")
    installation = simpletuner_segckpt.apply(model, FFN)
    step(model, inputs)
    double, single = installation.report.stacks
    assert (double.strategy, double.feed_forward) == ("per-block", ("ff", "ff_context"))
    assert (single.strategy, single.reason) == (
        "off",
        "its blocks have no feed-forward of their own",
    )
    assert installation.effect["transformer_blocks"].feed_forwards == 10
    assert "10 feed-forwards recomputed" in str(installation.effect)


@pytest.mark.parametrize("name", ["prx", "sd1x"])
@pytest.mark.parametrize("backend", ["torch-ffn", "unsloth-ffn"])
def test_a_family_without_a_feed_forward_is_refused(tmp_path, name, backend):
    model, inputs = model_and_inputs(name)
    before = step(model, inputs)
    path = tmp_path / "config.json"
    path.write_text(f'{{"model_family": "{name}",\n "{BACKEND}": "{backend}"}}')
    whole = backend.removesuffix("-ffn")
    message = (
        rf"config\.json:2:2: SEG402 error: `{BACKEND}` is {backend}, but no feed-forward is "
        rf"known in the blocks of {type(model).__name__}; write {whole}$"
    )
    with pytest.raises(simpletuner_segckpt.ConfigError, match=message):
        simpletuner_segckpt.apply(model, path)
    assert not model._forward_pre_hooks
    assert step(model, inputs) == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FFN, "is torch-ffn, but no family describes WithDoor; write torch, or a family file"),
        ({KEEP: "ffn"}, "names ffn, but no family describes WithDoor; leave it out, or a family"),
        ({OFFLOAD: True}, "is true, but no family describes WithDoor; write false, or a family"),
    ],
)
def test_a_model_that_nobody_described_has_no_parts(config, message):
    model, _ = toy(WithDoor)
    with pytest.raises(simpletuner_segckpt.ConfigError, match=message):
        simpletuner_segckpt.apply(model, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FFN, "is torch-ffn, but no feed-forward is known in the blocks of UNet2DCond"),
        (
            {KEEP: "ffn"},
            "names ffn, but no feed-forward is known in the blocks of UNet2DCond",
        ),
        (
            {OFFLOAD: True, **keys(1, 2)},
            "is true, but no attention is known in the blocks of UNet2DCond",
        ),
    ],
)
def test_a_model_that_has_none_of_the_stacks_with_parts(config, message):
    """A class that several families share, found without the trainer naming one."""
    model, _ = model_and_inputs("sd1x")
    with pytest.raises(simpletuner_segckpt.ConfigError, match=message):
        simpletuner_segckpt.apply(model, config)


def test_checkpointing_that_is_off_by_a_condition_asks_for_nothing(caplog):
    model, inputs = model_and_inputs("prx")
    off = {"fsdp_enable": True, "fsdp_activation_checkpointing": True}
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, {**FFN, OFFLOAD: True, **off})
    assert step(model, inputs) == expected
    assert installation.report.strategy == "off"


def test_attention_can_be_kept_in_a_model_that_nobody_described():
    model, inputs = model_and_inputs("sd3")
    expected = step(model, inputs)
    registry = simpletuner_segckpt.FamilyRegistry()
    installation = simpletuner_segckpt.apply(
        model, {**keys(2), KEEP: "attention"}, registry=registry
    )
    for _ in range(2):
        assert step(model, inputs) == expected
        assert installation.effect["transformer_blocks"].kept == {"attention": 7}
    assert installation.effect["transformer_blocks"].strategy == "segmented"


def test_every_checkpoint_call_is_non_reentrant(monkeypatch):
    calls = []
    original = torch.utils.checkpoint.checkpoint

    def spy(*args, **kwargs):
        calls.append(kwargs["use_reentrant"])
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", spy)
    for name in ("flux", "wan", "ltxvideo2"):
        model, inputs = model_and_inputs(name)
        for backend in BACKENDS:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                installation = simpletuner_segckpt.apply(model, {BACKEND: backend})
                step(model, inputs)
                installation.remove()
    assert calls
    assert set(calls) == {False}


# Attention that can be skipped in the recompute, and attention that cannot.


@pytest.mark.parametrize(
    ("operator", "is_one"),
    [
        (torch.ops.aten._scaled_dot_product_flash_attention.default, True),
        (torch.ops.aten._scaled_dot_product_efficient_attention.default, True),
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, True),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, True),
        (torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default, True),
        (torch.ops.aten._flash_attention_forward.default, True),
        (torch.ops.aten._efficient_attention_forward.default, True),
        (torch.ops.higher_order.flex_attention, True),
        (torch.ops.aten._scaled_dot_product_flash_attention_backward.default, False),
        (torch.ops.aten._flash_attention_backward.default, False),
        (torch.ops.higher_order.flex_attention_backward, False),
        (torch.ops.aten.mm.default, False),
        (torch.ops.aten._softmax.default, False),
    ],
    ids=str,
)
def test_attention_operators(operator, is_one):
    assert keep.is_attention(operator) == is_one


@pytest.mark.parametrize(
    ("query", "key", "kind"),
    [
        ((1, 4, 16, 8), (1, 4, 16, 8), "attention"),
        ((1, 4, 16, 8), (1, 2, 16, 8), "attention"),  # several heads share their keys
        ((1, 4, 16, 8), (1, 4, 24, 8), "attention"),  # of a longer sequence, so not cheap
        ((1, 4, 16, 8), (1, 4, 7, 8), "cross-attention"),
    ],
)
def test_keys_of_a_shorter_sequence(query, key, kind):
    """In whatever order an operator takes heads and sequence, by position or by name."""
    q, k = torch.empty(query), torch.empty(key)
    first = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert keep.kind_of(first, (q, k, k), {}) == kind
    assert keep.kind_of(first, (q,), {"key": k, "value": k}) == kind
    assert keep.kind_of(torch.ops.higher_order.flex_attention, (q, k, k), {}) == kind
    third = torch.ops.aten._efficient_attention_forward.default
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    assert keep.kind_of(third, (q, k, k), {}) == kind


def test_every_fused_attention_of_torch_is_known():
    forward = {
        name
        for name in dir(torch.ops.aten)
        if name.startswith("_scaled_dot_product_") and "backward" not in name
    }
    assert len(forward) >= 6
    for name in forward:
        packet = getattr(torch.ops.aten, name)
        assert all(keep.is_attention(getattr(packet, o)) for o in packet.overloads())


def test_the_math_kernel_is_recomputed_and_that_is_said_once(caplog):
    model, inputs = model_and_inputs("wan")
    with sdpa_kernel(SDPBackend.MATH):
        expected = step(model, inputs)
        installation = simpletuner_segckpt.apply(model, {**keys(2), KEEP: "attention"})
        for _ in range(3):
            assert step(model, inputs) == expected
    assert not installation.effect["blocks"].kept
    assert [record.message for record in caplog.records] == [
        "SEG607 blocks: keep: nothing of attention is kept in blocks 0 1 2 3 4: they ran no "
        "fused attention without dropout, which alone can be kept"
    ]


def test_units_that_can_keep_nothing(caplog):
    model, inputs = model_and_inputs("sd1x")
    with sdpa_kernel(SDPBackend.MATH):
        simpletuner_segckpt.apply(model, {KEEP: "attention"})
        for _ in range(2):
            step(model, inputs)
    assert len(caplog.records) == 1
    said = caplog.records[0].message
    assert said.startswith("SEG607 units: keep: nothing of attention is kept in")
    simpletuner_segckpt.remove(model)
    caplog.clear()
    installation = simpletuner_segckpt.apply(model, {KEEP: "attention"}, family="sd1x")
    step(model, inputs)
    # Where the image is longer than the text, attention to the text is another word.
    assert installation.effect["units"].kept == {"attention": 11}
    assert not caplog.records


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_kernels_and_autocast(kernel, autocast):
    model, inputs = model_and_inputs("sd3")
    add_lora(model)
    config = {**keys(2), KEEP: ["attention", "ffn"]}
    with sdpa_kernel(kernel):
        expected = step(model, inputs, autocast)
        installation = simpletuner_segckpt.apply(model, config)
        for _ in range(2):
            assert step(model, inputs, autocast) == expected
    kept = installation.effect["transformer_blocks"].kept
    assert (kept["attention"] > 0) == (kernel is SDPBackend.FLASH_ATTENTION)
    assert kept["ffn"] == 9


def test_flex_attention_is_kept():
    """Its operator of a higher order, which torch can run on a CPU, though not differentiate."""
    q, other = torch.randn(2, 1, 2, 16, 8)
    forward, again = Keeping(["attention"]).contexts(())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is slow without a compiler, and says so
        with forward, tallying() as tally:
            first = flex_attention(q, q, q)
        with again:
            second = flex_attention(other, q, q)
    assert tally.kept == {"attention": 1}
    assert torch.equal(first, second)


LIBRARY = torch.library.Library("segckpt_flash_attn", "DEF")
LIBRARY.define("forward(Tensor q, float dropout_p) -> (Tensor, Tensor)")
LIBRARY.define("named_otherwise(Tensor q, float p) -> (Tensor, Tensor)")
LIBRARY.define("forward_into(Tensor q, Tensor(a!)? out) -> Tensor")
RUNS: Counter[str] = Counter()


def _forward(q, dropout_p):
    RUNS["forward"] += 1
    return torch.nn.functional.dropout(q, dropout_p) * 2, q.sum(-1)


def _forward_into(q, out):
    RUNS["forward_into"] += 1
    if out is not None:
        out.copy_(q)
    return q * 2


LIBRARY.impl("forward", _forward, "CPU")
LIBRARY.impl("named_otherwise", _forward, "CPU")
LIBRARY.impl("forward_into", _forward_into, "CPU")


class RegisteredAttention(torch.autograd.Function):
    """As the libraries of fused attentions call their operators."""

    @staticmethod
    def forward(ctx, q, how):
        if how == "plain" or "dropout" in how:
            ops = torch.ops.segckpt_flash_attn
            run = ops.named_otherwise if how == "dropout called p" else ops.forward
            out, ctx.lse = run(q, 0.0 if how == "plain" else 0.5)
        else:
            buffer = torch.empty_like(q) if how == "into a buffer" else None
            out = torch.ops.segckpt_flash_attn.forward_into(q, buffer)
        ctx.save_for_backward(q, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, out = ctx.saved_tensors
        return gradient * (out + q), None


class AttendingBlock(nn.Module):
    how = "plain"

    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Dropout(0.3)

    def forward(self, hidden_states, temb):
        attended = RegisteredAttention.apply(self.to_q(hidden_states), self.how)
        return hidden_states + torch.sin(self.after(attended)) * temb


@pytest.mark.parametrize(
    ("how", "runs", "kept"),
    [
        ("plain", 1, 6),
        ("dropout", 2, 0),  # later random numbers would differ if it were skipped
        ("dropout called p", 2, 0),
        ("without a buffer", 1, 6),
        ("into a buffer", 2, 0),  # the buffer would stay as it was
    ],
)
def test_registered_attention_operators(how, runs, kept):
    model, inputs = toy(WithDoor)
    model.blocks = nn.ModuleList(AttendingBlock() for _ in range(6))
    for block in model.blocks:
        block.how = how
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, {**keys(2), KEEP: "attention"})
    for _ in range(2):  # in the first one each segment is tried out, too
        RUNS.clear()
        assert step(model, inputs) == expected
        assert installation.effect["blocks"].kept["attention"] == kept
    assert sum(RUNS.values()) == 6 * runs


# Beside everything else.


def test_switched_off_for_validation():
    model, inputs = model_and_inputs("wan")
    stacks = [("blocks", family("wan").stack_at("blocks"))]
    _, _, once = watched(model, inputs, stacks)
    simpletuner_segckpt.apply(model, FFN)
    model.disable_gradient_checkpointing()
    assert watched(model, inputs, stacks)[2] == once
    model.enable_gradient_checkpointing()
    _, _, calls = watched(model, inputs, stacks)
    assert calls[("blocks", 0, "feed_forward")] == 2
    counts = Counts()
    with torch.no_grad(), counted_parts(model, stacks, counts) as calls:
        model(**inputs)
    assert set(calls.values()) == {1, 2}  # feed-forward, and two attentions
    assert calls[("blocks", 0, "feed_forward")] == 1


@pytest.mark.parametrize("config", [FFN, {KEEP: ["attention", "ffn"], **keys(2)}], ids=str)
def test_removal_and_copies(config):
    model, inputs = model_and_inputs("flux")
    expected = step(model, inputs)
    classes = [type(module) for module in model.modules()]
    names = list(model.state_dict())
    installation = simpletuner_segckpt.apply(model, config)
    step(model, inputs)
    assert list(model.state_dict()) == names
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        stacks = [("transformer_blocks", family("flux").stacks[0])]
        for _ in range(2):
            got, _, calls = watched(other, inputs, stacks)
            assert got == expected
        assert calls[("transformer_blocks", 0, "feed_forward")] == 4
        simpletuner_segckpt.remove(other)
        assert [type(module) for module in other.modules()] == classes
    installation.remove()
    assert [type(module) for module in model.modules()] == classes
    assert not any("_segckpt_receiver" in module.__dict__ for module in model.modules())
    assert step(model, inputs) == expected


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("config", "inside"),
    [(FFN, ((10, 0), (0, 0))), ({KEEP: ["attention", "ffn"], **keys(2)}, ((0, 15), (0, 10)))],
    ids=["torch-ffn", "keep"],
)
def test_lora_on_the_parts_before_and_after(config, inside, before):
    """The down-projection of each feed-forward, and LoRA's own down to its rank."""
    lora = LoraConfig(r=4, lora_dropout=0.2, target_modules=["ff.net.2", "proj_out", "to_out.0"])

    def model():
        made, inputs = model_and_inputs("flux")
        if before:
            made.add_adapter(lora)
        return made, inputs

    reference, inputs = model()
    if not before:
        reference.add_adapter(lora)
    torch.manual_seed(3)
    for name, parameter in reference.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    expected = step(reference, inputs)
    trained, _ = model()
    installation = simpletuner_segckpt.apply(trained, config)
    if not before:
        trained.add_adapter(lora)
    trained.load_state_dict(reference.state_dict())
    for _ in range(2):
        assert step(trained, inputs) == expected
    stacks = installation.effect.stacks
    assert tuple((stack.feed_forwards, stack.kept["ffn"]) for stack in stacks) == inside
    installation.remove()
    assert not any("_segckpt_receiver" in module.__dict__ for module in trained.modules())


class Around(nn.Module):
    """What an adapter or a compiler puts in the place of a part."""

    def __init__(self, original):
        super().__init__()
        self.original = original

    def forward(self, *args, **kwargs):
        return self.original(*args, **kwargs)


@pytest.mark.parametrize("how", ["wrapped", "replaced", "compiled", "modules_to_save"])
@pytest.mark.parametrize("config", [FFN, {KEEP: "ffn"}], ids=str)
def test_parts_that_change_after_a_step(how, config):
    model, inputs = model_and_inputs("wan")
    installation = simpletuner_segckpt.apply(model, config)
    step(model, inputs)
    if how == "modules_to_save":
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["ffn"]))
    for block in model.blocks:
        if how == "wrapped":
            block.ffn = Around(block.ffn)
        elif how == "replaced":
            block.ffn = copy.deepcopy(block.ffn)
        elif how == "compiled":
            block.ffn = torch.compile(block.ffn, backend="eager")
    simpletuner_segckpt.remove(other := copy.deepcopy(model))
    expected = step(other, inputs)
    assert step(model, inputs) == expected
    effect = installation.effect["blocks"]
    assert (effect.feed_forwards, effect.kept["ffn"]) == ((5, 0) if config is FFN else (0, 5))
    installation.remove()
    assert not any("_segckpt_receiver" in module.__dict__ for module in model.modules())
    torch._dynamo.reset()


def test_what_is_said_of_blocks_that_differ(caplog):
    """Only some are compiled, or do not call their feed-forward."""
    model, inputs = model_and_inputs("wan")

    class Identity(nn.Module):
        def forward(self, x):
            return x

    model.blocks[2].ffn = nn.Sequential(Identity())
    model.blocks[0].compile(backend="eager")
    simpletuner_segckpt.apply(model, {KEEP: ["attention", "ffn"]})
    with sdpa_kernel(SDPBackend.MATH):
        step(model, inputs)
    said = [r.message for r in caplog.records if r.name == "simpletuner_segckpt"]
    assert said == [
        "SEG607 blocks: keep: nothing of attention is kept in blocks 0 1 2 3 4: they ran no "
        "fused attention without dropout, which alone can be kept",
        "SEG607 blocks: keep: nothing of ffn is kept in blocks 0 2: they ran no projection of a "
        "feed-forward that comes down from a greater width, or one of quantised weights by an "
        "operator of another library",
    ]
    torch._dynamo.reset()


@pytest.mark.parametrize("config", [{}, {KEEP: ["attention", "ffn"]}, FFN], ids=str)
def test_a_lora_scale_in_the_recompute(config):
    model, inputs = model_and_inputs("flux")
    add_lora(model)
    inputs["joint_attention_kwargs"] = {"scale": 0.3}
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, {**keys(2), **config})
    for _ in range(2):
        assert step(model, inputs) == expected
    assert sum(stack.feed_forwards for stack in installation.effect.stacks) == (config is FFN) * 10
    assert step(model, inputs, run=model.forward) == expected  # past the hooks


@pytest.mark.parametrize(
    "config",
    [{}, FFN, {BACKEND: "unsloth"}, {KEEP: "attention"}, {KEEP: ["attention", "ffn"]}],
    ids=str,
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_two_backwards_of_one_forward(config, scale):
    model, inputs = model_and_inputs("flux")
    add_lora(model)
    if scale:
        inputs["joint_attention_kwargs"] = {"scale": scale}
    expected = step(model, inputs).gradients
    simpletuner_segckpt.apply(model, {**keys(2), **config})
    for _ in range(2):
        torch.manual_seed(SEED)
        loss = loss_of(model(**inputs))
        for _ in range(2):
            model.zero_grad()
            loss.backward(retain_graph=True)
            assert all(
                torch.equal(p.grad, expected[name])
                for name, p in model.named_parameters()
                if p.grad is not None
            )


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.sin())
        return x.cos()

    @staticmethod
    def backward(ctx, grad):
        [first] = ctx.saved_tensors
        [second] = ctx.saved_tensors
        return -grad * (first + second) / 2


def test_a_backward_that_reads_twice_what_it_saved():
    """As diffusers' ring attention does; each of two backwards recomputes once."""
    runs = []

    def block(x):
        runs.append(inside_checkpoint())
        return ReadsTwice.apply(x * x) + x

    x = torch.linspace(0, 1, 5, requires_grad=True)
    [expected] = torch.autograd.grad(block(x).sum(), x)
    with pytest.raises(CheckpointError, match="already unpacked once"):
        Recompute()(block, x).sum().backward()
    runs.clear()
    backend = Backend(CheckpointingConfig(), None)
    loss = backend.begin((read_again,)).covered()(block, x).sum()
    for _ in range(2):
        [found] = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(found, expected)
    assert runs == [True] * 3


def test_what_is_kept_serves_one_backward():
    """Another one recomputes it: here the norm of a gradient weighs the loss."""
    model, inputs = model_and_inputs("wan")
    last = model.blocks[-1].ffn.net[2].weight

    def gradients():
        model.zero_grad()
        loss = loss_of(model(**inputs))
        (gradient,) = torch.autograd.grad(loss, last, retain_graph=True)
        (loss * gradient.norm().detach()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    simpletuner_segckpt.apply(model, {**keys(2), KEEP: [*ATTENTIONS, "ffn"]})
    for _ in range(2):
        counts = Counts()
        with counts:
            assert all(map(torch.equal, gradients(), expected))
        # Ten in forward; those of the last segment again in the second backward.
        assert counts.attention in (10 + 2, 10 + 4)


def test_what_is_kept_must_not_be_written():
    class InPlace(nn.Linear):
        def forward(self, x):
            return super().forward(x).mul_(1.5)

    model, inputs = model_and_inputs("wan")
    for block in model.blocks:
        old = block.ffn.net[2]
        block.ffn.net[2] = InPlace(old.in_features, old.out_features)
    simpletuner_segckpt.apply(model, {KEEP: "ffn"})
    with pytest.raises(RuntimeError, match="was written in place after it was kept"):
        step(model, inputs)


def test_frozen_parts_are_not_recomputed():
    model, inputs = model_and_inputs("wan")
    model.requires_grad_(False)
    model.proj_out.requires_grad_(True)
    stacks = [("blocks", family("wan").stack_at("blocks"))]
    expected, _, once = watched(model, inputs, stacks)
    for config in (FFN, {KEEP: ["attention", "ffn"]}):
        installation = simpletuner_segckpt.apply(model, config)
        got, _, calls = watched(model, inputs, stacks)
        assert got == expected
        assert calls == once
        installation.remove()


# What is said beforehand.


@pytest.mark.parametrize(
    ("name", "config", "messages"),
    [
        (
            "wan",
            {OFFLOAD: True},
            ["SEG304 warning: `gradient_checkpointing_offload_attention` has no"],
        ),
        ("wan", {OFFLOAD: True, **keys(1, 2)}, []),
        ("wan", {OFFLOAD: True, **FFN}, []),
        (
            "flux",
            FFN,
            [
                "SEG402 warning: `gradient_checkpointing_backend` is torch-ffn: the blocks of "
                "single_transformer_blocks have no feed-forward of their own and run normally"
            ],
        ),
        ("flux", {KEEP: "ffn"}, []),
    ],
)
def test_findings_about_a_model(name, config, messages, caplog):
    model, _ = model_and_inputs(name)
    simpletuner_segckpt.apply(model, config)
    said = [r.message for r in caplog.records if "no accelerator" not in r.message]
    assert len(said) == len(messages)
    for text, message in zip(said, messages, strict=True):
        assert text.startswith(message)


# Compiled.


class Graphs:
    """A compiler that runs what it is given, and counts what it sees."""

    def __init__(self):
        self.forward: list[Counter[str]] = []
        self.backward: list[Counter[str]] = []

    def backend(self):
        def compiler(graphs):
            def compile_one(graph, _):
                targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
                counts = {
                    "gelu": sum("gelu" in t and "backward" not in t for t in targets),
                    "attention": sum("attention" in t and "backward" not in t for t in targets),
                    "addmm": sum("addmm" in t for t in targets),
                }
                graphs.append(Counter(counts))
                return graph

            return compile_one

        return aot_autograd(
            fw_compiler=compiler(self.forward),
            bw_compiler=compiler(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def close(step, other):
    """Compiled kernels round differently, about as much as they do without the plugin."""
    return step.gradients.keys() == other.gradients.keys() and all(
        torch.allclose(step.gradients[n], other.gradients[n], rtol=1e-4, atol=1e-6)
        for n in step.gradients
        if step.gradients[n] is not None
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", ["apply", "compile"])
def test_feed_forwards_in_compiled_blocks(graphs, first):
    model, inputs = model_and_inputs("wan")
    expected = step(model, inputs)
    if first == "compile":
        model.compile_repeated_blocks(backend=graphs.backend(), fullgraph=True)
    simpletuner_segckpt.apply(model, {**FFN, **keys(1, 2)})
    if first == "apply":
        model.compile_repeated_blocks(backend=graphs.backend(), fullgraph=True)
    for _ in range(3):
        assert close(step(model, inputs), expected)
    # One graph for covered blocks, whose feed-forward (two products, one gelu) runs in the
    # backward as well, and one for the gaps.
    assert [g["gelu"] for g in graphs.forward] == [1, 1]
    assert sorted(g["gelu"] for g in graphs.backward) == [0, 1]
    assert sorted(g["attention"] for g in graphs.backward) == [0, 0]
    model.disable_gradient_checkpointing()
    assert close(step(model, inputs), expected)
    assert graphs.backward[-1]["gelu"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("first", ["apply", "compile"])
def test_keep_in_compiled_blocks(graphs, first, caplog):
    model, inputs = model_and_inputs("wan")
    expected = step(model, inputs)
    if first == "compile":
        model.compile_repeated_blocks(backend=graphs.backend(), fullgraph=True)
    kept = [*ATTENTIONS, "ffn"]
    installation = simpletuner_segckpt.apply(model, {**keys(2), KEEP: kept})
    if first == "apply":
        model.compile_repeated_blocks(backend=graphs.backend(), fullgraph=True)
    for _ in range(3):
        counts = Counts()
        with counts:
            got = step(model, inputs)
        assert close(got, expected)
        assert counts.attention == 10  # of five blocks, none of them again
    assert installation.effect["blocks"].kept == dict.fromkeys(ATTENTIONS, 5)
    ours = (r.message for r in caplog.records if r.name == "simpletuner_segckpt")
    assert list(ours) == [
        "SEG607 blocks: keep: nothing of ffn is kept in blocks 0 1 2 3 4: compiled blocks hide "
        "their operators"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "config", "past_the_hooks"),
    [
        ("blocks", {}, True),
        ("blocks", keys(2), False),
        ("their forwards", keys(2), False),
        ("their forwards", keys(2), True),
        ("their attentions", keys(2), False),
    ],
    ids=str,
)
def test_memory_that_compiled_code_uses_again(config, how, past_the_hooks):
    """Where backward needs nothing of an attention, inductor writes over its output unseen."""
    torch._dynamo.reset()

    class Reusing(torch.fx.Interpreter):
        """When it is done, nothing is left of attentions that it does not return."""

        def run(self, *args):
            self.attended: list[torch.Tensor] = []
            results = super().run(*args)
            returned = {r.untyped_storage() for r in results if isinstance(r, torch.Tensor)}
            for tensor in self.attended:
                if tensor.untyped_storage() not in returned:
                    tensor.numpy()[...] = float("nan")
            return results

        def run_node(self, node):
            result = super().run_node(node)
            if "attention" in str(node.target) and "backward" not in str(node.target):
                self.attended += result
            return result

    def compile_one(graph, _):
        return make_boxed_func(Reusing(graph).run)

    model, inputs = model_and_inputs("wan")
    model.requires_grad_(False)
    for block in model.blocks:
        block.ffn.requires_grad_(True)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, {**config, KEEP: ATTENTIONS})
    backend = aot_autograd(
        fw_compiler=compile_one, partition_fn=min_cut_rematerialization_partition
    )
    if how == "blocks":
        model.compile_repeated_blocks(backend=backend, fullgraph=True)
    for block in model.blocks:
        if how == "their forwards":
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
        elif how == "their attentions":
            block.attn1.processor = torch.compile(block.attn1.processor, backend=backend)
    for _ in range(2):
        run = model.forward if past_the_hooks else None
        assert close(step(model, inputs, run=run), expected)
    if not past_the_hooks:
        assert installation.effect["blocks"].kept == dict.fromkeys(ATTENTIONS, 5)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "again"),
    [
        ({}, {"gelu": 2, "attention": 0, "addmm": 20}),
        (FFN, {"gelu": 2, "attention": 0, "addmm": 4}),
        ({KEEP: ATTENTIONS}, {"gelu": 2, "attention": 0, "addmm": 20}),
        ({KEEP: [*ATTENTIONS, "ffn"]}, {"gelu": 2, "attention": 0, "addmm": 18}),
    ],
    ids=str,
)
def test_a_model_compiled_as_a_whole(graphs, config, again):
    model, inputs = model_and_inputs("wan", num_layers=2)
    expected = step(model, inputs)
    simpletuner_segckpt.apply(model, config)
    compiled = torch.compile(model, backend=graphs.backend(), fullgraph=True)
    for _ in range(2):
        assert close(step(model, inputs, run=compiled), expected)
    (forward,), (backward,) = graphs.forward, graphs.backward
    assert backward == Counter(again)
    # Attention that is to run again has its random state saved, under another name.
    kept_or_never_again = bool(config)
    assert forward["attention"] == (4 if kept_or_never_again else 0)
