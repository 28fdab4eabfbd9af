"""The model of a plan: a recipe's, or that of a configuration.

It has shapes and no bytes. Of a Hugging Face model the configuration alone is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from wholebatch.batch import batch_size_of
from wholebatch.cli.recipes.recipe import load_recipe
from wholebatch.errors import MissingExtraError, OptionError, RecipeError
from wholebatch.losses.causal_lm import causal_lm
from wholebatch.losses.loss import cross_entropy
from wholebatch.memory.choose_micro_batch import resize_batch
from wholebatch.plain_files import load_json

_MOST_SAMPLES = 16  # so many of the data are looked at; larger batches are made by repeating them


@dataclass(frozen=True)
class PlannedModel:
    """A model without bytes, with what a step of it needs."""

    name: str
    sample: str
    model: Any
    optimizer: Any
    loss: Any
    batch: Any
    batch_size: int
    precision: str

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def of_recipe(name: str | None) -> PlannedModel:
    """Return the model of a recipe, as `wholebatch train` reads it."""
    recipe = load_recipe(name)
    try:
        with torch.device("meta"):
            model = recipe.build_model()
    except Exception:  # a model() that needs numbers (loads weights, checks values) gets them
        model = recipe.build_model()
    precision = recipe.defaults.get("precision", "full")
    if precision == "bf16-pure":
        model = model.to(torch.bfloat16)
        precision = "full"
    batch_size = recipe.defaults.get("batch_size", 32)
    batches = recipe.build_batches(min(batch_size, _MOST_SAMPLES), seed=0)
    batch = batches.peek()
    return PlannedModel(
        name=recipe.name,
        sample=f"samples like those of {recipe.path.name}",
        model=model,
        optimizer=recipe.build_optimizer(model, lr=None),
        loss=recipe.loss,
        batch=resize_batch(batch, min(_MOST_SAMPLES, batch_size_of(batch))),
        batch_size=batch_size,
        precision=precision,
    )


def of_file(path: Path, *, seq: int | None, in_float32: bool) -> PlannedModel:
    """Return the model of a `config.json`, or of the folder of a model's repository."""
    path = path / "config.json" if path.is_dir() else path
    name = path.parent.name if path.stem == "config" else path.stem
    stored = load_json(path, RecipeError, f"hf:{path}")
    return of_configuration(stored, name, seq=seq, label=f"hf:{path}", in_float32=in_float32)


def of_configuration(
    stored: Any, name: str, *, seq: int | None, label: str, in_float32: bool
) -> PlannedModel:
    """Return a Hugging Face model: its shapes are in the configuration, no weights.

    Encoders with a decoder (T5) are planned with sequences of the same length for both, other
    encoders (BERT and its kin) with masked language modelling, classifiers of images (ViT) with
    images of the configuration's size, all others as causal language models. With `in_float32`,
    parameters are in float32, whatever they are stored in.
    """
    if not isinstance(stored, dict) or not isinstance(stored.get("model_type"), str):
        raise RecipeError(f"{label}: has no model_type, so it is not a Hugging Face configuration")
    try:
        from transformers import AutoConfig  # type: ignore[import-not-found, unused-ignore]
        from transformers.models.auto import modeling_auto  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("transformers", "transformers", "planning hf: models") from error
    options = {name: value for name, value in stored.items() if name != "model_type"}
    try:
        config = AutoConfig.for_model(stored["model_type"], **options)
        config.use_cache = False
        purpose = _purpose(config, modeling_auto)
        if purpose is None:
            raise RecipeError(
                f"{label}: {stored['model_type']} is neither a language model nor an image "
                "classifier: write a recipe with its model, loss and data"
            )
        if in_float32:
            config.dtype = torch.float32
        with torch.device("meta"):
            model = getattr(modeling_auto, f"AutoModelFor{purpose}").from_config(config)
    except RecipeError:
        raise
    except Exception as error:  # a configuration may be wrong in any way, and so says its class
        reason = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")
        raise RecipeError(f"{label}: no model can be built: {reason}") from error
    model.train()
    if purpose == "ImageClassification":
        sample, batch, loss = _images(config, seq)
    else:
        sample, batch, loss = _sequences(config, seq, purpose)
    return PlannedModel(
        name=f"{name} ({stored['model_type']})",
        sample=sample,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        loss=loss,
        batch=batch,
        batch_size=64,
        precision="full" if config.dtype in (torch.bfloat16, torch.float16) else "bf16",
    )


def _purpose(config: Any, auto: Any) -> str | None:
    """Return the purpose of the model, as transformers names its automatic classes."""
    is_decoder = getattr(config, "is_decoder", False)
    known = {
        "Seq2SeqLM": config.is_encoder_decoder and "SEQ_TO_SEQ_CAUSAL_LM",
        "MaskedLM": not is_decoder and "MASKED_LM",
        "CausalLM": "CAUSAL_LM",
        "ImageClassification": "IMAGE_CLASSIFICATION",
    }
    for purpose, name in known.items():
        if name and config.model_type in getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES"):
            return purpose
    return None


def _sequences(config: Any, seq: int | None, purpose: str) -> tuple[str, Any, Any]:
    """Return the name of a sample, a batch of one, and the loss of a language model."""
    most = getattr(config, "max_position_embeddings", None) or 0
    if seq is not None and 0 < most < seq:
        raise OptionError(f"--seq {seq}: the configuration has {most} positions; give at most that")
    length = seq or max(most, getattr(config, "n_positions", None) or 0)
    if length < 1:
        raise OptionError("--seq: the configuration does not say how long sequences are")

    def masked_lm(model: Any, micro: Any) -> Any:
        return cross_entropy(model(input_ids=micro["input_ids"]).logits, micro["input_ids"], dim=-1)

    def seq2seq(model: Any, micro: Any) -> Any:
        ids = micro["input_ids"]
        return cross_entropy(model(input_ids=ids, decoder_input_ids=ids).logits, ids, dim=-1)

    loss = {"MaskedLM": masked_lm, "Seq2SeqLM": seq2seq}.get(purpose, causal_lm)
    twice = ", and as many for the decoder" if purpose == "Seq2SeqLM" else ""
    batch = {"input_ids": torch.zeros(1, length, dtype=torch.long)}
    return f"sequences of {length} tokens{twice}", batch, loss


def _images(config: Any, seq: int | None) -> tuple[str, Any, Any]:
    """Return the same for a model that classifies images."""
    if seq is not None:
        raise OptionError(f"--seq {seq}: is for language models; this one classifies images")
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = getattr(vision, "num_channels", 3)

    def loss(model: Any, micro: Any) -> Any:
        return cross_entropy(model(pixel_values=micro["pixel_values"]).logits, micro["labels"])

    batch = {
        "pixel_values": torch.zeros(1, channels, height, width),
        "labels": torch.zeros(1, dtype=torch.long),
    }
    return f"images of {height} × {width}", batch, loss
