"""GPT-2 in Transformers' Trainer: windows of 4 micro-batches, padded sequences.

python examples/integrations/transformers_trainer.py

This is the script before. These lines make every update that of the whole batch
(docs/integrations/transformers.md):

    - trainer = MyTrainer(model=model, args=args, train_dataset=samples())
    + from wholebatch.integrations.transformers import exact
    + trainer = exact(MyTrainer, units=lambda inputs: (inputs["labels"][:, 1:] != -100).sum())(
    +     model=model, args=args, train_dataset=samples()
    + )
"""

import argparse

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--save", help="write the trained weights here")
options = parser.parse_args()


def samples(number=72, length=12, words=64):
    """Sequences of different lengths; what is padding has the label -100."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, words, (number, length), generator=draw)
    lengths = torch.randint(2, length + 1, (number, 1), generator=draw)
    labels = tokens.masked_fill(torch.arange(length) >= lengths, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


class MyTrainer(Trainer):
    """A loss of one's own, as many have: the mean over the tokens that count, in float64."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss


torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 12, "n_embd": 32, "n_layer": 2, "n_head": 2}
dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout)).double()
args = TrainingArguments(
    output_dir="runs",
    per_device_train_batch_size=options.micro_batch,
    gradient_accumulation_steps=options.steps,
    num_train_epochs=2,
    learning_rate=0.5,
    optim="sgd",
    use_cpu=True,
    dataloader_pin_memory=False,
    disable_tqdm=True,
    save_strategy="no",
    report_to="none",
)
trainer = MyTrainer(model=model, args=args, train_dataset=samples())
trainer.train()

if options.save and trainer.is_world_process_zero():
    torch.save(model.state_dict(), options.save)
