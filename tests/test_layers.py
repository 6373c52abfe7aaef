"""The order of the package's folders: imports go downward only, and nowhere in a circle."""

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "simpletuner_segckpt"

# From the top down. What stands in one line does not import each other.
LAYERS = [
    {"validate", "launch", "check"},  # python -m simpletuner_segckpt.NAME
    {"__init__", "commands"},
    {"bench", "verify"},
    {"estimator"},
    {"install"},
    {"engine"},
    {"costs"},
    {"recompute"},
    {"model", "offload"},
    {"schedules"},
    {"families", "config"},
    {"config_schema", "messages"},
    {"private"},
]
# Within the estimator.
STAGES = [{"predict"}, {"profile"}, {"workload"}]
WITHOUT_TORCH = ("schedules", "families", "config", "config_schema", "messages")


def modules():
    """Dotted name of each module inside the package -> the file."""
    found = {}
    for folder, prefix in ((PACKAGE, ""), (ROOT / "config_schema", "config_schema.")):
        for path in folder.rglob("*.py"):
            name = prefix + ".".join(path.relative_to(folder).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name, path):
    """The modules of this package that a module imports, wherever in its code, but for types."""
    tree = ast.parse(path.read_text("utf-8"))
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    if name == "__init__":
        package = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                whole = ".".join([*module, alias.name])
                yield whole if whole in MODULES else ".".join(module)


MODULES = modules()
IMPORTS = {name: set(imports(name, path)) - {name, ""} for name, path in MODULES.items()}


def level(room, layers):
    [found] = [number for number, layer in enumerate(layers) if room in layer]
    return found


def test_there_are_few_rooms():
    rooms = {name.partition(".")[0] for name in MODULES}
    assert rooms == set().union(*LAYERS)
    assert len(rooms) <= 20


def test_imports_go_downward():
    for name, imported in IMPORTS.items():
        room = name.partition(".")[0]
        for other in imported:
            there = other.partition(".")[0]
            assert there == room or level(there, LAYERS) > level(room, LAYERS), (name, other)


def test_the_estimator_goes_from_the_workload_to_the_prediction():
    for name, imported in IMPORTS.items():
        for other in imported:
            stage, there = (n.split(".")[1] if "." in n else "" for n in (name, other))
            if name.startswith("estimator.") and other.startswith("estimator."):
                assert stage == there or level(there, STAGES) > level(stage, STAGES), (name, other)


def test_no_module_imports_itself_through_others():
    assert len(list(TopologicalSorter(IMPORTS).static_order())) >= len(MODULES)


def test_rooms_without_torch():
    names = [f"simpletuner_segckpt.{n}" for n in MODULES if n.partition(".")[0] in WITHOUT_TORCH]
    names = [name for name in names if not name.endswith("__main__")]
    lines = [f"import {name}" for name in (*names, "simpletuner_segckpt.commands.validate")]
    lines += ["import sys", "assert 'torch' not in sys.modules"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_every_folder_is_installed():
    """The list in pyproject.toml, which maps three folders to one import name."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    there = {
        ".".join(("simpletuner_segckpt", *path.parent.relative_to(PACKAGE).parts))
        for path in PACKAGE.rglob("__init__.py")
    }
    there |= {"simpletuner_segckpt.config_schema", "simpletuner_segckpt.model_families"}
    assert set(listed["packages"]) == there
