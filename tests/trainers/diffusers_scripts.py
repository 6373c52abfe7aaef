"""Training scripts of diffusers, unmodified, from a checkout."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proofs import Proof
from safetensors.torch import load_file

HERE = Path(__file__).parent
STEPS = 3  # the first gives half of a LoRA its first gradients, the second has segments
PREFIX = "gradient_checkpointing"

# What the scripts need of torchvision is in Python. A wheel of it for another build of torch cannot
# load its operators, and then ends its own import: these names let it go on.
OPERATORS = """
import importlib.util, os
if importlib.util.find_spec("torchvision"):
    import torch
    try:
        torch.ops.load_library(os.path.join(
            os.path.dirname(importlib.util.find_spec("torchvision").origin), "_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
"""

OWN_SWITCH = "--gradient_checkpointing"
COMMON = (
    *("--max_train_steps", str(STEPS), "--train_batch_size", "1"),
    *("--learning_rate", "1e-3", "--lr_warmup_steps", "0", "--seed", "0"),
)
DREAMBOOTH = ("--instance_data_dir", "images", "--instance_prompt", "a photo", "--resolution", "64")
PAIRS = ("--jsonl_for_train", "pairs.jsonl", "--resolution", "64")


@dataclass(frozen=True)
class Script:
    """A script in the checkout's examples/, the pipeline it gets, and its own arguments."""

    path: str
    pipeline: str
    arguments: Sequence[str]

    @property
    def name(self) -> str:
        return Path(self.path).stem.removeprefix("train_")


SCRIPTS = (
    Script("dreambooth/train_dreambooth_lora_flux.py", "flux", DREAMBOOTH),
    Script("dreambooth/train_dreambooth_lora_sd3.py", "sd3", DREAMBOOTH),
    Script("flux-control/train_control_lora_flux.py", "flux", PAIRS),
    Script(
        "text_to_image/train_text_to_image_lora_sdxl.py",
        "sdxl",
        ("--train_data_dir", "captioned", "--caption_column", "text", "--resolution", "64"),
    ),
    Script(
        "controlnet/train_controlnet_flux.py",
        "flux",
        (*PAIRS, "--num_double_layers", "5", "--num_single_layers", "5"),
    ),
    Script(
        "cogvideo/train_cogvideox_lora.py",
        "cogvideox",
        (
            *("--instance_data_root", "videos", "--caption_column", "prompts.txt"),
            *("--video_column", "videos.txt", "--height", "64", "--width", "64"),
            *("--max_num_frames", "5", "--mixed_precision", "no"),
        ),
    ),
)


@dataclass(frozen=True)
class Schedule:
    """Keys; of how many blocks how many first ones are run again; how many last ones are not.

    switched: whether the script also switches checkpointing on by itself.
    """

    title: str
    keys: Mapping[str, Any]
    interval: int = 1
    stride: int = 1
    keep_last: int = 0
    processes: Sequence[int] = (1,)
    switched: bool = True

    def again(self, depth: int) -> set[int]:
        """The blocks of a stack that backward is to run again, but for ``keep_last``."""
        return {block for block in range(depth) if block % self.stride < self.interval}


SCHEDULES = (
    Schedule("layer", {}),
    Schedule(
        "interval 2, stride 3",
        {f"{PREFIX}_interval": 2, f"{PREFIX}_segment_stride": 3},
        interval=2,
        stride=3,
        processes=(1, 2),
    ),
    Schedule(
        "keep attention, ffn; keep_last 2",
        {f"{PREFIX}_keep": ["attention", "ffn"], f"{PREFIX}_keep_last": 2},
        keep_last=2,
        switched=False,
    ),
)


@dataclass(frozen=True)
class Ran:
    """How a stack last ran, and why it never had segments."""

    picture: str
    reason: str


@dataclass(frozen=True)
class Run:
    """The weights that a run saved and what ``launch`` said, or why there are none."""

    weights: Mapping[str, bytes]
    said: str = ""
    fault: str = ""


def proofs(
    checkout: Path, packages: Path | None, folder: Path, only: Sequence[str] = ()
) -> Iterator[Proof]:
    """Every script under every schedule, two scripts at a time.

    checkout: of diffusers; its scripts run with the installed diffusers.
    packages: what only the scripts need, where it is not installed.
    folder: not there yet, for pipelines, data and what is saved.
    only: parts of paths of the scripts to run; all, where there are none.
    """
    found = re.search(r'__version__ = "(.*)"', (checkout / "src/diffusers/__init__.py").read_text())
    trainer = f"diffusers, examples of {found[1] if found else 'an unknown version'}"
    environment = _environment(packages, folder)
    make = [sys.executable, str(HERE / "tiny_pipelines.py"), str(folder)]
    subprocess.run(make, check=True, env=environment, capture_output=True)
    scripts = [
        script for script in SCRIPTS if not only or any(part in script.path for part in only)
    ]
    with ThreadPoolExecutor(2) as pool:
        for found_of_one in pool.map(
            lambda script: list(_proofs_of(script, trainer, checkout, environment, folder)), scripts
        ):
            yield from found_of_one


def _proofs_of(
    script: Script, trainer: str, checkout: Path, environment: Mapping[str, str], folder: Path
) -> Iterator[Proof]:
    plain: dict[int, Run] = {}
    for schedule in SCHEDULES:
        for processes in schedule.processes:
            if processes not in plain:
                plain[processes] = _run(checkout, script, None, processes, environment, folder)
            equal = ""
            if plain[processes].fault:
                ran = f"without launch: {plain[processes].fault}"
            else:
                launched = _run(checkout, script, schedule, processes, environment, folder)
                ran = _difference(launched, plain[processes], schedule)
                if not ran:
                    equal = f"{len(launched.weights)} saved tensors"
                    ran = _shown(launched.said, reasons=schedule.interval > 1)
            title = schedule.title if schedule.switched else f"{schedule.title} (by launch alone)"
            yield Proof(trainer, script.name, title, processes, equal, ran)


def _difference(launched: Run, plain: Run, schedule: Schedule) -> str:
    """What is not as it should be, if anything."""
    if launched.fault:
        return launched.fault
    if launched.weights.keys() != plain.weights.keys():
        return "other weights were saved"
    others = [name for name, value in plain.weights.items() if launched.weights[name] != value]
    if others:
        return f"{len(others)} of {len(plain.weights)} saved tensors differ, as {others[0]}"
    models = _models(launched.said)
    faults = [_unplanned(model, stacks, schedule) for model, stacks in models.items()]
    return "; ".join(filter(None, faults)) if models else "no report of what ran"


def _unplanned(model: str, stacks: Mapping[str, Ran], schedule: Schedule) -> str:
    """Where other blocks of a model were run again than the keys say, if anywhere."""
    spared = 0
    for stack, ran in stacks.items():
        groups = re.findall(r"\[(.*?)\]", ran.picture)
        again = {int(block) for group in groups for block in group.split()}
        planned = schedule.again(len(re.findall(r"\d+", ran.picture)))
        if not again <= planned:
            return f"{model}.{stack} ran {ran.picture}, planned {sorted(planned)}"
        spared += len(planned - again)
    if not stacks or spared != schedule.keep_last:
        return f"{spared} blocks of {model} were spared, planned {schedule.keep_last}"
    return ""


def _models(said: str) -> dict[str, dict[str, Ran]]:
    """Model -> its stacks, from ``launch``'s last words."""
    models: dict[str, dict[str, Ran]] = {}
    stacks: dict[str, Ran] | None = None
    for line in said.splitlines():
        if model := re.match(rf"segckpt: (\w+), forwards: {STEPS} training", line):
            stacks = models.setdefault(model[1], {})
        elif stacks is None or not line.startswith("segckpt:   "):
            stacks = None
        elif line.startswith("segckpt:     "):
            stack, ran = stacks.popitem()
            picture = f"{ran.picture} {line.removeprefix('segckpt:').strip()}".strip()
            stacks[stack] = Ran(picture, ran.reason)
        else:
            stack, how = line.removeprefix("segckpt:   ").split(": ", 1)
            alone = re.fullmatch(rf"per-block in {STEPS} \((.*)\)", how)
            stacks[stack] = Ran("", alone[1] if alone else "")
    return models


def _shown(said: str, *, reasons: bool) -> str:
    """What ran, stacks that ran alike together; with ``reasons`` why some had no segments."""
    models = _models(said)
    shown = []
    for model, stacks in models.items():
        alike: dict[Ran, list[str]] = {}
        for stack, ran in stacks.items():
            alike.setdefault(ran if reasons else replace(ran, reason=""), []).append(f"`{stack}`")
        parts = [
            f"{', '.join(names)}: {ran.picture}" + (f" ({ran.reason})" if ran.reason else "")
            for ran, names in alike.items()
        ]
        shown.append((f"{model}: " if len(models) > 1 else "") + "; ".join(parts))
    return "<br>".join(shown)


def _run(
    checkout: Path,
    script: Script,
    schedule: Schedule | None,
    processes: int,
    environment: Mapping[str, str],
    folder: Path,
) -> Run:
    """One run of the script; without a schedule as it is, and nothing is recomputed."""
    own = folder / "runs" / script.name
    own.mkdir(parents=True, exist_ok=True)
    output = own / "output"
    for left in output.rglob("*.safetensors"):
        left.unlink()
    words = [sys.executable]
    if processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node", str(processes)]
    if schedule is not None:
        (own / "config.json").write_text(json.dumps(schedule.keys))
        words += ["-m", "simpletuner_segckpt.launch", "--config", str(own / "config.json")]
    words.append(str(checkout / "examples" / script.path))
    words += ["--pretrained_model_name_or_path", script.pipeline, "--output_dir", str(output)]
    words += [OWN_SWITCH] if schedule is not None and schedule.switched else []
    ended = subprocess.run(
        [*words, *COMMON, *script.arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    (own / "last.log").write_text(" ".join(words) + "\n" + ended.stdout + ended.stderr)
    if ended.returncode:
        errors = re.findall(r"^\w*(?:Error|Exception)\b.*", ended.stderr, re.MULTILINE)
        return Run(
            {}, fault=f"exit code {ended.returncode}: {errors[-1] if errors else 'no error'}"
        )
    weights = {
        f"{file.relative_to(output)}:{name}": tensor.numpy().tobytes()
        for file in output.rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    return Run(weights, ended.stderr, "" if weights else "no weights were saved")


def _environment(packages: Path | None, folder: Path) -> dict[str, str]:
    site = folder / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(OPERATORS)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in (site, packages) if path),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),  # no settings or cached data of the user's
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
