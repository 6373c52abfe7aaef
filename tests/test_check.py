"""`check`, `families` and `probe`: anyone can prove a family, and sees what drifted."""

import inspect
import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import diffusers
import pytest
from toys import TOY_FAMILY, Collects, Doorless, WithDoor, toy
from training import REGISTRY, family, keys, model_and_inputs

import simpletuner_segckpt
from simpletuner_segckpt import FamilyRegistry, probe
from simpletuner_segckpt.commands import check as check_module
from simpletuner_segckpt.commands import families
from simpletuner_segckpt.commands.families import document
from simpletuner_segckpt.families.schema import ArgumentCondition
from simpletuner_segckpt.model.tiny import make_inputs, make_model
from simpletuner_segckpt.verify.families import check_family, check_tiny
from simpletuner_segckpt.verify.step import step

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["flux", "sdxl", "controlnet_flux", "auraflow"])
def test_families_that_hold(name):
    [check] = check_family(family(name))
    assert check.details == []
    verdict = "per-block" if name == "controlnet_flux" else "segmented"
    assert check.verdict == verdict


def test_a_class_that_is_not_installed():
    [check] = check_family(family("mageflow"))
    assert (check.verdict, check.details) == ("not installed", ["described from facts, not proven"])
    flux = family("flux")
    gone = flux.tiny[0].model_copy(update={"model_class": "diffusers.GoneTransformer2DModel"})
    check = check_tiny(flux, gone)
    assert check.verdict == "not installed"
    assert "GoneTransformer2DModel" in check.details[0]
    for needs, found in (
        ("no_such_package", ["needs no_such_package"]),
        ("diffusers<0.1", ["needs diffusers<0.1"]),
        ("diffusers>=0.1", []),
    ):
        needy = flux.tiny[0].model_copy(update={"needs": (needs,)})
        assert check_tiny(flux, needy).details == found


def test_what_a_later_diffusers_brought_is_no_drift():
    flux = family("flux")
    later = flux.model_copy(update={"since": "999.0"})
    gone = flux.tiny[0].model_copy(update={"model_class": "diffusers.GoneTransformer2DModel"})
    [said] = check_tiny(later, gone).details
    assert said == (
        f"diffusers {diffusers.__version__} has no GoneTransformer2DModel, which came with 999.0"
    )
    for since, verdict in (("", "drifted"), ("0.1", "drifted"), ("999.0", "segmented")):
        argument = ArgumentCondition(argument="gone", reason="it is", since=since)
        conditions = (*flux.conditions, argument)
        check = check_tiny(flux.model_copy(update={"conditions": conditions}), flux.tiny[0])
        assert check.verdict == verdict


@pytest.fixture
def changed_wan(monkeypatch):
    """The Wan family, for a copy of diffusers' module in which some text is replaced."""

    def make(*replacements):
        source = inspect.getsource(import_module("diffusers.models.transformers.transformer_wan"))
        for old, new in replacements:
            assert old in source, old
            source = source.replace(old, new)
        module = ModuleType("diffusers.models.transformers.changed_wan")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, "changed_wan.py", "exec"), module.__dict__)
        wan = family("wan")
        path = f"{module.__name__}.WanTransformer3DModel"
        tiny = wan.tiny[0].model_copy(update={"model_class": path})
        return wan.model_copy(update={"classes": (path,), "tiny": (tiny,)})

    return make


LOOP = "block, hidden_states, encoder_hidden_states, timestep_proj, rotary_emb\n                )\n"


def test_a_copy_without_changes_holds(changed_wan):
    [check] = check_family(changed_wan())
    assert (check.verdict, check.details) == ("segmented", [])


CHANGES = [
    # An operation between two blocks.
    ([(LOOP, LOOP + "                hidden_states = hidden_states * 1.0\n")], "mul"),
    # A block's argument with another name.
    (
        [
            (
                "        hidden_states: torch.Tensor,\n"
                "        encoder_hidden_states: torch.Tensor,\n"
                "        temb: torch.Tensor,\n",
                "        tokens: torch.Tensor,\n"
                "        encoder_hidden_states: torch.Tensor,\n"
                "        temb: torch.Tensor,\n",
            ),
            ("if temb.ndim == 4:", "hidden_states = tokens\n        if temb.ndim == 4:"),
        ],
        "`tokens`",
    ),
    # A list, a class and a submodule with other names.
    ([("self.blocks", "self.layers")], "there is no list `blocks`"),
    ([("WanTransformerBlock", "WanLayer")], "holds WanLayer, not WanTransformerBlock"),
    ([("self.ffn", "self.mlp")], "have no `ffn`"),
    # A configuration that no longer works.
    ([("        ffn_dim: int", "        feed_forward_dim: int")], "does not run"),
]


@pytest.mark.parametrize(("replacements", "named"), CHANGES)
def test_what_drifted_is_named(changed_wan, replacements, named):
    changed = changed_wan(*replacements)
    [check] = check_family(changed)
    assert check.verdict == "drifted"
    assert any(named in detail for detail in check.details), check.details


def test_apply_on_a_loop_that_drifted_runs_per_block_and_says_why(changed_wan, caplog):
    replacements, named = CHANGES[0]
    effect = trained_on(changed_wan(*replacements))
    assert effect.strategy == "per-block"
    assert named in effect.reason
    assert named in caplog.text


def test_what_was_seen_counts_where_the_file_is_wrong(changed_wan, caplog):
    replacements, named = CHANGES[1]
    effect = trained_on(changed_wan(*replacements))
    assert effect.segments == (range(0, 2), range(2, 4), range(4, 5))
    assert caplog.text.count(f"SEG615 blocks: {named} (from 0) is carried") == 1


def trained_on(changed):
    """What the third step did, all of them equal to one without checkpointing."""
    model, inputs = make_model(changed.tiny[0]).train(), make_inputs(changed.tiny[0])
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, keys(2), registry=FamilyRegistry([changed]))
    for _ in range(3):
        assert step(model, inputs) == expected
    return installation.effect["blocks"]


def test_the_command(capsys):
    assert check_module.main(["flux", "controlnet_flux", "mageflow"]) == 0
    out = capsys.readouterr().out
    assert "classes: 2 proven, 0 drifted, 1 not proven here" in out
    assert check_module.main(["fluxx"]) == 2
    assert check_module.main([]) == 2
    assert "name families, or pass --all" in capsys.readouterr().err


def test_a_drift_is_exit_code_1(monkeypatch, changed_wan, capsys):
    changed = changed_wan(("self.blocks", "self.layers"))
    monkeypatch.setattr(FamilyRegistry, "default", lambda folders=(): FamilyRegistry([changed]))
    assert check_module.main(["--all"]) == 1
    assert "drifted" in capsys.readouterr().out


def test_a_family_of_ones_own(tmp_path, capsys):
    """One TOML file, no code: for `check`, as for `validate` and `apply` (test_registry)."""
    tiny = """
[[tiny]]
class = "toys.WithDoor"
[tiny.inputs]
hidden_states = { shape = [2, 5, 8] }
temb = { shape = [2, 1, 8] }
"""
    (tmp_path / "toy.toml").write_text(TOY_FAMILY + tiny)
    assert check_module.main(["toy", "--families", str(tmp_path)]) == 0
    assert "classes: 1 proven, 0 drifted" in capsys.readouterr().out


# The matrix.

MATRIX = """
    ace_step anima auraflow boogu_image chroma cosmos cosmos3 deepfloyd ernie flux flux2
    flux3_image heartmula hidream hunyuan_video hunyuanvideo ideogram infinitetalk
    kandinsky5_image kandinsky5_video kolors krea2 longcat_image longcat_video ltxvideo ltxvideo2
    lumina2 mageflow minimaxh3 minimaxmusic moss_image omnigen pixart qwen_image sana sanavideo
    sd1x sd3 sdxl stable_cascade wan wan_animate wan_s2v z_image z_image_omni zlab_i1
"""


def test_every_family_of_the_matrix_has_a_file():
    assert set(MATRIX.split()) <= set(REGISTRY.names())
    assert len([f for f in REGISTRY if f.family in ("ace_step", "qwen_image")]) == 4
    for described in REGISTRY:
        assert described.stacks or described.units
        assert described.classes
        if described.tiny:
            assert {tiny.model_class for tiny in described.tiny} == set(described.classes)
            assert described.sizes


def test_at_least_60_classes_can_be_proven_here():
    assert len({t.model_class for f in REGISTRY for t in f.tiny if not t.needs}) >= 60


def test_docs_are_current():
    text = (ROOT / "docs" / "families.md").read_text("utf-8")
    shipped = FamilyRegistry.shipped()
    assert text == document(shipped), "run segckpt families --markdown > docs/families.md"
    assert "todo" not in text.lower()


def test_the_families_command(capsys):
    assert families.main(["chroma"]) == 0
    page = capsys.readouterr().out
    assert "one by one: temb is the block's own slice" in page
    assert families.main([]) == 0
    assert "Flux.1" in capsys.readouterr().out
    assert families.main(["fluxx"]) == 2
    assert families.main(["--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# Model families\n")


# Probing.


@pytest.mark.parametrize("name", ["flux", "sd3", "ltxvideo2", "z_image", "wan", "controlnet_flux"])
def test_a_probe_finds_what_the_file_says(name):
    described = family(name)
    model, inputs = model_and_inputs(name)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    found = probe(model, inputs)
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    expected = [stack for stack in described.stacks if not stack.optional]
    assert [(s.path, s.block) for s in found.stacks] == [(s.path, s.block) for s in expected]
    for mine, theirs in zip(found.stacks, expected, strict=True):
        assert bool(mine.per_block) == bool(theirs.per_block)
        if not theirs.per_block:
            assert mine.sources == theirs.sources


def test_a_probe_names_the_key_that_counts():
    model, inputs = model_and_inputs("flux", num_layers=6, num_single_layers=7)
    counts = {stack.path: stack.count for stack in probe(model, inputs).stacks}
    assert counts == {
        "transformer_blocks": "num_layers",
        "single_transformer_blocks": "num_single_layers",
    }


def test_a_probed_file_is_a_family_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from toys import WithDoor, toy\ndef make():\n    return toy(WithDoor)\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    probe_main = import_module("simpletuner_segckpt.commands.probe").main
    assert probe_main(["mine:make"]) == 0
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "toy.toml").write_text(capsys.readouterr().out)
    registry = FamilyRegistry()
    registry.add_folder(folder)
    [found] = registry
    assert found.classes == ("toys.WithDoor",)
    assert found.stacks[0].count == "depth"
    assert found.stacks[0].sources == {"hidden_states": 0}
    for bad in ("mine:gone", "gone:make", "mine", "mine:number"):
        assert probe_main([bad]) == 2
        assert "segckpt probe: " in capsys.readouterr().err


@pytest.mark.parametrize("kind", [Doorless, WithDoor])
def test_a_probe_of_toys(kind):
    [stack] = probe(*toy(kind)).stacks
    assert (stack.path, stack.per_block, stack.cut) == ("blocks", "", "")
    [stack] = probe(*toy(Collects)).stacks
    assert "the model uses the output of block 0" in stack.per_block


def test_json_of_a_config_with_blocks_per_stack(tmp_path, capsys):
    """A UNet's stacks and units in `validate`, from its published size."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_family": "sdxl"} | keys(2, 4, keep_last=1)))
    main = import_module("simpletuner_segckpt.commands.validate").main
    assert main([str(config), "--output-format", "json"]) == 0
    [document_] = json.loads(capsys.readouterr().out)["files"]
    stacks = {stack["path"]: stack for stack in document_["report"]["stacks"]}
    assert len(stacks) == 12
    assert stacks["mid_block.attentions.0.transformer_blocks"]["blocks"] == 10
    assert stacks["units"]["strategy"] == "per-block"
    assert stacks["units"]["gap"][-1] == stacks["units"]["blocks"] - 1


SOURCES = """
import torch
from torch import nn
from toys import Block, WithDoor, toy
from transformers import LlamaConfig, LlamaForCausalLM


def raises():
    raise RuntimeError("no data")


def bad_shapes():
    model, inputs = toy(WithDoor)
    return model, inputs | {"temb": torch.ones(3, 3, 3)}


def frozen():
    model, inputs = toy(WithDoor)
    return model.requires_grad_(False), inputs


def no_tensors():
    class Silent(WithDoor):
        def forward(self, hidden_states, temb):
            return None

    return toy(Silent)


def llama():
    config = LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=6,
                         num_attention_heads=2, intermediate_size=32)
    return LlamaForCausalLM(config), {"input_ids": torch.ones(1, 4, dtype=torch.long)}
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    (tmp_path / "sources.py").write_text(SOURCES)
    (tmp_path / "broken.py").write_text("raise KeyError('broken')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("sources", None)


@pytest.mark.parametrize(
    "source",
    ["sources:raises", "sources:bad_shapes", "sources:frozen", "sources:no_tensors", "broken:x"],
)
def test_probing_what_does_not_work_is_one_line(sources, source, capsys):
    assert import_module("simpletuner_segckpt.commands.probe").main([source]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"segckpt probe: {source}: ")
    assert "Traceback" not in err


def test_probing_a_transformers_model(sources, capsys):
    assert import_module("simpletuner_segckpt.commands.probe").main(["sources:llama"]) == 0
    out = capsys.readouterr().out
    assert 'path = "model.layers"' in out
    assert 'count = "num_hidden_layers"' in out


@pytest.mark.parametrize("path", ["Nodots", ".rel.X", "broken.X", "sources.Gone"])
def test_classes_that_cannot_be_imported_are_not_installed(sources, path):
    flux = family("flux")
    tiny = flux.tiny[0].model_copy(update={"model_class": path})
    assert check_tiny(flux, tiny).verdict == "not installed"
    needy = flux.tiny[0].model_copy(update={"needs": ("no_package.inside",)})
    assert check_tiny(flux, needy).verdict == "not installed"
