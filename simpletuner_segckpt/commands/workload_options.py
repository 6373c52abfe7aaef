"""The options that say what a config does not: of every command that builds a workload."""

import argparse

from ..costs.cards import cards
from ..estimator.predict.modes import MODES, OWN
from ..estimator.workload.parse import Overrides
from ..messages.errors import WorkloadError


def add_workload_options(made: argparse.ArgumentParser) -> None:
    """The options that say what the config does not: for every command that builds a workload."""
    made.add_argument("config", metavar="CONFIG", help="JSON, TOML or env; - for standard input")
    made.add_argument("--family", help="model family, instead of the file's model_family")
    made.add_argument("--size", help="published size, instead of that of the model_flavour")
    made.add_argument(
        "--model", metavar="DIR", help="diffusers folder with the model's config.json"
    )
    made.add_argument("--batch", type=_positive, metavar="N", help="samples in a batch")
    made.add_argument("--resolution", type=_pixels, metavar="WxH", help="pixels, as 832x480 or 512")
    made.add_argument("--frames", type=_positive, metavar="N", help="frames of a sample")
    made.add_argument("--text", type=_positive, metavar="N", help="text tokens")
    made.add_argument("--rank", type=_positive, metavar="N", help="rank of the LoRA")
    made.add_argument("--gpu", metavar="CARD", help=f"predict times on one of {', '.join(cards())}")
    made.add_argument(
        "--families", action="append", default=[], metavar="DIR", help="folder of family files"
    )


def overrides_of(options: argparse.Namespace) -> Overrides:
    """What the options of ``add_workload_options`` say."""
    width, height = options.resolution or (None, None)
    return Overrides(
        family=options.family,
        size=options.size,
        model=options.model,
        batch=options.batch,
        width=width,
        height=height,
        frames=options.frames,
        text=options.text,
        rank=options.rank,
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _pixels(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    try:
        return _positive(width), _positive(height or width)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 832x480, or 512") from None


def modes_in(text: str) -> list[str]:
    """The modes in a list separated by commas. Raises ``WorkloadError`` for an unknown one."""
    import difflib

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in MODES and name != OWN:
            near = difflib.get_close_matches(name, MODES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"write some of {', '.join(MODES)}"
            raise WorkloadError(f"there is no mode {name}; {hint}")
    return names
