"""Rows of Transformers' packing collator: the update of the same texts as one padded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.coupled.mixtures import InFloat64
from tests.support import EXACT, Seen, distance

transformers = pytest.importorskip("transformers")

LENGTHS = (7, 2, 19, 5, 11, 3, 13, 8, 4)
PACKS = ((0, 1, 2), (3,), (4, 5, 6, 7), (8,))


def language_model() -> nn.Module:
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=40,
        pad_token_id=0,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).double().train()
    return model


def texts() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(3, 60, (length,), generator=generator).tolist()
        # The first tokens of every third text are a prompt: they have no label.
        labels = [-100] * 3 + ids[3:] if length % 3 == 0 else ids
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, filler: int) -> Tensor:
        return torch.tensor([row[name] + [filler] * (width - len(row[name])) for row in rows])

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(width) < lengths[:, None]).long()
    return {
        "input_ids": filled("input_ids", 0),
        "labels": filled("labels", -100),
        "attention_mask": mask,
    }


def packed(rows: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    collate = transformers.DataCollatorWithFlattening()
    return [collate([rows[index] for index in pack]) for pack in PACKS]


def test_packed_rows_make_the_update_of_the_padded_batch() -> None:
    rows = texts()
    batch = padded(rows)
    model: Any = language_model()
    with InFloat64():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
    reference = [parameter.grad for parameter in model.parameters()]
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recorder = Seen(model, optimizer)
    acc = wb.Accumulator(model, optimizer, steps=len(PACKS))
    with InFloat64():
        for micro in acc.over(packed(rows)):
            acc.run(lambda micro: wb.causal_lm(model, micro), micro)
    assert acc.last_step is not None
    assert acc.last_step.units == int((batch["labels"][:, 1:] != -100).sum())
    assert float(acc.last_step.loss) == pytest.approx(float(loss.detach()), rel=1e-12)
    assert distance(recorder.gradients[0], reference) < EXACT
