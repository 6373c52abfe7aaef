"""What the keys ask for and a model cannot do, or what has no effect on it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..config.settings import Settings
from ..config_schema import CheckpointingConfig
from ..families.schema import Family, Stack
from ..messages.findings import Finding
from .report import Report


@dataclass(frozen=True, slots=True)
class _Need:
    """A key that asks for something of a part that blocks must have.

    part: the field of a family's stack that names it; called: what it is called in sentences.
    says: what the value of the key is. instead: what to write where no block has the part.
    otherwise: what happens in stacks that lack it, when others have it.
    """

    key: str
    part: str
    called: str
    says: str
    instead: str
    otherwise: str


def _needs(config: CheckpointingConfig) -> Iterator[_Need]:
    if config.feed_forward_only:
        yield _Need(
            "gradient_checkpointing_backend",
            "feed_forward",
            "feed-forward",
            f"is {config.backend}",
            f"write {config.backend.removesuffix('-ffn')}",
            "run normally",
        )
    if "ffn" in config.keep:
        yield _Need(
            "gradient_checkpointing_keep",
            "projections",
            "feed-forward",
            "names ffn",
            "write attention" if "attention" in config.keep else "leave it out",
            "keep nothing of it",
        )
    if config.offload_attention:
        yield _Need(
            "gradient_checkpointing_offload_attention",
            "attention",
            "attention",
            "is true",
            "write false",
            "offload nothing",
        )


def problems(
    settings: Settings, family: Family | None, name: str, report: Report
) -> Iterator[Finding]:
    """What the keys ask for and a model cannot do, or what has no effect on it.

    ``name`` is what the model is called in the sentences. An option that no stack can carry out
    is an error; one that some cannot is a warning.
    """
    config = settings.checkpointing
    if any(condition.off for condition in report.conditions):
        return
    described = family.stacks if family else ()
    stacks: Sequence[Stack] = described
    if report.stacks:  # in validate, the blocks of none may have been counted
        stacks = [s for s in described if any(s.describes(r.path) for r in report.stacks)]
    for need in _needs(config):
        lacking = [stack.path for stack in stacks if not getattr(stack, need.part)]
        having = len(stacks) - len(lacking)
        if not having:
            because = f"no {need.called} is known in the blocks of {name}"
            instead = need.instead
            if family is None:
                because = f"no family describes {name}"
                instead += ", or a family file (segckpt probe begins one)"
            message = f"{need.says}, but {because}; {instead}"
            yield settings.finding("unsupported-option", message, need.key)
        elif lacking:
            where = f"the blocks of {', '.join(lacking)} have no {need.called} of their own"
            message = f"{need.says}: {where} and {need.otherwise}"
            yield settings.finding("unsupported-option", message, need.key, "warning")
    attention = any(stack.attention for stack in stacks)
    offloading = any(stack.offloaded for stack in report.stacks)
    if config.offload_attention and attention and report.stacks and not offloading:
        message = (
            "has no effect: every block is recomputed as a whole, so its attention saves nothing; "
            "leave gaps (a stride above the interval, or keep_last), or write a backend that "
            "recomputes the feed-forwards only"
        )
        key = "gradient_checkpointing_offload_attention"
        yield settings.finding("no-effect", message, key, "warning")
