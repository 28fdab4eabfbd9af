"""QLoRA: 4-bit weights of bitsandbytes below PEFT's adapters, recorded, through SFTTrainer."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("trl")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

import bitsandbytes
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from tests.integrations import trl_training as runs
from tests.integrations.conftest import Traces
from wholebatch.integrations.transformers import exact

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
COMPLETIONS: dict[str, Any] = {
    "completion_only_loss": True,
    "max_length": 9,  # leaves rows without any label
    "learning_rate": 0.1,
    "pad_to_multiple_of": 32,
    "num_train_epochs": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    # Layers of 64 inputs and more are blocks of nf4.
    runs.llama(hidden_size=64, intermediate_size=128, num_key_value_heads=1).save_pretrained(place)
    return place


def in_four_bits(folder: Path) -> Any:
    """Return a QLoRA model as its users load it."""
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    loaded = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=four_bits, device_map="cpu", dtype=torch.float32
    )
    torch.manual_seed(2)
    return get_peft_model(loaded, LORA)


def in_float64(model: Any) -> Any:
    """Return the model with its weights dequantised, in float64."""
    wide = copy.deepcopy(model)
    for module in wide.modules():
        if isinstance(base := getattr(module, "base_layer", None), bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(base.weight, base.weight.quant_state)
            linear = nn.Linear(base.in_features, base.out_features, bias=False)
            linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
            module.base_layer = linear
    return runs.in_float64(wide)


def trained(trainer: Any) -> Tensor:
    for one in trainer.model.parameters():
        if one.dtype is torch.bfloat16:  # TRL makes adapters of a 4-bit model so
            one.data = one.data.float()
    start = _adapters(trainer.model)
    trainer.train()
    return _adapters(trainer.model) - start


def _adapters(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters() if p.requires_grad])


def test_recorded_windows_are_as_near_to_float64_as_the_whole_batch(
    folder: Path, traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="wholebatch")
    options = {**COMPLETIONS, "gradient_checkpointing": True}
    model = in_four_bits(folder)

    def update(make: Any, batches: int, of: Any) -> Tensor:
        return trained(runs.completions(make, batches, model=copy.deepcopy(of), **options))

    def of(execute: Any) -> Any:
        return lambda kind: exact(kind, execute=execute)

    truth = update(of("eager"), 1, in_float64(model))
    whole = update(of("eager"), 1, model)
    caplog.clear()
    ours = update(of("compile"), 4, model)
    assert "micro-steps are now one traced graph" in caplog.text
    assert runs.off(ours, truth) <= max(1e-6, 1.25 * runs.off(whole, truth))
