# ruff: noqa
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def main():
    torch.manual_seed(85)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=32,
    )
    model = BertForSequenceClassification(config)
    data = [
        {
            "input_ids": torch.randint(0, 50, (12,)),
            "attention_mask": torch.ones(12, dtype=torch.long),
            "labels": int(torch.randint(0, 3, (1,))),
        }
        for _ in range(48)
    ]
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=2,
        )
        trainer = Trainer(model=model, args=args, train_dataset=data)
        trainer.train()


if __name__ == "__main__":
    main()
