"""One epoch of TRL's trainers on a tiny Llama, in one batch or in several, of uneven lengths."""

from __future__ import annotations

import importlib
import os
import random
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

WORDS = 24
SAMPLES = 14
IN_ORDER = {"train_sampling_strategy": "sequential"}
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(WORDS)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1")
    made.chat_template = TEMPLATE
    return made


def llama(kind: Any = LlamaForCausalLM, *, seed: int = 5, **more: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return kind(
        LlamaConfig(
            vocab_size=WORDS,
            num_attention_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
            initializer_range=0.2,  # answers that differ: their gradients do not cancel
            **{**sizes, **more},
        )
    )


def in_float64(model: Any) -> Any:
    """Return the model in float64, with norms that do not compute in float32."""
    for name, module in [*model.named_modules()]:
        if type(module).__name__ == "LlamaRMSNorm":
            norm = torch.nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon)
            norm.weight.data.copy_(module.weight.data)
            norm.weight.requires_grad_(module.weight.requires_grad)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, norm)
    return model.double()


def text(draw: random.Random, least: int, most: int) -> str:
    return " ".join(f"w{draw.randrange(2, WORDS)}" for _ in range(draw.randint(least, most)))


def flat(model: Any) -> Tensor:
    return torch.cat([one.detach().flatten().double() for one in model.parameters()])


def settings(batches: int, samples: int, folder: str) -> dict[str, Any]:
    """The arguments of one update from all samples, in so many batches (the last one smaller)."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return {
        "output_dir": folder,
        "per_device_train_batch_size": -(-samples // (batches * ranks)),
        "gradient_accumulation_steps": batches,
        "num_train_epochs": 1,
        "learning_rate": 8.0,  # float32 must round the update, not the weights
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
    }


def built(
    kind: str,
    make: Any,
    batches: int,
    rows: list[dict[str, Any]],
    options: dict[str, Any],
    *,
    samples: int | None = None,
    **given: Any,
) -> Any:
    """Return a trainer of TRL's, changed by `make`, for one update from all samples."""
    trl: Any = importlib.import_module("trl")
    config, trainer = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
    with tempfile.TemporaryDirectory() as folder:
        args = config(**{**settings(batches, samples or len(rows), folder), **options})
        return make(trainer)(
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            **{"model": llama(), **given},
        )


def pairs() -> list[dict[str, Any]]:
    draw = random.Random(1)
    return [
        {"prompt": text(draw, 1, 4), "chosen": text(draw, 1, 9), "rejected": text(draw, 1, 9)}
        for _ in range(SAMPLES)
    ]


def completions(
    make: Any, batches: int, *, model: Any = None, peft_config: Any = None, **more: Any
) -> Any:
    """Fine-tuning on completions of uneven lengths."""
    draw = random.Random(4)
    rows = [
        {"prompt": text(draw, 1, 12), "completion": " " + text(draw, 1, 9)} for _ in range(SAMPLES)
    ]
    given = {"model": model or llama(), "peft_config": peft_config}
    return built("SFT", make, batches, rows, {**IN_ORDER, **more}, **given)


def dpo(make: Any, batches: int, **more: Any) -> Any:
    reference = llama(seed=6)
    return built("DPO", make, batches, pairs(), {**IN_ORDER, **more}, ref_model=reference)


def reward(make: Any, batches: int, **more: Any) -> Any:
    model = llama(LlamaForSequenceClassification, num_labels=1)
    return built("Reward", make, batches, pairs(), {**IN_ORDER, **more}, model=model)


def kto(make: Any, batches: int, **more: Any) -> Any:
    draw = random.Random(2)
    rows = [
        {"prompt": text(draw, 1, 4), "completion": text(draw, 1, 9), "label": at % 3 != 1}
        for at in range(SAMPLES)
    ]
    options = {**IN_ORDER, "beta": 0.5, **more}
    return built("KTO", make, batches, rows, options, ref_model=llama(seed=6))


def lengths(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between the completions of a prompt."""
    return [float(len(one.split())) + 0.1 * (hash_of(one) % 7) for one in completions]


def hash_of(words: str) -> int:
    return sum((place + 1) * int(word[1:]) for place, word in enumerate(words.split()))


def grpo(make: Any, batches: int, *, rloo: bool = False, **more: Any) -> Any:
    draw = random.Random(4)
    rows = [{"prompt": text(draw, 1, 4)} for _ in range(4)]
    beta = more.pop("beta", 0.0)
    options = {**more, "beta": 0.0, "num_generations": 4, "max_completion_length": 8}
    options["shuffle_dataset"] = False
    kind = "RLOO" if rloo else "GRPO"
    made = built(kind, make, batches, rows, options, samples=16, reward_funcs=lengths)
    if beta:  # TRL would load the reference by its name
        from trl.trainer.utils import add_fused_lm_head

        made.beta, made.ref_model = beta, llama(seed=6).eval()
        add_fused_lm_head(made.ref_model, temperature=made.temperature)
    return made


TRAINERS = {"DPO": dpo, "Reward": reward, "KTO": kto, "GRPO": grpo}


def trained(trainer: Any, updates: int = 1) -> Tensor:
    """What the trainer adds to the weights."""
    start = flat(trainer.model)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer.args.output_dir = folder
        trainer.train()
    assert trainer.state.global_step == updates
    return flat(trainer.model) - start


def off(ours: Tensor, whole: Tensor) -> float:
    return float((ours - whole).norm() / whole.norm())
