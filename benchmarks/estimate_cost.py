"""What `segckpt estimate` costs: all modes of a real-size model, against the trace of one.

Targets: less than 30 s and 6 GiB for all modes of a model on 2 cores.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = {
    "Wan 2.1 14B": {"model_family": "wan", "model_flavour": "t2v-480p-14b-2.1"},
    "Flux.1 dev": {"model_family": "flux", "model_flavour": "dev"},
    "Kolors (UNet)": {"model_family": "kolors", "model_flavour": "1.0"},
}
MOST_SECONDS, MOST_GIB = 30, 6


def run(config: str, *options: str) -> float:
    """Seconds of one `segckpt estimate`."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "simpletuner_segckpt.commands", "estimate", config, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = made.parse_args()
    missed = False
    print("| model | all modes, s | largest process so far, GiB | with a trace / without |")
    print("| --- | --- | --- | --- |")
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(MODELS[name]), "utf-8")
            seconds = run(str(path))
            traced = run(str(path), "--trace")
        # On Linux in KiB; of all children so far, so that later rows cannot be smaller.
        gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (1 << 20)
        print(f"| {name} | {seconds:.1f} | {gib:.2f} | {traced / seconds:.2f} |", flush=True)
        missed |= seconds > MOST_SECONDS or gib > MOST_GIB
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
