"""Models of transformers with their dropout on pass the look; a mean over other units does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from tests.support import sgd

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2}
TOKENS = {"vocab_size": 50}


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 50, (20, 12), generator=generator)
    lengths = 12 - torch.arange(20) % 6
    mask = (torch.arange(12) < lengths[:, None]).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
        "label": torch.randint(0, 2, (20,), generator=generator),
        "pixels": torch.randn(20, 3, 8, 8, generator=generator),
    }


def causal(model: Any, micro: Any) -> wb.Loss:
    return wb.causal_lm(model, {k: micro[k] for k in ("input_ids", "attention_mask", "labels")})


def classified(model: Any, micro: Any) -> wb.Loss:
    out = model(input_ids=micro["input_ids"], attention_mask=micro["attention_mask"])
    return wb.cross_entropy(out.logits, micro["label"])


def translated(model: Any, micro: Any) -> wb.Loss:
    out = model(**{k: micro[k] for k in ("input_ids", "attention_mask", "labels")})
    return wb.cross_entropy(out.logits, micro["labels"])


def seen(model: Any, micro: Any) -> wb.Loss:
    return wb.cross_entropy(model(micro["pixels"]).logits, micro["label"])


def gpt2(**checkpoints: Any) -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, **TOKENS)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)
        model.enable_input_require_grads()
    return model


def bert() -> nn.Module:
    config = transformers.BertConfig(**SMALL, **HEADS, **TOKENS)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, **TOKENS, decoder_start_token_id=0)
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def vit() -> nn.Module:
    sizes = {"image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.1}
    model: nn.Module = transformers.ViTForImageClassification(
        transformers.ViTConfig(**SMALL, **HEADS, **sizes)
    )
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], wb.Loss]]] = {
    "gpt2": (gpt2, causal),
    "gpt2, checkpoints": (lambda: gpt2(use_reentrant=False), causal),
    "bert": (bert, classified),
    "t5": (t5, translated),
    "vit": (vit, seen),
}


@pytest.mark.parametrize(
    ("name", "precision"), [("gpt2", "full"), *((name, "bf16") for name in CASES)]
)
def test_no_alarm(name: str, precision: str) -> None:
    make, loss = CASES[name]
    torch.manual_seed(0)
    model = make().train()
    train = wb.WholeBatch(model, sgd(model), loss=loss, micro_batch=9, precision=precision)
    assert train.step(batch()).update


def test_the_mean_of_a_model_times_its_samples_is_warned_of() -> None:
    def mean(model: Any, micro: Any) -> wb.Loss:
        out = model(**{k: micro[k] for k in ("input_ids", "attention_mask", "labels")})
        return wb.mean_loss(out.loss, len(micro["labels"]))

    model = gpt2().train()
    train = wb.WholeBatch(model, sgd(model), loss=mean, micro_batch=18)
    with pytest.warns(UserWarning, match="153 and 21 .* units= of 18 and 2"):
        train.step(batch())
