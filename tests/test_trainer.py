"""The Trainer of transformers with a schedule on its model, and the examples with text models."""

import runpy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from training import keys, warned
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import simpletuner_segckpt

STEPS = 3
EXAMPLES = Path(__file__).parents[1] / "examples"


def make_model():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(LlamaForCausalLM(config), lora)


def train(model, folder, **options):
    """Train with validations in between; the losses, and the adapter that was saved."""
    tokens = torch.randint(3, 50, (8, 9), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:2])
    trainer.train()
    trainer.save_model(folder)
    losses = [entry[key] for entry in trainer.state.log_history for key in entry if "loss" in key]
    return losses, load_file(f"{folder}/adapter_model.safetensors")


OPTIONS = {
    "not told to checkpoint": {},
    "told to": {"gradient_checkpointing": True},
    "told how": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    },
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return train(make_model(), str(tmp_path_factory.mktemp("reference")))


@pytest.mark.parametrize("told", OPTIONS)
def test_the_adapter_is_the_same(told, reference, tmp_path, caplog):
    if told == "told how" and not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("every_n_layers is of a later transformers")
    model = make_model()
    installation = simpletuner_segckpt.apply(model, keys(2, 4))
    losses, adapter = train(model, str(tmp_path), **OPTIONS[told])
    assert losses == reference[0]
    assert adapter.keys() == reference[1].keys()
    assert all(torch.equal(adapter[key], reference[1][key]) for key in adapter)
    [layers] = installation.effect.stacks
    assert layers.drawing == "[0 1] 2 3 [4 5]"
    history = installation.history
    assert (history.trained, history.without_gradients) == (2 * STEPS, STEPS)
    ours = warned(caplog.records)
    assert len(ours) == (told == "told how")
    assert all("some of the model's layers only (every_n_layers?)" in message for message in ours)


def run_example(monkeypatch, capsys, name, *arguments):
    monkeypatch.setattr("sys.argv", ["train.py", "--steps", "2", *arguments])
    runpy.run_path(str(EXAMPLES / name / "train.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--trainer"]])
def test_the_example_of_a_decoder(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    out = run_example(monkeypatch, capsys, "decoder", "--output", str(tmp_path), *options)
    assert "in the last step:\nmodel.layers: segmented\n  [0 1] 2 3 [4 5] 6 7\n" in out
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_the_example_of_a_text_encoder_trained_along(tmp_path, monkeypatch, capsys):
    out = run_example(monkeypatch, capsys, "text_encoder", "--output", str(tmp_path))
    assert "encoder.block: segmented\n  [0 1 2] [3 4 5] 6\n" in out
    assert "transformer_blocks: segmented\n  [0 1] 2 3\n" in out
    assert "single_transformer_blocks: segmented\n  [0 1] 2 3 [4 5] 6 7\n" in out
    for file in ("transformer.safetensors", "text_encoder/adapter_model.safetensors"):
        adapter = load_file(tmp_path / file)
        assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
