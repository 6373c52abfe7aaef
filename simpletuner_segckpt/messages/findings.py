"""One finding about a config file, and the codes that stay the same between versions.

docs/troubleshooting.md says for each code what to do.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


# code -> (short name, what it means), of a config file
RULES = {
    "SEG001": ("unreadable", "the file cannot be read"),
    "SEG101": ("encoding", "the file is not UTF-8, or starts with a byte order mark"),
    "SEG102": ("empty-file", "the file is empty"),
    "SEG103": ("syntax", "not valid JSON or TOML, or a line of an env file that is not read"),
    "SEG104": ("not-an-object", "the file holds something else than keys and values"),
    "SEG105": ("duplicate-key", "a key is given twice"),
    "SEG201": ("unknown-key", "a gradient_checkpointing key that does not exist"),
    "SEG202": ("two-spellings", "one key in two spellings"),
    "SEG203": ("wrong-type", "a value of the wrong type"),
    "SEG204": ("out-of-range", "a number outside the allowed range"),
    "SEG205": ("unknown-choice", "a word that is not one of the choices"),
    "SEG301": ("stride-below-interval", "segments would overlap"),
    "SEG302": ("stride-without-interval", "a stride with the default interval of 1"),
    "SEG303": ("prefetch-without-offload", "prefetch has nothing to prefetch"),
    "SEG304": ("no-effect", "a key that has no effect beside the others"),
    "SEG305": ("keep-with-ffn", "operators to keep beside a backend that recomputes none of them"),
    "SEG306": ("budget-with-others", "a memory budget beside keys that it chooses or cannot have"),
    "SEG401": ("unknown-family", "a model family that no file describes"),
    "SEG402": ("unsupported-option", "an option that cannot be carried out"),
    "SEG403": ("unknown-blocks", "the number of blocks is not known"),
}


# The same of what is said while a model is given its schedule, trains, or is launched
WARNINGS = {
    "SEG501": ("unsupported-model", "a model that cannot have a schedule as it is"),
    "SEG502": ("no-family", "no family file describes the model"),
    "SEG503": ("other-family", "the model belongs to another family than the config names"),
    "SEG504": ("own-setters", "a class with setters of its own does something else"),
    "SEG505": ("replaced", "what was set on the model before gives way to the schedule"),
    "SEG506": ("off-again", "checkpointing was switched on where the config says off"),
    "SEG601": ("block-by-block", "blocks that were to run in segments run by themselves"),
    "SEG602": ("not-reached", "a stack did not run through the model's loop"),
    "SEG603": ("blocks-changed", "a stack has another number of blocks than before"),
    "SEG604": ("left-to-others", "blocks that recompute themselves"),
    "SEG605": ("past-the-hooks", "the model's forward was called directly"),
    "SEG606": ("no-cache", "a KV cache cannot be filled by a step with recompute"),
    "SEG607": ("nothing-inside", "what was planned for the inside of blocks did not happen"),
    "SEG608": ("compiled", "what compiling makes of the schedule"),
    "SEG609": ("sharded", "what sharding makes of the recompute"),
    "SEG610": ("written-buffer", "a block writes a buffer that is too large to be copied"),
    "SEG611": ("not-pinned", "no memory could be pinned"),
    "SEG612": ("segment-broken", "the loop did something new inside a segment"),
    "SEG613": ("recompute-differs", "a block cannot be recomputed as its forward was"),
    "SEG614": ("streamed", "weights that are streamed through memory which blocks share"),
    "SEG615": ("drifted", "what blocks carry is not what the family file says"),
    "SEG616": ("over-budget", "a memory budget that not even recomputing everything meets"),
    "SEG617": ("out-of-memory", "a step that ran out of memory within a budget"),
    "SEG701": ("never-enabled", "the script enabled checkpointing on no model"),
    "SEG702": ("never-trained", "no training forward ran with checkpointing switched on"),
    "SEG703": ("nothing-recomputed", "no block was recomputed"),
    "SEG704": ("no-schedule", "no model of the script could have the schedule"),
}


CODES = {name: code for code, (name, _) in (RULES | WARNINGS).items()}


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, where, and what to write instead.

    ``line`` and ``column`` count from 1; 0 means that the finding concerns the whole file.
    """

    rule: str
    message: str
    key: str = ""
    file: str = ""
    line: int = 0
    column: int = 0
    severity: Severity = "error"

    def __post_init__(self) -> None:
        assert CODES[self.rule] in RULES, self.rule

    @property
    def code(self) -> str:
        return CODES[self.rule]

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        place = f"{place}: " if place else ""
        key = f"`{self.key}` " if self.key else ""
        return f"{place}{self.code} {self.severity}: {key}{self.message}"


def printable(text: str) -> str:
    """``text`` in one line of at most 400 characters, control characters escaped.

    What is too long loses its middle: a name stands at the beginning, what is wrong at the end.
    """
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return shown if len(shown) <= 400 else f"{shown[:197]} ... {shown[-198:]}"
