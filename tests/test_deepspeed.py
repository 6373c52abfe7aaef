"""Two processes under DeepSpeed's ZeRO. What they do is in ``deepspeed_cases``.

Slow: DeepSpeed takes seconds to import and builds an operator as it starts. It is in a folder of
its own (see the Makefile), since accelerate and PEFT import it wherever it is installed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("deepspeed_cases.py")
FOLDER = Path(sys.prefix, "deepspeed")


@pytest.mark.slow
def test_zero(tmp_path):
    path = tmp_path / "results.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    paths = {"PYTHONPATH": str(FOLDER), "PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [*launch, "--nproc-per-node", "2", CASES, path],
        env=os.environ | paths | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    results = json.loads(path.read_text())
    assert len(results) == 10
    for case, records in results.items():
        for record in records:
            assert "raised" not in record, (case, record["raised"])
            losses, expected = record["losses"]
            assert losses == expected, case
            assert record["differ"] == [], case
            assert record["weights"] > 40
            assert record["learns"] == 3
            if "ffn" in case:
                assert [s[0] for s in record["seen"]] == ["per-block", "off"]
            elif case.startswith("2"):
                assert [s[:2] for s in record["seen"]] == [["segmented", [[0, 1], [2]]]] * 2
            else:
                assert [s[:2] for s in record["seen"]] == [["per-block", [[0], [1], [2]]]] * 2
                assert all("DeepSpeedZeRoOffload" in s[2] for s in record["seen"])
