"""What `wholebatch plan` plans: a recipe, or a Hugging Face model from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from wholebatch.core.json_files import read_json
from wholebatch.core.plain_files import reason
from wholebatch.errors import MissingExtraError, OptionError, RecipeError

__all__ = ["Subject", "from_configuration", "from_recipe"]

_MOST_SAMPLES = 16  # so many of the data are looked at; larger batches are made by repeating them


@dataclass(frozen=True)
class Subject:
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
        return sum(parameter.numel() for parameter in self.model.parameters())


def from_recipe(name: str | None) -> Subject:
    """A recipe as `wholebatch train` reads it."""
    import torch

    from wholebatch.cli.recipes import EMBEDDED, Batches, load_recipe
    from wholebatch.core.splitting import batch_size_of
    from wholebatch.memory.choose_micro_batch import resize_batch

    recipe = load_recipe(name or next(iter(EMBEDDED)))
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
    batches = Batches(
        recipe.build_data,
        batch_size=min(batch_size, _MOST_SAMPLES),
        seed=0,
        collate=recipe.collate,
    )
    batch = batches.peek()
    batch = resize_batch(batch, min(_MOST_SAMPLES, batch_size_of(batch)))
    return Subject(
        name=recipe.name,
        sample=f"samples like those of {recipe.path.name}",
        model=model,
        optimizer=recipe.build_optimizer(model, lr=None),
        loss=recipe.loss,
        batch=batch,
        batch_size=batch_size,
        precision=precision,
    )


def from_configuration(path: Path, seq: int | None, *, wide: bool) -> Subject:
    """A Hugging Face model: its shapes are in the configuration, no weights.

    Encoders with a decoder (T5) are planned with sequences of the same length for both, other
    encoders (BERT and its kin) with masked language modelling, classifiers of images (ViT) with
    images of the configuration's size, all others as causal language models. `wide`: with
    parameters in float32, whatever they are stored in.
    """
    import torch

    if path.is_dir():  # of a model's repository
        path = path / "config.json"
    stored = _stored(path)
    try:
        from transformers import AutoConfig  # type: ignore[import-not-found, unused-ignore]
        from transformers.models.auto import (  # type: ignore[import-not-found, unused-ignore]
            modeling_auto,
        )
    except ImportError as error:
        raise MissingExtraError("transformers", "transformers", "planning hf: models") from error
    options = {name: value for name, value in stored.items() if name != "model_type"}
    try:
        config = AutoConfig.for_model(stored["model_type"], **options)
        config.use_cache = False
        purpose = _purpose(config, modeling_auto)
        if purpose is None:
            raise RecipeError(
                f"hf:{path}: {stored['model_type']} is planned neither as a language model nor as a"
                " classifier of images: write a recipe with its model, loss and data"
            )
        if wide:
            config.dtype = torch.float32
        with torch.device("meta"):
            model = getattr(modeling_auto, f"AutoModelFor{purpose}").from_config(config)
    except RecipeError:
        raise
    except Exception as error:  # a configuration may be wrong in any way, and so says its class
        reason = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")
        raise RecipeError(f"hf:{path}: no model can be built: {reason}") from error
    model.train()
    if purpose == "ImageClassification":
        sample, batch, loss = _images(config, seq)
    else:
        sample, batch, loss = _sequences(config, seq, purpose)
    return Subject(
        name=f"{path.parent.name if path.stem == 'config' else path.stem} ({stored['model_type']})",
        sample=sample,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        loss=loss,
        batch=batch,
        batch_size=64,
        precision="full" if config.dtype in (torch.bfloat16, torch.float16) else "bf16",
    )


def _stored(path: Path) -> dict[str, Any]:
    try:
        stored = read_json(path)
    except OSError as error:
        raise RecipeError(f"hf:{path}: cannot be read ({reason(error)})") from error
    except ValueError as error:
        raise RecipeError(f"hf:{path}: is not JSON ({error})") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("model_type"), str):
        raise RecipeError(f"hf:{path}: has no model_type, so it is no Hugging Face configuration")
    return stored


def _purpose(config: Any, auto: Any) -> str | None:
    """What the model is trained for, as transformers names its automatic classes."""
    kind = config.model_type
    is_decoder = getattr(config, "is_decoder", False)
    if kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and config.is_encoder_decoder:
        return "Seq2SeqLM"
    if kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_decoder:
        return "MaskedLM"
    if kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "CausalLM"
    if kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "ImageClassification"
    return None


def _sequences(config: Any, seq: int | None, purpose: str) -> tuple[str, Any, Any]:
    """How a sample is called, a batch of one, and the loss, of a language model."""
    import torch

    from wholebatch.core.loss import causal_lm, cross_entropy

    most = getattr(config, "max_position_embeddings", None) or 0
    if seq is not None and 0 < most < seq:
        raise OptionError(f"--seq {seq}: the configuration has {most} positions; give at most that")
    length = seq or max(most, getattr(config, "n_positions", None) or 0)
    if length < 1:
        raise OptionError("--seq: the configuration does not say how long sequences are")

    def masked_lm(model: Any, micro: Any) -> Any:
        return cross_entropy(model(input_ids=micro["input_ids"]).logits, micro["input_ids"])

    def seq2seq(model: Any, micro: Any) -> Any:
        ids = micro["input_ids"]
        return cross_entropy(model(input_ids=ids, decoder_input_ids=ids).logits, ids)

    loss = {"MaskedLM": masked_lm, "Seq2SeqLM": seq2seq}.get(purpose, causal_lm)
    twice = ", and as many for the decoder" if purpose == "Seq2SeqLM" else ""
    batch = {"input_ids": torch.zeros(1, length, dtype=torch.long)}
    return f"sequences of {length} tokens{twice}", batch, loss


def _images(config: Any, seq: int | None) -> tuple[str, Any, Any]:
    """The same of a model that classifies images."""
    import torch

    from wholebatch.core.loss import cross_entropy

    if seq is not None:
        raise OptionError(f"--seq {seq}: is for language models; this one classifies images")
    seen = getattr(config, "vision_config", config)
    size = getattr(seen, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = getattr(seen, "num_channels", 3)

    def loss(model: Any, micro: Any) -> Any:
        return cross_entropy(model(pixel_values=micro["pixel_values"]).logits, micro["labels"])

    batch = {
        "pixel_values": torch.zeros(1, channels, height, width),
        "labels": torch.zeros(1, dtype=torch.long),
    }
    return f"images of {height} × {width}", batch, loss
