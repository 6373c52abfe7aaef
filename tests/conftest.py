import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings

# The same examples on every run where a failure stops others; new ones at one's own desk.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

torch.set_num_threads(1)  # xdist runs one worker per core


@pytest.fixture(autouse=True)
def _fresh_seed():
    torch.manual_seed(0)


def pytest_collection_finish():
    """What was imported stays: the collector need not go through it again and again."""
    gc.collect()
    gc.freeze()
