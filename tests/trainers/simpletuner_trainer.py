"""SimpleTuner's own trainer on a CPU, with and without ``segckpt launch``: what was equal.

    python tests/trainers/simpletuner_trainer.py --python PYTHON [FOLDER]

PYTHON is that of an environment with SimpleTuner and this package, FOLDER where it all is put. A
tiny Flux of 6 and 7 blocks is trained for three steps, each time with other keys in SimpleTuner's
own config.json, of which nothing else changes. The exit code is 1 when a loss, the adapter or the
number of blocks that backward ran again is not what it should be.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STEPS = 3
BLOCKS = (6, 7)  # of the two stacks of Flux
PREFIX = "gradient_checkpointing"

# What the processes of a run find in their environment: a CPU in place of a GPU, and a witness.
# SimpleTuner pins every latent, which takes an accelerator. It makes its optimizer when the model
# is there, and a step calls backward once.
WITNESS = """
import functools
import json
import os
import sys

import torch

torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
blocks = 0


def counted(forward):
    @functools.wraps(forward)
    def counting(*args, **kwargs):
        global blocks
        blocks += 1
        return forward(*args, **kwargs)

    return counting


def watch_blocks(make):
    @functools.wraps(make)
    def watching(self, *args, **kwargs):
        module = sys.modules.get("simpletuner.helpers.models.flux.transformer")
        for name in ("FluxTransformerBlock", "FluxSingleTransformerBlock"):
            block = getattr(module, name, None)
            if block is not None and not hasattr(block.forward, "__wrapped__"):
                block.forward = counted(block.forward)
        make(self, *args, **kwargs)

    return watching


def watch_backward(backward):
    @functools.wraps(backward)
    def watching(self, *args, **kwargs):
        before = blocks
        result = backward(self, *args, **kwargs)
        if os.environ.get("RANK", "0") == "0":
            with open(os.environ["WITNESS"], "a") as file:
                step = {"loss": self.item(), "forward": before, "again": blocks - before}
                file.write(json.dumps(step) + "\\n")
        return result

    return watching


torch.optim.Optimizer.__init__ = watch_blocks(torch.optim.Optimizer.__init__)
torch.Tensor.backward = watch_backward(torch.Tensor.backward)
"""

CONFIG: dict[str, Any] = {
    "model_type": "lora",
    "model_family": "flux",
    "pretrained_model_name_or_path": "pipeline",
    "data_backend_config": "config/data.json",
    "max_train_steps": STEPS,
    "num_train_epochs": 0,
    "train_batch_size": 1,
    "learning_rate": 1e-3,
    "lora_rank": 4,
    "lora_alpha": 4,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "mixed_precision": "no",
    "base_model_precision": "no_change",
    "optimizer": "adamw_bf16",
    "seed": 42,
    "report_to": "none",
    "checkpoint_step_interval": 100,
    "validation_disable": True,
    "disable_benchmark": True,
    "resolution": 64,
    "resolution_type": "pixel",
    "minimum_image_size": 0,
    "push_to_hub": False,
    "caption_dropout_probability": 0.0,
    "vae_batch_size": 1,
}
DATA = [
    {
        "id": "images",
        "type": "local",
        "instance_data_dir": "images",
        "cache_dir_vae": "cache/vae",
        "caption_strategy": "textfile",
        "resolution": 64,
        "resolution_type": "pixel",
        "crop": True,
        "crop_aspect": "square",
        "minimum_image_size": 0,
        "repeats": 10,
        "metadata_backend": "discovery",
    },
    {
        "id": "text",
        "type": "local",
        "dataset_type": "text_embeds",
        "default": True,
        "cache_dir": "cache/text",
    },
]

SCRIPT = ("-m", "simpletuner.train")
COMMAND = ("simpletuner", "train")
OFF = {PREFIX: False}


@dataclass(frozen=True)
class Case:
    """Keys in SimpleTuner's config, and how many blocks each backward is to run again."""

    title: str
    keys: Mapping[str, Any]
    again: int
    started: Sequence[str] = SCRIPT
    processes: int = 1


KEEP = {f"{PREFIX}_keep": ["attention", "ffn"]}
MIXED = KEEP | {
    f"{PREFIX}_interval": 2,
    f"{PREFIX}_segment_stride": 3,
    f"{PREFIX}_keep_last": 1,
}
CASES = (
    Case("keep attention, ffn", KEEP, sum(BLOCKS)),
    Case("keep_last 2", {f"{PREFIX}_keep_last": 2}, sum(BLOCKS) - 2),
    Case("interval 2, stride 3, keep_last 1, keep", MIXED, 8),
    Case("the same by `simpletuner train`", MIXED, 8, COMMAND),
    Case("the same in two processes", MIXED, 8, processes=2),
)


@dataclass
class Run:
    """What a run left: its steps, its adapter, and what was wrong with it."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    adapter: bytes = b""
    fault: str = ""

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]


@dataclass(frozen=True)
class Outcome:
    """A case beside the run without checkpointing in as many processes."""

    case: Case
    fault: str = ""


def outcomes(python: str, folder: Path) -> Iterator[Outcome]:
    """Every case, run by ``python`` in ``folder``."""
    (folder / "site").mkdir(parents=True)
    (folder / "site/sitecustomize.py").write_text(WITNESS)
    (folder / "config").mkdir()
    (folder / "config/data.json").write_text(json.dumps(DATA))
    environment = _environment(python, folder) | {"WITNESS": os.devnull}
    command = [python, __file__, "--make", str(folder)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    _run(python, folder, OFF, SCRIPT, 1, launches=False)  # which fills the caches of the data
    plain: dict[int, Run] = {}
    for case in CASES:
        if case.processes not in plain:
            plain[case.processes] = _run(
                python, folder, OFF, SCRIPT, case.processes, launches=False
            )
        found = _run(python, folder, case.keys, case.started, case.processes)
        yield Outcome(case, _difference(found, plain[case.processes], case.again))


def _difference(found: Run, plain: Run, again: int) -> str:
    """What is not as it should be, if anything."""
    if plain.fault or found.fault:
        return plain.fault or found.fault
    if len(plain.steps) != STEPS or found.losses != plain.losses:
        return f"losses {found.losses}, without checkpointing {plain.losses}"
    if found.adapter != plain.adapter:
        return "another adapter"
    seen = [step["again"] for step in found.steps]
    if seen != [again] * STEPS or any(step["again"] for step in plain.steps):
        return f"blocks run again: {seen}, planned {again}"
    return ""


def _run(
    python: str,
    folder: Path,
    keys: Mapping[str, Any],
    started: Sequence[str],
    processes: int,
    *,
    launches: bool = True,
) -> Run:
    output, witness = folder / "output", folder / "witness.jsonl"
    for left in [witness, *output.rglob("*.safetensors")]:
        left.unlink(missing_ok=True)
    config = CONFIG | {"output_dir": str(output)} | keys
    (folder / "config/config.json").write_text(json.dumps(config, indent=1))
    words = [python]
    if processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node", str(processes)]
    words += ["-m", "simpletuner_segckpt.launch"] if launches else []
    environment = _environment(python, folder) | {"WITNESS": str(witness)}
    ended = subprocess.run(
        [*words, *started], cwd=folder, env=environment, capture_output=True, text=True
    )
    adapters = list(output.rglob("*.safetensors"))
    if ended.returncode or len(adapters) != 1 or not witness.exists():
        (folder / "failed.log").write_text(ended.stdout + ended.stderr)
        last = (ended.stderr.strip() or "nothing was said").splitlines()[-1]
        return Run(fault=f"exit code {ended.returncode}: {last}")
    steps = [json.loads(line) for line in witness.read_text().splitlines()]
    return Run(steps, adapters[0].read_bytes())


def _environment(python: str, folder: Path) -> dict[str, str]:
    binaries = os.pathsep.join((str(Path(python).parent), os.environ["PATH"]))
    return os.environ | {
        "PYTHONPATH": str(folder / "site"),
        "PATH": binaries,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),  # no accelerate config of the user's
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "MIXED_PRECISION": "no",
    }


def make(folder: Path) -> None:
    """Random weights in the shape of a Flux pipeline, and a few images with captions."""
    import torch
    from tiny_pipelines import flux, images

    torch.manual_seed(0)
    tokenizers = folder / "tokenizers"
    tokenizers.mkdir()
    flux(tokenizers, BLOCKS).save_pretrained(folder / "pipeline")
    for image, caption in images(folder / "images").items():
        image.with_suffix(".txt").write_text(caption)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path)
    options = parser.parse_args()
    if options.make:
        make(options.folder)
        return 0
    faults = 0
    with TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve() / "simpletuner"
        for outcome in outcomes(options.python, folder):
            told = outcome.fault or f"losses and adapter equal, {outcome.case.again} blocks again"
            print(f"{outcome.case.title}: {told}", flush=True)
            faults += bool(outcome.fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
