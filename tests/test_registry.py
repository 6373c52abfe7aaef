"""Where families come from, and a family of one's own without any code."""

import json
import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType

import pytest
from toys import TOY_FAMILY, WithDoor, toy
from training import family, keys

import simpletuner_segckpt
from simpletuner_segckpt import Family, FamilyError, FamilyRegistry, UnknownFamily
from simpletuner_segckpt.commands.validate import main
from simpletuner_segckpt.families import registry as registry_module
from simpletuner_segckpt.verify.step import step

CONDITION = """
[[conditions]]
argument = "extra"
reason = "an extra is added after each block"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "toy.toml").write_text(TOY_FAMILY + CONDITION)
    return tmp_path / "families"


def test_a_folder_of_ones_own_in_validate_and_apply(folder, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_family": "Play_Thing"} | keys(2, 4)))
    assert main([str(config), "--families", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "[0 1] 2 3 [4 5] 6 7 [8]" in out
    assert "family toy" in out
    registry = FamilyRegistry()
    registry.add_folder(folder)
    model, inputs = toy(WithDoor)
    expected = step(model, inputs)
    installation = simpletuner_segckpt.apply(model, config, registry=registry)
    assert installation.report.family == "toy"
    for _ in range(2):
        assert step(model, inputs) == expected
    assert installation.effect["blocks"].segments == (range(0, 2), range(4, 6))


def test_a_family_given_by_name_or_as_an_object(folder):
    [described] = registry_module.read_folder(folder)
    model, _ = toy(WithDoor)
    for given in ("toy", described):
        registry = FamilyRegistry([described])
        report = simpletuner_segckpt.apply(model, keys(2), registry=registry, family=given).report
        assert report.family == "toy"


def test_an_unknown_model_is_probed_and_that_is_said(caplog):
    model, _ = toy(WithDoor)
    report = simpletuner_segckpt.apply(model, keys(2), registry=FamilyRegistry()).report
    assert report.family is None
    assert [stack.path for stack in report.stacks] == ["blocks"]
    assert "no family describes WithDoor" in caplog.text


def test_a_config_that_names_another_family(caplog):
    model, _ = toy(WithDoor)
    registry = FamilyRegistry([family("flux"), Family.model_validate(toy_family())])
    report = simpletuner_segckpt.apply(
        model, keys(2) | {"model_family": "flux"}, registry=registry
    ).report
    assert report.family == "toy"
    assert "model_family is flux, but WithDoor belongs to toy" in caplog.text


def toy_family(**more):
    stack = {"path": "blocks", "block": "Block", "count": "depth"}
    base = {"family": "toy", "title": "Toy", "classes": ("toys.WithDoor",), "stacks": (stack,)}
    return base | more


def test_lists_that_are_not_described_are_in_the_report():
    model, _ = toy(WithDoor)
    model.more = toy(WithDoor)[0].blocks
    model.left = toy(WithDoor)[0].blocks
    left_out = ({"path": "left", "reason": "too small"},)
    described = Family.model_validate(toy_family(left_out=left_out))
    report = simpletuner_segckpt.apply(model, keys(2), family=described).report
    assert dict(report.left_out) == {
        "more": "not described by the family toy",
        "left": "too small",
    }


def test_a_described_list_that_the_model_lacks():
    stacks = (
        {"path": "blocks", "block": "Block", "count": "depth"},
        {"path": "gone", "block": "Block", "count": "depth"},
        {"path": "maybe", "block": "Block", "count": "depth", "optional": True},
    )
    described = Family.model_validate(toy_family(stacks=stacks))
    report = simpletuner_segckpt.apply(toy(WithDoor)[0], keys(2), family=described).report
    assert report.left_out == (("gone", "WithDoor has no such list of blocks"),)
    assert [stack.path for stack in report.stacks] == ["blocks"]


def test_a_stack_that_its_file_calls_per_block():
    reason = "every block gets a slice of its own"
    stack = {"path": "blocks", "block": "Block", "count": "depth", "per_block": reason}
    described = Family.model_validate(toy_family(stacks=(stack,)))
    [stack] = simpletuner_segckpt.apply(toy(WithDoor)[0], keys(2), family=described).report.stacks
    assert (stack.strategy, stack.reason) == ("per-block", reason)


def test_find():
    registry = FamilyRegistry.shipped()
    assert registry.find("FLUX").title == "Flux.1"
    assert registry.find("qwen_image").title == "Qwen Image 2.1"
    assert registry.find("qwen-image", "v1.0").title != "Qwen Image 2.1"
    assert registry.find("wan", "no-such-flavour").family == "wan"
    with pytest.raises(UnknownFamily, match="no model family is called `fluxx`; did you mean"):
        registry.find("fluxx")
    own = Family.model_validate(toy_family(family="flux"))
    registry.add(own)
    assert registry.find("flux") is own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("family = 1", r"bad\.toml: `family`"),
        ('family = "x"\ntitle = "X"\nstack = []', r"bad\.toml: `stacks`"),
        ("family = ", r"bad\.toml: Invalid value"),
        ('family = "x"\ntitle = "X"\nstacks = [{path = "a"}]', r"bad\.toml: `stacks\.0\.block`"),
    ],
)
def test_a_bad_file(tmp_path, text, message):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(FamilyError, match=message):
        FamilyRegistry().add_folder(tmp_path)
    with pytest.raises(FamilyError, match="is not a folder"):
        FamilyRegistry().add_folder(tmp_path / "bad.toml")


EXTRA = Family.model_validate(toy_family(family="extra"))
SEVERAL = [EXTRA, Family.model_validate(toy_family(family="second"))]


def test_entry_points(monkeypatch, folder):
    package = ModuleType("a_package")
    package.one, package.several, package.folder = EXTRA, SEVERAL, folder
    package.nonsense = 3
    monkeypatch.setitem(sys.modules, "a_package", package)

    def provide(*names):
        group = registry_module.ENTRY_POINTS
        found = EntryPoints(EntryPoint(name, f"a_package:{name}", group) for name in names)
        monkeypatch.setattr(registry_module, "entry_points", lambda group: found)

    provide("one", "several", "folder")
    assert {"extra", "second", "toy", "flux"} <= set(FamilyRegistry.default().names())
    provide("nonsense")
    with pytest.raises(FamilyError, match="nonsense in .* loads to a int; it must be"):
        FamilyRegistry.default()
