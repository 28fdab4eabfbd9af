"""Kinds of models whose operations torch's shape functions, or its fakes, do not tell truly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.memory.models import loss, vectors
from wholebatch.errors import UnsupportedError
from wholebatch.losses.loss import Loss, cross_entropy
from wholebatch.memory import MemoryMeter, predict_peak, repeated_blocks, with_checkpoints
from wholebatch.memory.plain_window import PlainWindow

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def assert_exact(
    model: nn.Module,
    micro: Any,
    *,
    optimizer: Any = None,
    loss: Any = loss,
    precision: str = "full",
) -> None:
    """What is predicted is what a real window takes, to the byte."""
    made = (optimizer or torch.optim.AdamW)(model.parameters())
    predicted = predict_peak(model, loss, micro, optimizer=made, precision=precision)
    with MemoryMeter(model=model, optimizer=made) as meter:
        window = PlainWindow(model, loss, optimizer=made, precision=precision)
        window.run([micro])
        meter.reset_peak()
        window.run([micro] * 3)
    assert (predicted.peak, predicted.by_category) == (meter.peak, meter.peak_by_category)


@pytest.mark.parametrize("kind", ["fused", "reads"])
def test_what_an_optimizer_does_with_wide_gradients_of_16_bit_parameters(kind: str) -> None:
    """Whether it takes them is tried out on real tensors, also in a prediction."""
    model = nn.Sequential(nn.Linear(20, 40), nn.Linear(40, 5)).to(torch.bfloat16)
    micro = {k: v.bfloat16() if v.is_floating_point() else v for k, v in vectors(3).items()}
    fused = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)  # noqa: E731
    assert_exact(model, micro, optimizer=fused if kind == "fused" else torch.optim.Adafactor)


def language_model(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=options.pop("use_cache", False),
    )
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def sequences(number: int, padded: bool) -> dict[str, Tensor]:
    mask = torch.ones(number, 12, dtype=torch.long)
    mask[0, 9:] = 0 if padded else 1
    ids = torch.randint(0, 64, (number, 12))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def masked(model: nn.Module, micro: dict[str, Tensor]) -> Loss:
    ids, mask = micro["input_ids"], micro["attention_mask"]
    return cross_entropy(model(input_ids=ids, attention_mask=mask).logits, micro["labels"])


def unmasked(model: nn.Module, micro: dict[str, Tensor]) -> Loss:
    return cross_entropy(model(input_ids=micro["input_ids"]).logits, micro["labels"])


def test_a_mask_of_padding_is_made_as_in_a_real_run() -> None:
    assert_exact(language_model(), sequences(3, True), loss=masked)


@pytest.mark.parametrize("loss", [masked, unmasked])
def test_a_causal_model_without_padding_is_predicted_with_one_mask(loss: Any) -> None:
    """Transformers cannot read fake positions, and so takes them for packed sequences."""
    model, micro = language_model(), sequences(3, False)
    predicted = predict_peak(model, loss, micro, optimizer=torch.optim.AdamW(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryMeter(model=model, optimizer=optimizer) as meter:
        window = PlainWindow(model, loss, optimizer=optimizer)
        window.run([micro])
        meter.reset_peak()
        window.run([micro] * 3)
    assert meter.peak <= predicted.peak <= 1.05 * meter.peak


def test_checkpointed_blocks_write_no_cache() -> None:
    """A model that makes a cache of keys and values would write it again in the backward."""
    model = language_model(use_cache=True, attn_implementation="eager")
    plain = copy.deepcopy(model)
    with_checkpoints(model)
    micro = sequences(3, True)
    assert_exact(model, micro, loss=masked)
    plain.load_state_dict(model.state_dict())
    for one in (plain, model):
        one.zero_grad()
        masked(one, micro).total.backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    kept = plain(micro["input_ids"]).past_key_values
    with pytest.raises(UnsupportedError, match="LlamaDecoderLayer is checkpointed and got a cache"):
        model(micro["input_ids"], past_key_values=kept)


class Tower(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        made = (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(layers))
        self.layers = nn.ModuleList(made)


def test_towers_that_are_stacks_are_not_blocks_themselves() -> None:
    towers = nn.ModuleDict({"image": Tower(3), "text": Tower(4)})
    expected = [f"image.layers.{k}" for k in range(3)] + [f"text.layers.{k}" for k in range(4)]
    assert repeated_blocks(towers) == expected
    assert repeated_blocks(nn.ModuleList([Tower(1), Tower(1)])) == ["0", "1"]
