"""One mode, measured in this process: a request on standard input, a record in a file.

It ends at once when standard input is closed, so that it does not outlive the one who asked.
"""

import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from ..config.file import ConfigFile
from ..config.settings import check_settings
from ..costs.ledger import Ledger, tensors_in
from ..estimator.profile.recorder import loss_of
from ..estimator.workload.parse import Overrides
from ..families.registry import FamilyRegistry
from ..install.apply import Installation, apply
from ..messages.errors import ConfigError
from ..messages.findings import printable
from ..messages.log import logger
from .cells import Cell, Status
from .trial import Trial, trial_of


class Request(BaseModel):
    """What to measure. ``values`` are those of the config file with the keys of the mode.

    file: the config's name, which relative paths in it start from. record: where the ``Cell`` goes.
    """

    mode: str
    keys: dict[str, Any]
    file: str
    values: dict[str, Any]
    overrides: dict[str, Any]
    families: list[str]
    tiny: bool
    steps: int
    warmup: int
    device: str
    record: str


def answer(request: Request) -> Cell:
    """Measure; whatever goes wrong is a status with a reason, and its traceback goes to stderr."""
    found = Cell(mode=request.mode, keys=request.keys)
    try:
        with _warnings() as remarks:
            update = _measured(request)
        return found.model_copy(update={**update, "remarks": tuple(remarks)})
    except Exception as error:
        traceback.print_exc()
        status, reason = _judged(error)
        return found.model_copy(update={"status": status, "reason": printable(reason)})


def _judged(error: Exception) -> tuple[Status, str]:
    if isinstance(error, ConfigError):
        errors = [finding for finding in error.findings if finding.severity == "error"]
        reason = "; ".join(f"`{f.key}` {f.message}" for f in errors)
        unsupported = all(finding.rule == "unsupported-option" for finding in errors)
        return "unsupported" if unsupported else "failed", reason
    first = str(error).strip().partition("\n")[0]
    reason = f"{type(error).__name__}: {first}".removesuffix(": ")
    return "OOM" if _out_of_memory(error) else "failed", reason


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "CUDA error: out of memory" in text  # asked of the driver, not of torch's allocator
        or "CUBLAS_STATUS_ALLOC_FAILED" in text
        or "DefaultCPUAllocator: can't allocate memory" in text
        or "DefaultCPUAllocator: not enough memory" in text
    )


def _measured(request: Request) -> dict[str, Any]:
    settings, findings = check_settings(ConfigFile(request.file, request.values))
    if settings is None:
        raise ConfigError([finding for finding in findings if finding.severity == "error"])
    registry = FamilyRegistry.default(request.families)
    trial = trial_of(settings, registry, Overrides(**request.overrides), request.tiny)
    device = torch.device(request.device)
    limit_threads(request.tiny)
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)
    model, inputs = trial.build(device)
    installation = apply(model, request.values, registry=registry, family=trial.family)
    training = Training(trial, model, inputs, device)
    for _ in range(request.warmup):
        training.step()
    counts = device.type in ("cpu", "mps")  # their allocators do not tell
    if not counts:
        torch.accelerator.reset_peak_memory_stats()
    seconds = [training.timed() for _ in range(request.steps)]
    if counts:
        peak, memory = training.counted(), "counted"
    else:
        peak, memory = torch.accelerator.max_memory_allocated(), "allocator"
    return {
        "status": "measured",
        "seconds": tuple(seconds),
        "peak_bytes": peak,
        "memory": memory,
        "torch": torch.__version__,
        "device": name_of(device),
        **ran(installation),
    }


class Training:
    """Steps of a model: forward, mean square as the loss, backward and an update by AdamW."""

    def __init__(
        self, trial: Trial, model: nn.Module, inputs: Mapping[str, Any], device: torch.device
    ):
        self.model, self.inputs, self.device = model, inputs, device
        self.autocast = trial.autocast
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step(self) -> None:
        autocast = torch.autocast(self.device.type, torch.bfloat16)
        with autocast if self.autocast else nullcontext():
            loss = loss_of(self.model(**self.inputs))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> float:
        """Seconds of a step, until the device has done all of it."""
        self._wait()
        start = time.perf_counter()
        self.step()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def counted(self) -> int:
        """Bytes at the peak of one more step, which takes longer for being counted."""
        still = [*self.model.parameters(), *self.model.buffers()]
        still += tensors_in((dict(self.inputs), list(self.optimizer.state.values())))
        storages = {tensor.untyped_storage() for tensor in still}
        ledger = Ledger()
        with ledger:
            self.step()
        return ledger.peak + sum(storage.nbytes() for storage in storages)


def ran(installation: Installation) -> dict[str, Any]:
    """What the last step did: blocks recomputed, of how many, and a line about each stack.

    A class with setters of its own does not tell; there it is what was planned.
    """
    effect = installation.effect
    observed = {stack.path: stack for stack in effect.stacks} if effect else {}
    recomputed = 0
    told = []
    planned = installation.report.stacks
    for stack in planned:
        found = observed.get(stack.path, stack)
        count = len(found.covered)
        text = f"{count} of {stack.blocks} of {stack.path} recomputed, {found.strategy}"
        if stack.feed_forward and count:
            text += ", feed-forwards only"
        if stack.kept and count:
            text += f", {' and '.join(stack.kept)} kept"
        if found.offloaded:
            text += ", tensors in CPU memory"
        recomputed += count
        told.append(f"{text} ({found.reason})" if found.reason else text)
    return {
        "recomputed": recomputed,
        "blocks": sum(stack.blocks for stack in planned),
        "ran": printable("; ".join(told)),
    }


def limit_threads(tiny: bool) -> None:
    """One thread for tiny models: with more they mostly wait for each other."""
    if tiny:
        torch.set_num_threads(1)


def name_of(device: torch.device) -> str:
    """``NVIDIA H100 80GB HBM3``, or ``CPU, 2 threads``."""
    if device.type == "cpu":
        count = torch.get_num_threads()
        return f"CPU, {count} thread{'' if count == 1 else 's'}"
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named else device.type


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the plugin warns of meanwhile."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = printable(record.getMessage())
            if text not in found:
                found.append(text)

    handler = Keep(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(3)


def main() -> None:
    request = Request.model_validate_json(sys.stdin.readline())
    Thread(target=_end_with_parent, daemon=True).start()
    found = answer(request)
    Path(request.record).write_text(found.model_dump_json(), "utf-8")
    sys.stderr.flush()
    os._exit(0)  # the thread that reads standard input would be waited for


if __name__ == "__main__":
    main()
