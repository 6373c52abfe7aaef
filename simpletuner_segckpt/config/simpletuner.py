"""Which config file SimpleTuner reads: told by environment variables, else by what is there.

Its rules, as of 4.10.1: ``config/config.env`` and the one of the environment set variables first;
then a variable says what kind of file it is, or the first of ``config.json``, ``config.toml`` and
``config.env`` in the folder of the environment does.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ..messages.errors import UsageError
from .env import CHOOSERS, Assignment, assignments

_ENVIRONMENTS = ("SIMPLETUNER_ENVIRONMENT", "SIMPLETUNER_ENV", "ENV")
_KINDS = ("json", "toml", "env")
_DEFAULT = "default"


def config_of_trainer(variables: Mapping[str, str], package: Path | None = None) -> Path:
    """The file that SimpleTuner would read in this folder with these environment variables.

    ``package`` is its folder, where the examples are. Raises ``UsageError`` when there is none, or
    when it is to read its keys from the command line.
    """
    known = dict(variables)
    for file in ("config.env", "{}/config.env"):
        known |= _variables(Path("config") / file.format(known.get("ENV") or _DEFAULT))
    name = next((known[v] for v in _ENVIRONMENTS if known.get(v)), _DEFAULT)
    kind = next((known[v].lower() for v in CHOOSERS if known.get(v)), "")
    if kind == "cmd":
        raise UsageError(
            "SimpleTuner is to read its keys from the command line; write them to a file, and "
            "name it with --config"
        )
    folder = Path("config") if name == _DEFAULT else Path("config", name)
    if not kind:
        kind = next((k for k in _KINDS if (folder / f"config.{k}").is_file()), "json")
    candidates = [folder / f"config.{kind}"]
    if kind == "json":
        candidates = [*_json_files(name, known.get("CONFIG_PATH", ""), package), *candidates]
    elif kind == "env":
        candidates += [Path("config/config.env"), Path("config.env")]
    for path in candidates:
        if path.is_file():
            return path
    looked = ", ".join(str(path) for path in dict.fromkeys(candidates))
    raise UsageError(f"no config of SimpleTuner is at {looked}; name it with --config")


def _json_files(name: str, override: str, package: Path | None) -> Iterator[Path]:
    if override:
        path = Path(override).expanduser()
        if path.is_dir():
            yield path / "config.json"
        else:
            if path.suffix:
                yield path
            yield path.with_suffix(".json")
    if name == _DEFAULT:
        return
    environment = Path(name).expanduser()
    if environment.suffix:
        yield environment
        return
    yield environment / "config.json"
    if environment.parts[:1] != ("config",):
        yield Path("config") / environment / "config.json"
    if package is not None:
        yield package / environment / "config.json"


def _variables(file: Path) -> dict[str, str]:
    """What an env file sets, but for what it sets to nothing."""
    try:
        lines = list(assignments(file.read_text("utf-8")))
    except (OSError, UnicodeDecodeError):
        return {}
    found: dict[str, str] = {}
    for line in lines:
        if isinstance(line, Assignment):
            before = found.get(line.name, "") + " " if line.appends else ""
            found[line.name] = (before + line.value).strip()
    return {name: value for name, value in found.items() if value}
