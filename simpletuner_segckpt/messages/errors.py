"""Everything this package raises for a reason that its user can act on."""

from collections.abc import Sequence

from .findings import CODES, Finding


def reason_of(error: BaseException) -> str:
    """Why the system, or Python, could not do something, without the name of the file."""
    return getattr(error, "strerror", None) or str(error)


class SegckptError(Exception):
    """Base of all errors below. The text of some begins with the code of a message."""

    rule: str = ""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{CODES[self.rule]} {text}" if self.rule else text


class ConfigError(SegckptError, ValueError):
    """A config that cannot be used; ``findings`` says where and what to write instead."""

    def __init__(self, findings: Sequence[Finding]):
        self.findings = tuple(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))


class FamilyError(SegckptError, ValueError):
    """A family file or entry point that cannot be read."""


class UnknownFamily(SegckptError, LookupError):
    """No known family has this name; ``nearest`` is the one with the most similar name."""

    def __init__(self, name: str, nearest: str | None):
        self.name = name
        self.nearest = nearest
        hint = f"; did you mean `{nearest}`?" if nearest else ""
        super().__init__(f"no model family is called `{name}`{hint}")


class SegmentBroken(SegckptError, RuntimeError):
    """The model's loop used the state inside a segment that had been proven unbroken.

    Raised during forward, so before the backward of that forward. Calls of the same shape run
    block by block from then on: the same forward can simply be tried again.
    """

    rule = "segment-broken"


class RecomputeError(SegckptError, RuntimeError):
    """A block cannot be recomputed as its forward was. Raised in backward."""

    rule = "recompute-differs"


class UnsupportedModel(SegckptError, TypeError):
    """The model has no stack of blocks that could be scheduled, or hooks that cannot work with it.

    Hooks may arrive after ``apply``: then it is raised by the forward, before the first block.
    """

    rule = "unsupported-model"


class WorkloadError(SegckptError, ValueError):
    """A training step that cannot be built or estimated; the text is one sentence for the user."""


class UsageError(Exception):
    """The command line cannot be carried out."""
