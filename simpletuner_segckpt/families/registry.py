"""Where families come from: the shipped TOML files, other packages, a folder, or a test."""

import difflib
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from pydantic import ValidationError

from ..messages.errors import FamilyError, UnknownFamily, reason_of
from .schema import Family, Implementation

ENTRY_POINTS = "simpletuner_segckpt.families"


class FamilyRegistry:
    """An ordered collection of families. Later ones come before earlier ones of the same name.

    >>> FamilyRegistry.shipped().find("flux").title
    'Flux.1'
    """

    def __init__(self, families: Iterable[Family] = ()):
        self._families = list(families)

    @classmethod
    def shipped(cls) -> "FamilyRegistry":
        """The families that come with this package."""
        return cls(_shipped())

    @classmethod
    def default(cls, folders: Iterable[str | Path] = ()) -> "FamilyRegistry":
        """The shipped families, those of installed packages, and those in ``folders``.

        A package adds its own with an entry point in the group
        ``simpletuner_segckpt.families`` that loads to a ``Family``, a list of them, or the path
        of a folder of TOML files. Raises ``FamilyError`` for one that loads to
        something else.
        """
        registry = cls.shipped()
        for point in entry_points(group=ENTRY_POINTS):
            registry.add(*_loaded(point))
        for folder in folders:
            registry.add_folder(folder)
        return registry

    def add(self, *families: Family) -> None:
        self._families.extend(families)

    def add_folder(self, folder: str | Path) -> None:
        """Add every TOML file of ``folder``. Raises ``FamilyError`` for one that is wrong."""
        self.add(*_folder(folder))

    def __iter__(self) -> Iterator[Family]:
        return reversed(self._families)

    def __len__(self) -> int:
        return len(self._families)

    def find(self, name: str, flavour: str | None = None) -> Family:
        """The family that a trainer's ``model_family`` (and ``model_flavour``) names.

        Raises ``UnknownFamily``, which names the nearest known family.
        """
        return _of_flavour(self.named(name), flavour)

    def named(self, name: str) -> list[Family]:
        """Every family of this ``model_family``. Raises ``UnknownFamily`` when there is none."""
        known = [f for f in self if _is_called(f, name)]
        if not known:
            near = difflib.get_close_matches(_spelling(name), self.names(), n=1)
            raise UnknownFamily(name, near[0] if near else None)
        return known

    def for_class(
        self, model_class: type, name: str | None = None, flavour: str | None = None
    ) -> Family | None:
        """The family that describes a model class, by the class or one of its bases.

        Of a class that another package brings it is the family as that class has it.
        Several families may share a class; ``name`` and ``flavour`` are the trainer's
        ``model_family`` and ``model_flavour``, which then decide.
        """
        for base in model_class.__mro__:
            known = [found for f in self if (found := _as_class_has_it(f, base))]
            if known:
                named = [f for f in known if _is_called(f, name)]
                return _of_flavour(named or known, flavour)
        return None

    def for_class_name(self, class_name: str, name: str | None = None) -> Family | None:
        """The family of a class named in a model's ``config.json`` (its ``_class_name``).

        ``name`` decides between families that share a class.
        """
        known = [f for f in self if class_name in (c.rpartition(".")[2] for c in f.classes)]
        named = [f for f in known if _is_called(f, name)]
        return next(iter(named or known), None)

    def names(self) -> list[str]:
        """Every ``model_family`` value that is known, without aliases, sorted."""
        return sorted({family.family for family in self._families})


def class_names(families: Iterable[Family]) -> set[str]:
    """The names, without their packages, of all classes that families describe."""
    paths: list[str] = []
    for family in families:
        paths += family.classes
        paths += (path for own in _implementations(family) for path in own.classes)
    return {path.rpartition(".")[2] for path in paths}


@cache
def _shipped() -> tuple[Family, ...]:
    """Read once a process: the files do not change, and nor do families."""
    return tuple(read_folder(files("simpletuner_segckpt.model_families")))


def _loaded(point: EntryPoint) -> list[Family]:
    """The families of an entry point."""
    where = f"entry point {point.name} in {ENTRY_POINTS}"
    try:
        loaded = point.load()
    except Exception as error:  # somebody else's code
        raise FamilyError(f"{where}: {type(error).__name__}: {error}") from None
    if isinstance(loaded, (str, Path)):
        return _folder(loaded)
    families = [loaded] if isinstance(loaded, Family) else loaded
    if isinstance(families, (list, tuple)) and all(isinstance(f, Family) for f in families):
        return list(families)
    raise FamilyError(
        f"{where} loads to a {type(loaded).__name__}; it must be a Family, a list of them, or the "
        "path of a folder"
    )


def _folder(folder: str | Path) -> list[Family]:
    try:
        paths = _family_files(Path(folder))
    except (OSError, ValueError) as error:
        reason = reason_of(error)
        raise FamilyError(f"{folder} is not a folder of family files: {reason}") from None
    return [read_family(path) for path in paths]


def read_folder(folder: Traversable) -> list[Family]:
    """The families in the TOML files of a folder, sorted by file name."""
    return [read_family(path) for path in _family_files(folder)]


def _family_files(folder: Traversable) -> list[Traversable]:
    files_there = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return sorted(files_there, key=lambda entry: entry.name)


def read_family(path: Traversable) -> Family:
    """One family file. Raises ``FamilyError`` naming the file and the key that is wrong."""
    try:
        return Family.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FamilyError(f"{path}: {reason_of(error)}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise FamilyError(f"{path}: `{key}`: {first['msg']}") from None


def _is_called(family: Family, name: str | None) -> bool:
    """Whether ``name`` is a spelling of the family's name or of one of its aliases."""
    return bool(name) and _spelling(name or "") in map(_spelling, (family.family, *family.aliases))


def _of_flavour(families: list[Family], flavour: str | None) -> Family:
    """The one of ``families`` that has the flavour, else the default one, else the first."""
    wanted = (flavour or "").lower()
    having = [f for f in families if wanted in (own.lower() for own in f.flavours)]
    return next(iter(having or [f for f in families if f.default] or families))


def _as_class_has_it(family: Family, candidate: type) -> Family | None:
    """``family`` as the class has it; None where it does not describe the class."""
    if any(is_class(candidate, path) for path in family.classes):
        return family
    for own in _implementations(family):
        if any(is_class(candidate, path) for path in own.classes):
            return family.implemented_as(own)
    return None


def _implementations(family: Family) -> Iterator[Implementation]:
    """Of other packages, those included that carry out the keys by setters of their own."""
    yield from family.implementations
    if family.native:
        yield Implementation(
            trainer="SimpleTuner", classes=family.native.classes, conditions=family.conditions
        )


def _spelling(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def is_class(candidate: type, dotted: str) -> bool:
    """Whether ``dotted`` names ``candidate``; a package may re-export the class higher up."""
    module, _, name = dotted.rpartition(".")
    return candidate.__name__ == name and (candidate.__module__ + ".").startswith(module + ".")
