"""HF Trainer fine-tunes BERT with a gradient that is too large by the accumulation steps.

    python benchmarks/trainer_bert.py

The first update of `BertForSequenceClassification` on 16 samples: undivided, in 4 micro-batches by
HF Trainer, and in 4 micro-batches by `exact(Trainer)`. Prints the loss and the gradient norm that
the trainer logs. The forward of BERT takes `**kwargs`, so Trainer hands it `num_items_in_batch`
and leaves the division to it; BERT's loss ignores the number.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
os.environ |= {"HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from wholebatch.integrations.transformers import exact  # noqa: E402

SAMPLES, STEPS = 16, 4


def first_update(kind: Any, steps: int) -> tuple[float, float]:
    """Return the loss and the gradient norm that a Trainer logs for one update of all samples."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_labels": 3}
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    model = BertForSequenceClassification(config)
    words = torch.randint(0, 100, (SAMPLES, 12))
    data = [{"input_ids": word, "labels": index % 3} for index, word in enumerate(words)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=SAMPLES // steps,
            gradient_accumulation_steps=steps,
            max_steps=1,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = kind(model=model, args=arguments, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    logged = trainer.state.log_history[0]
    return logged["loss"], logged["grad_norm"]


def main() -> None:
    print(f"transformers {transformers.__version__}, BertForSequenceClassification, first update")
    rows = {
        "one batch of 16": (Trainer, 1),
        "Trainer, 4 micro-batches of 4": (Trainer, STEPS),
        "exact(Trainer), 4 of 4": (exact(Trainer), STEPS),
    }
    for name, (kind, steps) in rows.items():
        loss, norm = first_update(kind, steps)
        print(f"{name:32} loss {loss:.3f}  gradient norm {norm:.3f}")


if __name__ == "__main__":
    main()
