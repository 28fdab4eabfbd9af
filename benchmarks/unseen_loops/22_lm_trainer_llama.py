# ruff: noqa
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def dataset(n=36, seed=80):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        k = int(torch.randint(4, 16, (1,), generator=g))
        ids = torch.randint(1, 40, (16,), generator=g)
        labels = ids.clone()
        labels[0] = -100  # nothing predicts the first token
        labels[k:] = -100
        mask = (torch.arange(16) < k).long()
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return rows


def main():
    torch.manual_seed(80)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=2,
        )
        Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=dataset()).train()


if __name__ == "__main__":
    main()
