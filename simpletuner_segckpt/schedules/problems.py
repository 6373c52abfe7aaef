"""What the keys ask for and a model cannot do, or what has no effect on it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..config.settings import Settings
from ..config_schema import CheckpointingConfig
from ..families.schema import Family, Stack
from ..messages.findings import Finding
from .group_offload import MOVED_TOGETHER, TAKEN_AWAY, needed_again
from .report import Report
from .without_effect import assumed, without_effect


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
    planned = assumed(settings, family, report)
    found = list(settings.findings)
    if not any(condition.off for condition in report.conditions):
        said = [
            *_one_by_one(settings, family, name),
            *_lacking(settings, family, name, report),
            *_of_trainer(settings, planned),
        ]
        yield from said
        found += said
    told = {finding.key for finding in found}
    yield from (f for f in without_effect(settings, family, planned) if f.key not in told)


def _one_by_one(settings: Settings, family: Family | None, name: str) -> Iterator[Finding]:
    """An interval of a family whose blocks can never run together."""
    interval = settings.checkpointing.interval
    if family and interval > 1 and all(stack.per_block for stack in family.stacks):
        reason = family.stacks[0].per_block if family.stacks else "it has units only"
        message = (
            f"is {interval}, but no blocks of {name} can run together ({reason}): those that the "
            "schedule covers are recomputed one by one"
        )
        key = "gradient_checkpointing_interval"
        yield settings.finding("unsupported-option", message, key, "warning")


def _lacking(
    settings: Settings, family: Family | None, name: str, report: Report
) -> Iterator[Finding]:
    """Keys that are about a part which blocks do not have."""
    described = family.stacks if family else ()
    stacks: Sequence[Stack] = described
    if report.stacks:  # in validate, the blocks of none may have been counted
        stacks = [s for s in described if any(s.describes(r.path) for r in report.stacks)]
    for need in _needs(settings.checkpointing):
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


def _of_trainer(settings: Settings, report: Report) -> Iterator[Finding]:
    """Keys of the trainer that get in the way of the schedule."""
    trainer = settings.trainer
    if trainer.activation_memory_budget < 1:
        message = (
            f"is {trainer.activation_memory_budget}: torch.compile recomputes by it, too, also in "
            "blocks that the schedule keeps; leave it out, or write false for "
            "gradient_checkpointing"
        )
        yield settings.finding("unsupported-option", message, "activation_memory_budget", "warning")
    covering = [stack for stack in report.stacks if stack.covered]
    if not trainer.enable_group_offload or not covering:
        return
    together = trainer.group_offload_blocks_per_group
    if trainer.group_offload_type == "block_level" and together > 1:
        fault = MOVED_TOGETHER.format(together)
        message = f"is {together}: {fault}; write 1, or leaf_level as group_offload_type"
        yield settings.finding("unsupported-option", message, "group_offload_blocks_per_group")
    elif any(needed_again(stack, stack.blocks) for stack in covering):
        message = f"is on: {TAKEN_AWAY.format('some blocks')}"
        yield settings.finding("unsupported-option", message, "enable_group_offload")
