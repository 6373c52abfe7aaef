"""Every family's step for the estimator: it runs at real width and resolution, without memory."""

from importlib.resources import files

import pytest
import torch
from torch.utils import _pytree as pytree
from training import skip_before

from simpletuner_segckpt.estimator.profile import fake_tensors as fakes
from simpletuner_segckpt.estimator.profile.cuda import CudaSemantics
from simpletuner_segckpt.estimator.profile.known_values import KnownValues
from simpletuner_segckpt.estimator.profile.profile import profile
from simpletuner_segckpt.estimator.workload import build as building
from simpletuner_segckpt.estimator.workload import shapes
from simpletuner_segckpt.estimator.workload.workload import Workload
from simpletuner_segckpt.families.registry import read_family
from simpletuner_segckpt.families.schema import matches
from simpletuner_segckpt.messages.errors import FamilyError, WorkloadError

BLOCKS = {
    "consisid": 2,  # adds faces after every second block
    "hidream": 64,  # all: the model names a text layer for each block
    "wan_animate": 5,  # a face adapter belongs to every 5th block
}
PER_LEVEL = {
    "transformer_layers_per_block",
    "down_num_layers_per_block",
    "up_num_layers_per_block",
}
BATCH = 2
FAMILIES = {
    path.stem: read_family(path)
    for path in sorted(files("simpletuner_segckpt.model_families").iterdir())
    if path.suffix == ".toml"
}
TRAINED = {name: family for name, family in FAMILIES.items() if family.training}


VALUES_ASKED = {
    "hunyuanvideo": "whether the image is zero",
    "qwen_image_21": "how often a mask of its own repeats a token",
}


def few_blocks(family, config, most):
    """``config`` with at most so many blocks in each stack."""
    whole = building.full_config(family.classes[0], config)
    fewer = {}
    for key in {stack.count for stack in family.stacks} & set(whole):
        value = whole[key]
        if isinstance(value, (list, tuple)):  # the indices of blocks
            fewer[key] = [index for index in value if index < most]
        else:
            fewer[key] = min(value, most)
    for key in PER_LEVEL & set(config):
        counts = config[key]
        fewer[key] = (
            min(counts, most) if isinstance(counts, int) else [min(c, most) for c in counts]
        )
    return dict(config) | fewer


def tail(path, target):
    """Whether ``target`` names the end of ``path``."""
    return matches(target, ".".join(path.split(".")[-len(target.split(".")) :]))


SIZES = [
    (name, size)
    for name, family in TRAINED.items()
    for size in (family.sizes or (None,))
    if name not in VALUES_ASKED
]


def step_of(name, size, blocks=2):
    """A training step of two samples on the first few blocks of a published size."""
    family = TRAINED[name]
    training = family.training
    width, height = training.resolution
    return Workload(
        family=family,
        model_class=family.classes[0],
        config=few_blocks(family, family.config_of_size(size), BLOCKS.get(name, blocks)),
        batch=BATCH,
        width=width,
        height=height,
        frames=training.frames,
        targets=training.targets,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, _ in SIZES}))
def test_a_forward_of_every_family(name):
    """Of its first size; benchmarks/sweep has whole steps, of every size."""
    work = step_of(name, next(size for of, size in SIZES if of == name), blocks=1)
    targets = work.family.training.targets
    with fakes.without_memory(), KnownValues(work.family.training.experts):
        model = building.build(work)
        outputs = forward_of(model, work)
    assert adapted(model, targets) == set(targets)
    assert any(output.shape[0] == BATCH for output in outputs) or len(outputs) == BATCH


def forward_of(model, work):
    """What of its output needs a gradient."""
    with CudaSemantics(torch.bfloat16):
        result = model(**building.inputs(work))
    leaves = pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def adapted(model, targets):
    """The targets that name a layer with an adapter."""
    paths = [path for path, module in model.named_modules() if hasattr(module, "lora_A")]
    return {target for target in targets if any(tail(path, target) for path in paths)}


@pytest.mark.parametrize("name", VALUES_ASKED)
def test_a_model_that_asks_for_numbers(name):
    """It says so, in a sentence."""
    family = TRAINED[name]
    skip_before(family)
    config = few_blocks(family, family.config_of_size(family.size(None)), 2)
    work = Workload(family, family.classes[0], config, targets=family.training.targets)
    with pytest.raises(WorkloadError, match="cannot be estimated: .*numbers in its"):
        profile(work)


WORDS = {"batch": 2, "frames": 3, "height": 4, "width": 6, "text": 5, "channels": 16}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (7, 7),
        ("7", 7),
        ("channels", 16),
        ("text + height * width / 4", 11),
        ("frames * (height - 1)", 9),
        ("height * width / 5", 4),  # rounded down
        ("(frames * 8 - 7) * 25 / 24", 17),
    ],
)
def test_a_number(expression, value):
    assert shapes.number(expression, WORDS) == value


@pytest.mark.parametrize(("switch", "expected"), [(0, None), (1, {"shape": [2], "fill": 1})])
def test_an_argument_that_hangs_on_a_switch(switch, expected):
    spec = {"shape": ["batch"], "fill": 1, "when": "guidance"}
    assert shapes.resolved(spec, WORDS | {"guidance": switch}) == expected


@pytest.mark.parametrize(
    "expression", ["depth", "text +", "text ** 2", "text.bit_length()", "2.5", "", "text / 0"]
)
def test_what_is_no_number(expression):
    with pytest.raises(FamilyError) as error:
        shapes.number(expression, WORDS)
    assert repr(expression) in str(error.value)


def test_specs_in_terms_of_the_words():
    row = [1, 1, 0, 0, 0]
    assert shapes.resolved(
        {
            "latents": {"shape": ["batch", "channels", "height / 2", 8], "fill": 0.5},
            "lengths": {"shape": ["batch"], "dtype": "int64", "fill": "text"},
            "mask": {"shape": ["batch", "text"], "ones": 2},
            "places": {"shape": ["batch", "text"], "dtype": "int64", "zeros": "text - 3"},
            "captions": {"each": {"shape": ["text", 3]}},
            "grids": {"each": [[1, {"value": "height / 2"}]]},
            "nested": {"sizes": {"shape": ["batch", 2]}},
            "return_dict": False,
            "nothing": {},
        },
        WORDS,
    ) == {
        "latents": {"shape": [2, 16, 2, 8], "fill": 0.5},
        "lengths": {"shape": [2], "dtype": "int64", "fill": 5},
        "mask": {"values": [row, row], "dtype": "bool"},
        "places": {"values": [[0, 0, 1, 1, 1]] * 2, "dtype": "int64"},
        "captions": [{"shape": [5, 3]}] * 2,
        "grids": [[[1, 2]]] * 2,
        "nested": {"sizes": {"shape": [2, 2]}},
        "return_dict": False,
        "nothing": {},
    }
