import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)  # xdist runs one worker per core


@pytest.fixture(autouse=True)
def _fresh_seed():
    torch.manual_seed(0)
