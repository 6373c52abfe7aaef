"""The ``gradient_checkpointing*`` keys of a trainer's config, and the keys that bear on them.

One Pydantic model for the ten keys, one for the trainer's own keys that force per-block or
name the model family. Field aliases are the keys as they stand in the file. Import neither
torch nor any other library that does: ``validate`` answers before a model exists.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .memory import UNITS, MemoryBudget
from .spelling import (
    FALSE,
    TRUE,
    is_unset,
    json_value,
    one_of,
    real_number,
    some_of,
    switch,
    whole_number,
    word,
)

PREFIX = "gradient_checkpointing"
# Keys that SimpleTuner does not know, and the fields that hold them. As options it refuses them.
OWN_KEYS = {
    "gradient_checkpointing_keep": "keep",
    "gradient_checkpointing_keep_last": "keep_last",
    "gradient_checkpointing_budget": "budget",
}
Backend = Literal["torch", "torch-ffn", "unsloth", "unsloth-ffn"]
Kept = Literal["attention", "cross-attention", "ffn"]
BACKENDS: tuple[str, ...] = get_args(Backend)
KEEP: tuple[str, ...] = get_args(Kept)

_UNSET_SCHEMA: list[dict[str, Any]] = [
    {"type": "null"},
    {"type": "string", "pattern": r"^\s*([Nn]one|[Nn]ull)?\s*$"},
]


def _integer(minimum: int, what: str, description: str, examples: list[int]) -> Any:
    schema = {
        "anyOf": [
            {"type": "integer", "minimum": minimum},
            {"type": "string", "pattern": r"^\s*\+?[0-9]+(\.0*)?\s*$"},
            *_UNSET_SCHEMA,
        ],
        "description": description,
        "examples": examples,
    }
    return BeforeValidator(whole_number(minimum, what)), WithJsonSchema(schema)


def _boolean(description: str, hint: str = "") -> Any:
    words = "|".join(sorted(TRUE | FALSE | {"null"}))
    schema = {
        "anyOf": [
            {"type": "boolean"},
            {"enum": [0, 1]},
            {"type": "string", "pattern": rf"^\s*({_any_case(words)})?\s*$"},
            {"type": "null"},
        ],
        "description": description,
        "examples": [True, False],
    }
    return BeforeValidator(switch(hint)), WithJsonSchema(schema)


def _memory(description: str) -> Any:
    # Some digit is not 0; 100 is the last share.
    amount = r"^\s*\+?(?=[0-9.]*[1-9])[0-9]+(\.[0-9]*)?\s*"
    units = "|".join(UNITS).lower()
    schema = {
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0},
            {"type": "string", "pattern": rf"{amount}({_any_case(units)})?\s*$"},
            {
                "type": "string",
                "pattern": r"^\s*\+?(100(\.0*)?|(?=[0-9.]*[1-9])[0-9]{1,2}(\.[0-9]*)?)\s*%\s*$",
            },
            {"type": "string", "pattern": rf"^\s*{_any_case('auto')}\s*$"},
            *_UNSET_SCHEMA,
        ],
        "description": description,
        "examples": ["22GiB", 22, "90%", "auto"],
    }
    written = PlainSerializer(lambda budget: None if budget is None else str(budget))
    return BeforeValidator(MemoryBudget.parse), written, WithJsonSchema(schema)


def _any_case(words: str) -> str:
    """A regular expression for ``words`` in any case; JSON Schema knows no flags."""
    return "".join(f"[{c.upper()}{c}]" if c.isalpha() else c for c in words)


class _Keys(BaseModel):
    model_config = ConfigDict(frozen=True, populate_by_name=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, values: Any) -> Any:
        """An unset key has its default, so it need not be there at all."""
        if not isinstance(values, dict):
            return values
        switches = {
            spelling
            for name, field in cls.model_fields.items()
            if field.annotation is bool
            for spelling in (name, field.alias)
        }
        return {
            key: value
            for key, value in values.items()
            if not is_unset(value) or (key in switches and _is_none_word(value))
        }


def _is_none_word(value: Any) -> bool:
    """Whether ``value`` is "none", a word for off where a switch is meant."""
    return isinstance(value, str) and value.strip().lower() == "none"


class CheckpointingConfig(_Keys):
    """What the ``gradient_checkpointing*`` keys of a config file ask for."""

    enabled: Annotated[
        bool,
        *_boolean(
            "Recompute activations in backward instead of keeping them. The master switch.",
            hint=" (an implementation is chosen with gradient_checkpointing_backend)",
        ),
    ] = Field(True, alias="gradient_checkpointing", title="Gradient checkpointing")
    backend: Annotated[
        Backend,
        BeforeValidator(one_of(BACKENDS)),
        WithJsonSchema(
            {
                "anyOf": [{"enum": list(BACKENDS)}, *_UNSET_SCHEMA],
                "description": "How covered blocks are recomputed. `torch`: whole blocks; "
                "`unsloth`: the same, with the segment's inputs waiting in CPU memory; `-ffn`: "
                "only the feed-forward of covered blocks.",
                "examples": list(BACKENDS),
            }
        ),
    ] = Field("torch", alias="gradient_checkpointing_backend", title="Backend")
    interval: Annotated[
        int,
        *_integer(
            1,
            "blocks per segment",
            "Blocks per segment: this many consecutive blocks share one checkpoint call.",
            [1, 2, 4],
        ),
    ] = Field(1, alias="gradient_checkpointing_interval", title="Segment interval")
    stride: Annotated[
        int | None,
        *_integer(
            1,
            "blocks from the start of one segment to the start of the next",
            "Distance between the starts of two segments, at least the interval. Blocks in "
            "between are kept, not recomputed: only that saves time. Default: the interval.",
            [4],
        ),
    ] = Field(None, alias="gradient_checkpointing_segment_stride", title="Segment stride")
    offload_attention: Annotated[
        bool,
        *_boolean(
            "Move what attention saves for backward to CPU memory, in blocks whose attention is "
            "not recomputed: those in gaps, and all of them with a backend that ends in -ffn."
        ),
    ] = Field(False, alias="gradient_checkpointing_offload_attention", title="Offload attention")
    pin_memory_max_buckets: Annotated[
        int,
        *_integer(
            0,
            "sizes of pinned buffers; 0 never pins",
            "How many sizes of pinned CPU buffers the offload may hold; 0 never pins.",
            [0, 12],
        ),
    ] = Field(
        12,
        alias="gradient_checkpointing_offload_pin_memory_max_buckets",
        title="Pinned buckets",
    )
    prefetch: Annotated[
        bool, *_boolean("Bring offloaded tensors back early. Needs something that is offloaded.")
    ] = Field(False, alias="gradient_checkpointing_offload_prefetch", title="Offload prefetch")
    keep: Annotated[
        tuple[Kept, ...],
        BeforeValidator(some_of(KEEP)),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "array", "items": {"enum": list(KEEP)}, "uniqueItems": True},
                    {"enum": list(KEEP)},
                    *_UNSET_SCHEMA,
                ],
                "description": "In covered blocks keep the outputs of these operators and "
                "recompute the rest. attention: self and joint attention; cross-attention: that to "
                "a shorter sequence, such as a text, which is cheap to repeat; ffn: projections "
                "of feed-forwards that come down.",
                "examples": [["attention"], ["attention", "ffn"]],
            }
        ),
    ] = Field((), alias="gradient_checkpointing_keep", title="Kept operators")
    keep_last: Annotated[
        int,
        *_integer(
            0,
            "blocks at the end of the model that run normally",
            "The last blocks of the model, across its stacks, that run normally whatever the "
            "schedule says. The last one costs no memory at the peak.",
            [0, 1],
        ),
    ] = Field(0, alias="gradient_checkpointing_keep_last", title="Keep the last blocks")
    budget: Annotated[
        MemoryBudget | None,
        *_memory(
            "Memory that a training step may take, instead of a schedule: what is recomputed is "
            "decided for each shape of call. A number counts GiB; % is of the device; auto leaves "
            "a margin of it free."
        ),
    ] = Field(None, alias="gradient_checkpointing_budget", title="Memory budget")

    @property
    def may_keep(self) -> tuple[str, ...]:
        """Operators whose outputs some recomputed block keeps, or may keep within a budget."""
        return KEEP if self.budget else self.keep

    @property
    def feed_forward_only(self) -> bool:
        """Whether the feed-forwards of covered blocks are recomputed instead of whole blocks."""
        return self.backend.endswith("-ffn")

    @property
    def inputs_on_cpu(self) -> bool:
        """Whether what enters a checkpoint call waits for backward in CPU memory."""
        return self.backend.startswith("unsloth")

    @model_validator(mode="after")
    def _budget_stands_alone(self) -> "CheckpointingConfig":
        if not self.enabled or self.budget is None:
            return self
        found = {"budget": str(self.budget)}
        chosen = {name: getattr(self, name) for name in ("interval", "stride", "keep", "keep_last")}
        fields = type(self).model_fields
        others = [
            f"{fields[name].alias} is {', '.join(value) if isinstance(value, tuple) else value}"
            for name, value in chosen.items()
            if value != fields[name].default
        ]
        if others:
            raise PydanticCustomError(
                "budget-with-others",
                "is {budget} and chooses what is recomputed, but {others}; leave out one or the "
                "other",
                found | {"others": " and ".join(others)},
            )
        if self.feed_forward_only:
            raise PydanticCustomError(
                "budget-with-others",
                "is {budget} but gradient_checkpointing_backend is {backend}, which recomputes the "
                "feed-forwards and nothing else; write {whole} as the backend or leave the budget "
                "out",
                found | {"backend": self.backend, "whole": self.backend.removesuffix("-ffn")},
            )
        if self.offload_attention:
            raise PydanticCustomError(
                "budget-with-others",
                "is {budget} but gradient_checkpointing_offload_attention is true, which moves "
                "what the budget keeps or recomputes; write false there or leave the budget out",
                found,
            )
        return self

    @model_validator(mode="after")
    def _pairs_agree(self) -> "CheckpointingConfig":
        # With checkpointing off the pair has no effect and must not stop a run.
        if self.enabled and self.stride is not None and self.stride < self.interval:
            raise PydanticCustomError(
                "stride-below-interval",
                "is {stride} but gradient_checkpointing_interval is {interval}, so segments "
                "would overlap; write {interval} or more, or leave it out",
                {"stride": self.stride, "interval": self.interval},
            )
        if self.enabled and self.prefetch and not (self.offload_attention or self.inputs_on_cpu):
            raise PydanticCustomError(
                "prefetch-without-offload",
                "is true but nothing is offloaded; set gradient_checkpointing_offload_attention to "
                "true, write an unsloth backend, or leave prefetch out",
            )
        if self.enabled and self.keep and self.feed_forward_only:
            raise PydanticCustomError(
                "keep-with-ffn",
                "is {keep} but gradient_checkpointing_backend is {backend}, which recomputes the "
                "feed-forwards and nothing else; write {whole} as the backend or leave keep out",
                {
                    "keep": ", ".join(self.keep),
                    "backend": self.backend,
                    "whole": self.backend.removesuffix("-ffn"),
                },
            )
        return self


class TrainerKeys(_Keys):
    """The trainer's own keys that name the model or force per-block."""

    model_family: Annotated[str | None, BeforeValidator(word)] = None
    model_flavour: Annotated[str | None, BeforeValidator(word)] = None
    musubi_blocks_to_swap: Annotated[int, BeforeValidator(whole_number(0, "blocks to swap"))] = 0
    crepa_enabled: Annotated[bool, BeforeValidator(switch())] = False
    layersync_enabled: Annotated[bool, BeforeValidator(switch())] = False
    layersync_lambda: Annotated[float, BeforeValidator(real_number)] = 0.2
    internal_guidance_enabled: Annotated[bool, BeforeValidator(switch())] = False
    nextlat_enabled: Annotated[bool, BeforeValidator(switch())] = False
    distillation_method: Annotated[str | None, BeforeValidator(word)] = None
    tread_config: Annotated[Any, BeforeValidator(json_value)] = None
    diffusion_blocks_config: Annotated[Any, BeforeValidator(json_value)] = None
    controlnet: Annotated[bool, BeforeValidator(switch())] = False
    max_grounding_entities: Annotated[
        int, BeforeValidator(whole_number(0, "grounded entities"))
    ] = 0
    enable_group_offload: Annotated[bool, BeforeValidator(switch())] = False
    group_offload_type: Annotated[str, BeforeValidator(word)] = "block_level"
    group_offload_blocks_per_group: Annotated[
        int, BeforeValidator(whole_number(1, "blocks that are moved together"))
    ] = 1
    activation_memory_budget: Annotated[float, BeforeValidator(real_number)] = 1.0
    fsdp_enable: Annotated[bool, BeforeValidator(switch())] = False
    fsdp_activation_checkpointing: Annotated[bool, BeforeValidator(switch())] = False
    deepspeed_config: Annotated[Any, BeforeValidator(json_value)] = None


def _aliases(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(field.alias or name for name, field in model.model_fields.items())


CHECKPOINTING_KEYS = _aliases(CheckpointingConfig)
TRAINER_KEYS = _aliases(TrainerKeys)
