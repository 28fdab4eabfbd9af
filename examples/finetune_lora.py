"""Fine-tune a causal language model with LoRA on prompts and answers, in HF's Trainer.

    python examples/finetune_lora.py                             # a tiny Llama, made on the spot
    python examples/finetune_lora.py --model Qwen/Qwen3-0.6B     # a checkpoint of the Hub
    python examples/finetune_lora.py --resume                    # after a stop

Only answers count, and their lengths differ. `exact(Trainer)` divides by the tokens of the window,
whatever the model does with `num_items_in_batch`. Precision, schedule, evaluation, checkpoints and
the progress bar are the Trainer's own. It needs the extras `transformers` and `peft`.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from wholebatch.integrations.transformers import exact


class Bytes:
    """The tokenizer of the tiny model: a token is a byte."""

    def encode(self, text, add_special_tokens=False):
        return list(text.encode())


def tiny_llama():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, initializer_range=0.2, **sizes, **heads))


def questions(first, last):
    """Spell numbers out: the answers have 4 to 26 letters."""
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    return [
        (f"{number}: ", " ".join(digits[int(digit)] for digit in str(number)))
        for number in range(first, last)
    ]


def tokenize(pairs, tokenizer):
    """Label -100 does not count: only answers are learned."""
    samples = []
    for prompt, answer in pairs:
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer_ids = tokenizer.encode(answer, add_special_tokens=False)
        labels = [-100] * len(prompt_ids) + answer_ids
        samples.append({"input_ids": prompt_ids + answer_ids, "labels": labels})
    return samples


def collate(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(key, value):
        rows = [sample[key] + [value] * (longest - len(sample[key])) for sample in samples]
        return torch.tensor(rows)

    # The padding is to the right, and the model is causal: it needs no attention mask.
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a causal language model of the Hub, or a folder")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="micro-batches per update")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--out", default="lora")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model) if args.model else tiny_llama()
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else Bytes()
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    settings = TrainingArguments(
        output_dir=args.out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.steps,
        learning_rate=args.lr,
        warmup_steps=0.1,  # a share of the updates
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        bf16=args.bf16,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=10,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
    )
    trainer = exact(Trainer)(
        model=model,
        args=settings,
        train_dataset=tokenize(questions(0, 1100), tokenizer),
        eval_dataset=tokenize(questions(1100, 1200), tokenizer),
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=args.resume)
    print(f"test loss {trainer.evaluate()['eval_loss']:.3f}")
    model.save_pretrained(args.out)
    return trainer


if __name__ == "__main__":
    main()
