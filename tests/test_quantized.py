"""LoRA on quantised bases, in a process of its own.

PEFT imports torchao and bitsandbytes wherever they are installed, which takes some seconds. So they
are in a folder of their own (see the Makefile), where only this finds them.
"""

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("quantized_cases.py")
FOLDER = Path(sys.prefix, "quantized")


def test_bases_that_are_quantised():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", CASES],
        env=os.environ | {"PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"},
        cwd=CASES.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
