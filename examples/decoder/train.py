"""A LoRA on a decoder of transformers: Llama, a loop of one's own, three lines for the schedule.

    python examples/decoder/train.py
    python examples/decoder/train.py --trainer    # the same with the library's Trainer

The model is small, with random weights, and learns to go on counting in steps of 1 to 4.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import simpletuner_segckpt

VOCABULARY, LENGTH, BATCH = 64, 24, 4
LEARNING_RATE = 5e-3

# As in a trainer's config.json: of every four layers, the first two are recomputed under one
# checkpoint call and the others run normally.
CONFIG = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_interval": 2,
    "gradient_checkpointing_segment_stride": 4,
}


def build_model() -> PeftModel:
    """Llama in small: eight layers with a LoRA each; its embeddings are trained in full."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
    )
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules="all-linear",
        modules_to_save=["embed_tokens", "lm_head"],
    )
    return get_peft_model(LlamaForCausalLM(config), lora)


def make_dataset(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that go up by one number each, modulo the vocabulary."""
    starts = torch.randint(VOCABULARY, (count, 1))
    steps = torch.randint(1, 5, (count, 1))
    rows = (starts + steps * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


def train_in_a_loop(model: PeftModel, data: list[dict[str, torch.Tensor]], steps: int) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    model.train()
    for number in range(steps):
        rows = [data[(number * BATCH + i) % len(data)] for i in range(BATCH)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (0, steps - 1):
            print(f"step {number + 1}: loss {loss.item():.4f}")


def train_with_trainer(
    model: PeftModel, data: list[dict[str, torch.Tensor]], steps: int, output: Path
) -> None:
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        logging_steps=max(1, steps - 1),
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=True,  # may stand here: the schedule stays what the config says
    )
    Trainer(model=model, args=arguments, train_dataset=data).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--trainer", action="store_true", help="train with transformers' Trainer")
    parser.add_argument("--output", type=Path, default=Path("runs/decoder"))
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build_model()
    data = make_dataset(64)

    # The import above, this line, and (optionally) reading what was installed and what ran.
    installation = simpletuner_segckpt.apply(model, CONFIG)
    print(f"installed:\n{installation.report}\n")

    if options.trainer:
        train_with_trainer(model, data, options.steps, options.output)
    else:
        train_in_a_loop(model, data, options.steps)
    print(f"\nin the last step:\n{installation.effect}")

    # Generation is as it was: without gradients nothing is recomputed, and the cache is used.
    model.eval()
    prompt = data[0]["input_ids"][None, :6].to(model.device)
    continued = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)
    print(f"\n{prompt[0].tolist()} goes on as {continued[0, 6:].tolist()}")
    model.save_pretrained(options.output)


if __name__ == "__main__":
    main()
