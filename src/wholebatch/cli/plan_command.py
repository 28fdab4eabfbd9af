"""`wholebatch plan`: predict the peak memory before anything runs.

A plan is made of a recipe, or of a Hugging Face model from its configuration alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from wholebatch.cli.command_options import (
    choice,
    command,
    must_be,
    option,
    recipe_argument,
    switch,
    whole_number,
)
from wholebatch.cli.report.terminal_output import Spinner, console_of, plain_table, say
from wholebatch.cli.run_settings import like_train, precision_of
from wholebatch.errors import MissingExtraError, OptionError, RecipeError
from wholebatch.plain_files import load_json
from wholebatch.readable_sizes import bytes_said

if TYPE_CHECKING:
    from wholebatch.memory.plan import Plan


@dataclass(frozen=True)
class PlanOptions:
    """The options of `wholebatch plan`."""

    recipe: str | None = recipe_argument(
        "A recipe, as for wholebatch train, or the configuration of a Hugging Face language model "
        "or image classifier.",
        "RECIPE|hf:CONFIG.json",
    )
    batch_size: int | None = option(
        None, "N", "Samples per update, over all GPUs.", check=whole_number()
    )
    gpu_memory: str | None = like_train(
        "memory",
        "Memory of each GPU: 24GiB, and the GPU need not be in this machine; or of the GPU here: "
        "0.8 or 80% of it, or what is free now. Default: all of the GPU here, else main memory.",
        None,
    )
    gpus: int = option(1, "N", "Number of data-parallel GPUs.", check=whole_number())
    parallel: str = choice(
        "ddp|fsdp2",
        "ddp: the whole model on every GPU. fsdp2: sharded over them, block by block.",
    )
    sync: str | None = choice(
        "hold|every",
        "With fsdp2: reduce gradients once per update (hold) or after every micro-batch (every). "
        "Default: as a run would choose.",
        default=None,
    )
    precision: str | None = option(
        None,
        "full|fp32|bf16|fp16",
        "Precision of the computation.",
        check=precision_of("full", "fp32", "bf16", "fp16"),
    )
    seq: int | None = option(
        None,
        "TOKENS",
        "Sequence length, for hf: models.",
        check=must_be("a number of tokens, at least 1", lambda value: value >= 1),
    )
    as_json: bool = switch("Print the plan as JSON.", flag="--json")


@command(
    PlanOptions,
    "wholebatch plan my_recipe.py --batch-size 512 --gpu-memory 24GiB",
    "wholebatch plan hf:config.json --gpus 8 --parallel fsdp2 --gpu-memory 80GiB",
)
def plan(options: PlanOptions) -> int:
    """Predict peak memory and recommend a micro-batch. Nothing is trained.

    Exit status: 0 if a micro-batch fits, 1 if none does.
    """
    _check_sharding(options)
    with Spinner(console_of(stderr=options.as_json)) as doing:
        doing("importing torch")
        made = _planned(options, doing)
    if not options.as_json:
        _show(doing.console, made)
    return 0 if made.micro_batch is not None else 1


def _planned(options: PlanOptions, doing: Spinner) -> Plan:
    from wholebatch.compile.fusion import collection_paused
    from wholebatch.memory.fsdp_sharding import Sharding, choose_sync
    from wholebatch.memory.plan import make_plan

    gpus, sync = options.gpus, options.sync
    doing("building the model without its weights")
    subject = _subject(options)
    device, budget, where = _budget(options.gpu_memory)
    size = options.batch_size or subject.batch_size
    if size < gpus:
        raise OptionError(
            f"--gpus {gpus}: a batch of {size} samples leaves some of them without a sample; "
            f"give a --batch-size of at least {gpus}"
        )
    sharding = None
    if options.parallel == "fsdp2":
        sync = sync or choose_sync(subject.model, ranks=gpus, budget=budget)
        sharding = Sharding(gpus, sync)  # type: ignore[arg-type]
    if not options.as_json:
        over = "" if sharding is None else f", sharded by FSDP2 (sync {sharding.sync})"
        about = f": {subject.parameters:,} parameters, {subject.sample}; {gpus} × {where}{over}"
        say(doing.console, Text.assemble((subject.name, "bold"), about))
    doing("predicting the memory of each micro-batch")
    precision = options.precision or subject.precision
    with collection_paused():
        made = make_plan(
            subject.model,
            subject.loss,
            subject.batch,
            batch_size=size,
            budget=budget,
            ranks=gpus,
            optimizer=subject.optimizer,
            precision="full" if precision == "fp32" else precision,
            device=device,
            sharding=sharding,
        )
    if options.as_json:
        described = {"subject": subject.name, "parameters": subject.parameters, "device": device}
        print(json.dumps({**described, **asdict(made)}, indent=2))
    return made


def _check_sharding(options: PlanOptions) -> None:
    parallel, sync = options.parallel, options.sync
    if sync is not None and parallel != "fsdp2":
        raise OptionError(f"--sync {sync}: belongs to --parallel fsdp2")
    if parallel != "ddp" and options.gpus < 2:
        raise OptionError(
            f"--parallel {parallel} with --gpus {options.gpus}: give the number of GPUs, from 2"
        )


def _budget(gpu_memory: str | None) -> tuple[str, int, str]:
    """Return the device to predict for, its bytes, and its description."""
    import torch

    from wholebatch.memory.budget import device_memory, parse_memory

    if gpu_memory is not None:
        budget = parse_memory(gpu_memory, device="cuda")
        return "cuda", budget, f"{bytes_said(budget)} of GPU memory"
    if torch.cuda.is_available():
        budget = device_memory("cuda")
        return "cuda", budget, f"{torch.cuda.get_device_name()} with {bytes_said(budget)}"
    budget = device_memory("cpu")
    return "cpu", budget, f"this machine's {bytes_said(budget)} (no GPU; see --gpu-memory)"


# ------------------------------------------------------------------------------ what is planned

_MOST_SAMPLES = 16  # so many of the data are looked at; larger batches are made by repeating them


@dataclass(frozen=True)
class _Planned:
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


def _subject(options: PlanOptions) -> _Planned:
    recipe, seq = options.recipe, options.seq
    if recipe is not None and recipe.startswith("hf:"):
        return _from_configuration(Path(recipe[3:]), seq, wide=options.parallel == "fsdp2")
    if seq is not None:
        raise OptionError("--seq: is for hf:CONFIG.json; a recipe's data has its own length")
    return _from_recipe(recipe)


def _from_recipe(name: str | None) -> _Planned:
    """Return a recipe as `wholebatch train` reads it."""
    import torch

    from wholebatch.batch import batch_size_of
    from wholebatch.cli.recipes.recipe import load_recipe
    from wholebatch.memory.choose_micro_batch import resize_batch

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
    batch = recipe.build_batches(min(batch_size, _MOST_SAMPLES), seed=0).peek()
    batch = resize_batch(batch, min(_MOST_SAMPLES, batch_size_of(batch)))
    return _Planned(
        name=recipe.name,
        sample=f"samples like those of {recipe.path.name}",
        model=model,
        optimizer=recipe.build_optimizer(model, lr=None),
        loss=recipe.loss,
        batch=batch,
        batch_size=batch_size,
        precision=precision,
    )


def _from_configuration(path: Path, seq: int | None, *, wide: bool) -> _Planned:
    """Return a Hugging Face model: its shapes are in the configuration, no weights.

    Encoders with a decoder (T5) are planned with sequences of the same length for both, other
    encoders (BERT and its kin) with masked language modelling, classifiers of images (ViT) with
    images of the configuration's size, all others as causal language models. `wide`: with
    parameters in float32, whatever they are stored in.
    """
    import torch

    if path.is_dir():  # of a model's repository
        path = path / "config.json"
    stored = load_json(path, RecipeError, f"hf:{path}")
    if not isinstance(stored, dict) or not isinstance(stored.get("model_type"), str):
        raise RecipeError(
            f"hf:{path}: has no model_type, so it is not a Hugging Face configuration"
        )
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
                f"hf:{path}: {stored['model_type']} is neither a language model nor an image "
                "classifier: write a recipe with its model, loss and data"
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
    return _Planned(
        name=f"{path.parent.name if path.stem == 'config' else path.stem} ({stored['model_type']})",
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
    import torch

    from wholebatch.losses.loss import causal_lm, cross_entropy

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
    import torch

    from wholebatch.losses.loss import cross_entropy

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


# ------------------------------------------------------------------------------ on the screen

_COLORS = {
    "parameters": "blue", "gradients": "cyan", "optimizer state": "magenta", "activations": "green",
    "temporaries": "yellow", "buffers": "white", "inputs": "white", "communication": "red",
}  # fmt: skip
_BAR = 42
_NUMBERS = 36  # columns that stand before a bar


def _show(console: Console, plan: Plan) -> None:
    """Print the table of sizes, and the choice."""
    room = min(_BAR, console.width - _NUMBERS)
    has_bars = room >= 8  # on a narrow terminal they would take the place of the numbers
    scale = max(plan.budget, *(point.peak for point in plan.points)) / max(room, 8)
    columns = (">micro-batch", ">peak", ">used", *([""] * has_bars))
    table = plain_table(*columns, padding=(0, 2, 0, 0), header_style="bold")
    for column in table.columns:
        column.overflow = "crop"
    for point in plan.points:
        chosen = point.micro_batch == plan.micro_batch
        style = "bold" if chosen else "" if point.fits else "dim"
        table.add_row(
            Text(("▶ " if chosen else "") + str(point.micro_batch), style),
            Text(bytes_said(point.peak), style),
            Text(f"{100 * point.peak / plan.budget:.0f}%", style if point.fits else "red"),
            *([_bar(point.by_category, scale, limit=round(plan.budget / scale))] * has_bars),
        )
    console.print(table)
    if has_bars:
        console.print(*_legend(plan), sep="  ", highlight=False)
    if plan.micro_batch is None:
        from wholebatch.memory.make_it_fit import refusal

        console.print()
        say(console, refusal(list(plan.rungs), plan.budget), style="red")
    else:
        larger = ""
        if plan.largest != plan.micro_batch:
            larger = f" (up to {plan.largest} would fit, in as many steps, the last one smaller)"
        console.print()
        say(console, Text.assemble((plan.arithmetic(), "bold"), larger))


def _bar(by_category: dict[str, int], scale: float, *, limit: int) -> Text:
    """Return one stacked bar; `│` is where the budget ends."""
    bar = Text()
    filled, at = 0, 0.0
    for name in _COLORS:
        at += by_category.get(name, 0) / scale
        bar.append("█" * (round(at) - filled), style=_COLORS[name])
        filled = round(at)
    if filled > limit:
        return bar[:limit] + Text("│", "bold red") + bar[limit:]
    return bar.append(" " * (limit - filled) + "│")


def _legend(plan: Plan) -> list[Text]:
    """Return the colours of the bars that are large enough to see."""
    return [
        Text.assemble(("█ ", color), name)
        for name, color in _COLORS.items()
        if any(point.by_category.get(name, 0) * 100 > point.peak for point in plan.points)
    ]
