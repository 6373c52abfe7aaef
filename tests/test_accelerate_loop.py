"""The example of a loop of one's own on accelerate."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

FOLDER = Path(__file__).parents[1] / "examples" / "accelerate_loop"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("accelerate_loop", FOLDER / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reset_accelerate()
    yield module
    reset_accelerate()


def reset_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_the_same_losses_checkpoints_and_adapter(example, tmp_path, monkeypatch, capsys):
    expected = example.train(tmp_path / "plain", None, epochs=2)
    calls = []
    checkpoint = torch.utils.checkpoint.checkpoint

    def counting(*args, **options):
        calls.append(torch.is_grad_enabled())
        return checkpoint(*args, **options)

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", counting)
    got = example.train(tmp_path / "scheduled", FOLDER / "config.json", epochs=2)
    assert got == expected
    assert got[-1] < got[0]
    # 2 epochs of 9 batches: 4 blocks by themselves once, then 2 segments. None in validation.
    assert calls == [True] * (4 + 17 * 2)
    assert "[0 1] 2 3 [4 5] 6 7" in capsys.readouterr().out
    for file in ("epoch-1/model.safetensors", "adapter/pytorch_lora_weights.safetensors"):
        plain, scheduled = (load_file(tmp_path / run / file) for run in ("plain", "scheduled"))
        assert plain.keys() == scheduled.keys()
        torch.testing.assert_close(scheduled, plain, rtol=0, atol=0)
