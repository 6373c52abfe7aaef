"""Time of `validate` on a valid config, as a ratio to a bare Python process with its libraries.

The bare process imports pydantic and rich and validates one small model. Both are whole
processes, timed in pairs. Prints the median of the pairs' ratios.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

TARGET = 2.0
BARE = (
    "import pydantic, rich.console, rich.text\n"
    "class Small(pydantic.BaseModel):\n    interval: int = 1\n"
    "rich.console.Console().print(Small.model_validate({'interval': 2}))"
)


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        keys = {"model_family": "flux", "gradient_checkpointing_interval": 2}
        config.write_text(json.dumps(keys))
        validate = [sys.executable, "-m", "simpletuner_segckpt.validate", str(config)]
        bare = [sys.executable, "-c", BARE]
        pairs = [(seconds(bare), seconds(validate)) for _ in range(17)][2:]
    ratio = median(b / a for a, b in pairs)
    print(f"bare {median(a for a, _ in pairs):.3f} s, validate {median(b for _, b in pairs):.3f} s")
    print(f"ratio validate / bare: {ratio:.3f} (target at most {TARGET})")
    return int(ratio > TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
