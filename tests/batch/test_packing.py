"""Packed micro-batches: several sequences in a row, and the update of the padded batch."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.coupled.mixtures import InFloat64
from tests.support import EXACT, Seen, distance
from wholebatch.errors import OptionError, SplitError, UnsupportedError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]

Batch = dict[str, Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 40,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def language_model(kind: str = "Llama", **more: Any) -> nn.Module:
    import transformers

    torch.manual_seed(2)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).double().train()
    return model


def texts(number: int = 17, longest: int = 23) -> Batch:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, longest + 1, (number,), generator=generator)
    lengths[3] = longest
    mask = (torch.arange(longest) < lengths[:, None]).long()
    ids = torch.randint(3, 60, (number, longest), generator=generator) * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 4] = -100  # some tokens do not count
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradient(model: Any, batch: Batch, micro_batch: Any, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = Seen(model, optimizer)
    loss = options.pop("loss", wb.causal_lm)
    with InFloat64():
        train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=micro_batch, **options)
        step = train.step(batch)
    return step, seen.gradients[0]


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        *(("Llama", by) for by in [(64, True), (64, 23), (200, 50), (24, True), (1000, 1000)]),
        ("Qwen3", (64, 23)),
        ("Mistral", (200, 50)),
    ],
)
def test_the_update_is_that_of_the_padded_batch(kind: str, by: tuple[int, Any]) -> None:
    batch = texts()
    padded, reference = gradient(language_model(kind), batch, 17)
    step, ours = gradient(language_model(kind), batch, wb.tokens(by[0], pack=by[1]))
    assert distance(ours, reference) <= EXACT
    assert step.units == padded.units
    assert step.loss == pytest.approx(padded.loss, rel=EXACT)
    sorted_ = gradient(language_model(kind), batch, wb.tokens(max(by[0], 23)))[1]
    assert distance(sorted_, reference) <= EXACT


def test_batches_of_transformers_collator_are_divided_between_sequences() -> None:
    from transformers import DataCollatorWithFlattening

    batch = texts()
    features = [
        {
            "input_ids": ids[: int(mask.sum())].tolist(),
            "labels": labels[: int(mask.sum())].tolist(),
        }
        for ids, mask, labels in zip(*batch.values(), strict=True)
    ]
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(
        features
    )
    packed = {n: v for n, v in packed.items() if n in ("input_ids", "labels", "position_ids")}
    reference = gradient(language_model(), batch, 17)[1]
    assert distance(gradient(language_model(), packed, 1)[1], reference) <= EXACT
    for budget in (23, 64):
        micros = wb.split(packed, wb.tokens(budget, pack=23))
        assert len(micros) > 1
        ours = gradient(language_model(), packed, wb.tokens(budget, pack=23))[1]
        assert distance(ours, reference) <= EXACT


def test_nothing_is_lost_and_shapes_are_few() -> None:
    batch = texts(200, 40)
    lengths = batch["attention_mask"].sum(1).tolist()
    micros = wb.split(batch, wb.tokens(512, pack=True))
    shapes = [tuple(micro["input_ids"].shape) for micro in micros]
    assert len(set(shapes[:-1])) == 1
    assert shapes[0] == (512 // 48, 48)
    assert sum(rows * wide for rows, wide in shapes) <= 1.06 * sum(lengths)
    wanted = sorted(
        tuple(ids[:n].tolist()) for ids, n in zip(batch["input_ids"], lengths, strict=True)
    )
    found = []
    for micro in micros:
        assert micro.keys() == {"input_ids", "labels", "position_ids"}
        assert int(micro["position_ids"].max()) < 40
        for ids, places in zip(micro["input_ids"], micro["position_ids"], strict=True):
            starts = [0, *((places.diff() != 1).nonzero().flatten() + 1).tolist(), len(ids)]
            found += [tuple(ids[a:b].tolist()) for a, b in pairwise(starts)]
        assert bool((micro["labels"][micro["position_ids"] == 0] == -100).all())
    assert sorted(one for one in found if any(one)) == wanted
    labels = sum(int((micro["labels"] != -100).sum()) for micro in micros)
    assert labels == int((batch["labels"][:, 1:] != -100).sum())


class Own(nn.Module):
    """A model of one's own that reads `position_ids`, with labels that are shifted already."""

    def __init__(self, *, reads: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.token, self.place = nn.Embedding(60, 16), nn.Embedding(40, 16)
        self.qkv, self.read = nn.Linear(16, 48), nn.Linear(16, 60)
        self.reads = reads

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        x = self.token(ids) + self.place(places)
        q, k, v = self.qkv(x).chunk(3, -1)
        sequence = (places == 0).cumsum(1)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        if self.reads:
            mask = mask & (sequence[:, :, None] == sequence[:, None])
        out: Tensor = self.read(x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return out


def shifted(model: Any, micro: Batch) -> wb.Loss:
    places = micro.get("position_ids")
    if places is None:
        places = torch.arange(micro["input_ids"].shape[1]).expand_as(micro["input_ids"])
    return wb.cross_entropy(model(micro["input_ids"], places), micro["shift_labels"])


def own_texts() -> Batch:
    batch = texts()
    labels = batch["labels"].roll(-1, 1)
    labels[:, -1] = 7
    labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "shift_labels": labels,
    }


def test_a_model_of_ones_own() -> None:
    batch = own_texts()
    reference = gradient(Own().double(), batch, 17, loss=shifted)[1]
    ours = gradient(Own().double(), batch, wb.tokens(64, pack=True), loss=shifted)[1]
    assert distance(ours, reference) <= EXACT


def test_a_model_that_looks_beyond_its_sequence_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not keep the sequences of a row apart"):
        gradient(Own(reads=False).double(), own_texts(), wb.tokens(64, pack=True), loss=shifted)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        cached = language_model(use_cache=True)
        gradient(cached, texts(), wb.tokens(64, pack=True))

    def named_labels(model: Any, micro: Batch) -> wb.Loss:
        return shifted(model, {**micro, "shift_labels": micro["labels"]})

    batch = own_texts()
    batch["labels"] = batch.pop("shift_labels")
    with pytest.raises(UnsupportedError, match="Name labels that are shifted already shift_labels"):
        gradient(Own().double(), batch, wb.tokens(64, pack=True), loss=named_labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_not_taken_for_a_mistake(dtype: torch.dtype) -> None:
    model = language_model().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    by, precision = wb.tokens(64, pack=True), "bf16" if dtype is torch.float32 else "full"
    train = wb.WholeBatch(model, optimizer, loss=wb.causal_lm, micro_batch=by, precision=precision)
    padded = wb.WholeBatch(model, optimizer, loss=wb.causal_lm, micro_batch=17, precision=precision)
    assert train.step(texts()).loss == pytest.approx(padded.step(texts()).loss, rel=1e-2)


def test_what_cannot_be_packed_is_said() -> None:
    batch = texts()
    with pytest.raises(SplitError, match=r"'weight' is \(17,\).*one value for each token"):
        wb.split({**batch, "weight": torch.ones(17)}, wb.tokens(64, pack=True))
    with pytest.raises(SplitError, match="padding before its last token; pad on the right"):
        left = {name: leaf.flip(1) for name, leaf in batch.items()}
        wb.split(left, wb.tokens(64, pack=True))
    with pytest.raises(SplitError, match="23 tokens long, more than the budget of 20"):
        wb.split(batch, wb.tokens(20, pack=True))
    with pytest.raises(SplitError, match=r"pack=16\): a sample is 23 tokens long"):
        wb.split(batch, wb.tokens(64, pack=16))
    with pytest.raises(SplitError, match="must be a mapping of tensors"):
        wb.split((batch["input_ids"][:, 0],), wb.tokens(64, pack=True))
    for options in ({"pack": 0}, {"pack": True, "multiple": 8}, {"pack": True, "sort": False}):
        with pytest.raises(OptionError, match="pack="):
            wb.tokens(64, **options)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_in_the_trainer(tmp_path: Any) -> None:
    from transformers import Trainer

    from tests.coupled.mixtures import trained
    from wholebatch.integrations.transformers import exact

    batch, options = texts(12), {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    once = {"per_device_train_batch_size": 12}
    reference = trained(Trainer, language_model(), batch, str(tmp_path), **once)
    kind = exact(Trainer, micro_batch=wb.tokens(64, pack=True))
    ours = trained(kind, language_model(), batch, str(tmp_path), **options)
    assert distance(ours, reference) <= EXACT
