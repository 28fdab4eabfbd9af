"""`wholebatch plan`: predict the peak memory before anything runs.

A plan is made of a recipe, or of a Hugging Face model from its configuration alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
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
    positive_number,
    recipe_argument,
    switch,
    whole_number,
    with_commas,
)
from wholebatch.cli.report.terminal_output import Spinner, console_of, plain_table, say
from wholebatch.cli.run_settings import like_train, precision_of
from wholebatch.errors import MissingExtraError, OptionError, RecipeError
from wholebatch.gpus import GPUS, Gpu, find_gpu
from wholebatch.plain_files import load_json
from wholebatch.readable_sizes import bytes_said

if TYPE_CHECKING:
    from wholebatch.memory.plan import Plan


def _gpu(text: str, label: str) -> Gpu:
    try:
        return find_gpu(text)
    except OptionError as error:
        raise OptionError(f"{label} {error}") from None


def _price(text: str) -> float:
    return positive_number(float(text), "")


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
    gpu: Gpu | None = option(
        None,
        "NAME",
        f"The GPU by name: {', '.join(gpu.name for gpu in GPUS)}. Its memory is known.",
        typed=str | None,
        check=_gpu,
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
        "gathered|hold|every",
        "With fsdp2: reduce gradients once per update (hold), or after every micro-batch (every); "
        "gathered keeps parameters whole, too. Default: as a run would choose.",
        default=None,
    )
    precision: str | None = option(
        None,
        "full|fp32|bf16|fp16",
        "Precision of the computation.",
        check=precision_of("full", "fp32", "bf16", "fp16"),
    )
    checkpointing: bool = switch("Gradient checkpointing of the model's repeated blocks.")
    largest: str | None = choice(
        "gpt|llama|vit",
        "Instead of a RECIPE: the largest model of this family, by width and depth, that fits.",
        default=None,
    )
    price: list[float] | None = option(
        None,
        "PRICE[,LARGER]",
        "Price of a GPU hour: shows the cost of an epoch, and beside it that of the undivided "
        "batch on a larger GPU (whose price may follow). Needs --gpu.",
        typed=str | None,
        check=with_commas(_price, "one or two prices above 0, such as 0.35 or 0.35,2.50"),
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
    'wholebatch plan my_recipe.py --batch-size 512 --gpu "RTX 4090"',
    "wholebatch plan hf:config.json --gpus 8 --parallel fsdp2 --gpu-memory 80GiB",
    'wholebatch plan --largest llama --gpu "A100 80" --checkpointing',
)
def plan(options: PlanOptions) -> int:
    """Predict peak memory and recommend a micro-batch. Nothing is trained.

    Exit status: 0 if a micro-batch fits, 1 if none does.
    """
    _check(options)
    with Spinner(console_of(stderr=options.as_json)) as doing:
        doing("importing torch")
        made = _planned(options, doing)
    return 0 if made.micro_batch is not None else 1


def _planned(options: PlanOptions, doing: Spinner) -> Plan:
    from wholebatch.compile.fusion import collection_paused
    from wholebatch.memory.fsdp_sharding import Sharding, choose_sync
    from wholebatch.memory.plan import make_plan

    gpus, sync = options.gpus, options.sync
    device, budget, where = _budget(options)
    doing("building the model without its weights")
    with collection_paused():
        subject = _subject(options, device, budget, doing)
    size = options.batch_size or max(subject.batch_size, gpus)
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
    with collection_paused():
        made = make_plan(
            subject.model,
            subject.loss,
            subject.batch,
            batch_size=size,
            budget=budget,
            ranks=gpus,
            optimizer=subject.optimizer,
            precision=subject.precision,
            device=device,
            sharding=sharding,
            checkpoints=options.checkpointing,
            beside_undivided=options.price is not None,
        )
    cost = _cost(options, subject, made)
    if options.as_json:
        described = {"subject": subject.name, "parameters": subject.parameters, "device": device}
        print(json.dumps({**described, **asdict(made), "cost": cost}, indent=2))
    else:
        doing.stop()
        _show(doing.console, made)
        for line in cost:
            say(doing.console, line)
    return made


def _check(options: PlanOptions) -> None:
    """Refuse options that do not go together."""
    parallel, sync = options.parallel, options.sync
    if sync is not None and parallel != "fsdp2":
        raise OptionError(f"--sync {sync}: belongs to --parallel fsdp2")
    if parallel != "ddp" and options.gpus < 2:
        raise OptionError(
            f"--parallel {parallel} with --gpus {options.gpus}: give the number of GPUs, from 2"
        )
    if options.gpu is not None and options.gpu_memory is not None:
        raise OptionError("--gpu and --gpu-memory: give one of them")
    if options.largest is not None and options.recipe is not None:
        raise OptionError(f"--largest {options.largest}: takes the place of {options.recipe}")
    if options.price is not None and options.gpu is None:
        raise OptionError("--price: also give --gpu, whose speed is known; tune measures others")
    if options.price is not None and len(options.price) > 2:
        raise OptionError("--price: must be one or two prices, such as 0.35 or 0.35,2.50")


def _budget(options: PlanOptions) -> tuple[str, int, str]:
    """Return the device to predict for, its bytes, and its description."""
    import torch

    from wholebatch.memory.budget import device_memory, parse_memory

    if options.gpu is not None:
        return "cuda", options.gpu.memory, f"{options.gpu.name} with {options.gpu.gib:g} GiB"
    if options.gpu_memory is not None:
        budget = parse_memory(options.gpu_memory, device="cuda")
        return "cuda", budget, f"{bytes_said(budget)} of GPU memory"
    if torch.cuda.is_available():
        budget = device_memory("cuda")
        return "cuda", budget, f"{torch.cuda.get_device_name()} with {bytes_said(budget)}"
    budget = device_memory("cpu")
    return "cpu", budget, f"this machine's {bytes_said(budget)} (no GPU; see --gpu)"


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
    epoch: int | None = None
    """The samples of an epoch, where they are known."""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def _subject(options: PlanOptions, device: str, budget: int, doing: Spinner) -> _Planned:
    recipe, seq, wide = options.recipe, options.seq, options.parallel == "fsdp2"
    if options.largest is not None:
        found = _largest_of(options, device, budget, doing)
    elif recipe is not None and recipe.startswith("hf:"):
        path = Path(recipe[3:])
        path = path / "config.json" if path.is_dir() else path  # of a model's repository
        name = path.parent.name if path.stem == "config" else path.stem
        stored = load_json(path, RecipeError, f"hf:{path}")
        found = _from_configuration(stored, name, seq, label=f"hf:{path}", wide=wide)
    elif seq is not None:
        raise OptionError("--seq: is for hf:CONFIG.json; a recipe's data has its own length")
    else:
        found = _from_recipe(recipe)
    return replace(found, precision=options.precision or found.precision)


_SHAPES = (
    (256, 4), (384, 6), (512, 8), (768, 12), (1024, 16), (1024, 24), (1280, 36), (1600, 48),
    (2048, 24), (2560, 32), (3072, 28), (4096, 32), (5120, 40), (6144, 48), (8192, 80), (12288, 96),
)  # fmt: skip
"""Widths and depths of published models."""
_BYTES_PER_PARAMETER = 16  # with its gradient and Adam's two moments, in float32


def _configuration(family: str, width: int, depth: int, seq: int) -> dict[str, Any]:
    """Return the configuration of a model of this family, as Hugging Face names its parts."""
    if family == "gpt":
        sizes = {"n_embd": width, "n_layer": depth, "n_head": width // 64, "n_positions": seq}
        return {"model_type": "gpt2", **sizes}
    common = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // 64}
    if family == "vit":
        return {"model_type": "vit", **common, "intermediate_size": 4 * width}
    inner = -(-8 * width // 3 // 256) * 256
    more = {"intermediate_size": inner, "max_position_embeddings": seq, "vocab_size": 32_000}
    return {"model_type": "llama", **common, **more}


def _largest_of(options: PlanOptions, device: str, budget: int, doing: Spinner) -> _Planned:
    """Return the largest model of a family of which one sample fits."""
    from wholebatch.memory.choose_micro_batch import resize_batch
    from wholebatch.memory.fsdp_sharding import Sharding
    from wholebatch.memory.predict import simulating

    family, wide = str(options.largest), options.parallel == "fsdp2"
    seq = None if family == "vit" else options.seq or 1024
    sharding = Sharding(options.gpus, "every") if wide else None
    for width, depth in reversed(_SHAPES):
        least = 12 * depth * width**2 * _BYTES_PER_PARAMETER / (options.gpus if wide else 1)
        if least > budget:
            continue
        name = f"{family} of width {width} and depth {depth}"
        doing(f"trying a {name}")
        stored = _configuration(family, width, depth, seq or 0)
        found = _from_configuration(stored, name, seq, label=name, wide=wide)
        precision = options.precision or found.precision
        how: dict[str, Any] = {"optimizer": found.optimizer, "device": device}
        with simulating(found.model, found.loss, sharding=sharding, **how) as simulation:
            sample = resize_batch(found.batch, 1)
            made = simulation.predict(
                sample, precision=precision, checkpoints=options.checkpointing
            )
        if made.needed(simulation.device) <= budget:
            return found
    raise OptionError(f"--largest {family}: none of width {_SHAPES[0][0]} or more fits")


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
    batches = recipe.build_batches(min(batch_size, _MOST_SAMPLES), seed=0)
    batch = batches.peek()
    batch = resize_batch(batch, min(_MOST_SAMPLES, batch_size_of(batch)))
    return _Planned(
        name=recipe.name,
        sample=f"samples like those of {recipe.path.name}",
        epoch=batches.length,
        model=model,
        optimizer=recipe.build_optimizer(model, lr=None),
        loss=recipe.loss,
        batch=batch,
        batch_size=batch_size,
        precision=precision,
    )


def _from_configuration(
    stored: Any, name: str, seq: int | None, *, label: str, wide: bool
) -> _Planned:
    """Return a Hugging Face model: its shapes are in the configuration, no weights.

    Encoders with a decoder (T5) are planned with sequences of the same length for both, other
    encoders (BERT and its kin) with masked language modelling, classifiers of images (ViT) with
    images of the configuration's size, all others as causal language models. `wide`: with
    parameters in float32, whatever they are stored in.
    """
    import torch

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
        if wide:
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
    return _Planned(
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
    import torch

    from wholebatch.losses.causal_lm import causal_lm
    from wholebatch.losses.loss import cross_entropy

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


# ------------------------------------------------------------------------------ what it costs

_SHARE_OF_PEAK = 0.4  # of the peak speed that large models reach; tune measures yours


def _cost(options: PlanOptions, subject: _Planned, plan: Plan) -> list[str]:
    """Return what an epoch costs by its floating-point operations, here and undivided."""
    if options.price is None or options.gpu is None or plan.micro_batch is None:
        return []
    gpu, (price, *larger), need = options.gpu, options.price, plan.undivided or 0
    samples = subject.epoch or 1000 * plan.batch_size
    operations = samples * (plan.operations or 0) * (4 / 3 if plan.checkpointing else 1)

    def hours(on: Gpu) -> float:
        tflops = on.tflops_32 if plan.precision == "full" else on.tflops_16
        return operations / (_SHARE_OF_PEAK * 1e12 * tflops) / 3600

    what = "an epoch" if subject.epoch else "1,000 updates"
    cost = (
        f"{what}: {samples:,} samples, {operations:.2g} operations, {hours(gpu):.3g} GPU hours at "
        f"{_SHARE_OF_PEAK:.0%} of the {gpu.name}'s peak: {hours(gpu) * price:.3g} at {price:g} each"
    )
    other = next((it for it in GPUS if it.memory >= need), None)
    if need <= gpu.memory or other is None:
        fits = "fits, too" if need <= gpu.memory else "fits on none of these GPUs"
        return [cost, f"undivided, it needs {bytes_said(need)} and {fits}"]
    beside = (
        f"undivided, it needs {bytes_said(need)}, as the {other.name} has: {hours(other):.3g} GPU "
        f"hours, cheaper below {hours(gpu) * price / hours(other):.3g} an hour"
    )
    return [cost, beside + "".join(f"; {hours(other) * one:.3g} at {one:g} each" for one in larger)]


# ------------------------------------------------------------------------------ on the screen


def _show(console: Console, plan: Plan) -> None:
    """Print the table of sizes, and the choice."""
    table = plain_table(">micro-batch", ">peak", ">used", padding=(0, 2, 0, 0))
    for point in plan.points:
        chosen = point.micro_batch == plan.micro_batch
        table.add_row(
            f"{'▶ ' * chosen}{point.micro_batch}",
            bytes_said(point.peak),
            Text(f"{point.needed / plan.budget:.0%}", "" if point.fits else "red"),
            style="bold" if chosen else "" if point.fits else "dim",
        )
    console.print(table, highlight=False)
    about = next((it for it in plan.points if it.micro_batch == plan.micro_batch), plan.points[0])
    parts = sorted(about.by_category.items(), key=lambda part: -part[1])
    large = ", ".join(f"{name} {bytes_said(size)}" for name, size in parts if size)
    say(console, f"at the peak of micro-batch {about.micro_batch}: {large}")
    if plan.modes:
        _show_modes(console, plan)
    if any(point.needed != point.peak for point in plan.points):
        say(console, "used: the peak, and the room that CUDA's allocator needs beside it")
    console.print()
    if plan.micro_batch is None:
        _show_ways(console, plan)
        return
    larger = ""
    if plan.largest != plan.micro_batch:
        larger = f" (up to {plan.largest} would fit, in as many steps, the last one smaller)"
    say(console, Text.assemble((plan.arithmetic(), "bold"), larger))


def _show_modes(console: Console, plan: Plan) -> None:
    """Print what each way of a sharded model holds and receives."""
    size = plan.micro_batch or 1
    table = plain_table("sync", ">peak", ">received", "", padding=(0, 2, 0, 0))
    for mode in plan.modes:
        chosen = mode.sync == plan.sync
        table.add_row(
            f"{'▶ ' * chosen}{mode.sync}",
            bytes_said(mode.peak),
            bytes_said(mode.wire),
            "" if mode.fits else "does not fit",
            style="bold" if chosen else "",
        )
    console.print()
    say(console, f"with micro-batches of {size}, on each GPU, per update:")
    console.print(table, highlight=False)


def _show_ways(console: Console, plan: Plan) -> None:
    """Print that nothing fits, what each way to save memory comes to, and what does fit."""
    first, *others = plan.rungs
    best = min(plan.rungs, key=lambda rung: rung.peak)
    need, room = bytes_said(first.peak), bytes_said(plan.budget)
    say(console, f"a micro-batch of one sample needs {need} of {room}", style="red")
    table = plain_table("with", ">peak", "", padding=(0, 2, 0, 0))
    for rung in others:
        table.add_row(_options(rung.options), bytes_said(rung.peak), "fits" if rung.fits else "")
    if plan.fewest_ranks is not None:
        count = plan.fewest_ranks
        size = "" if plan.batch_size >= count else f" --batch-size {count}"
        words = f"--parallel fsdp2 --sync every --gpus {count}{size} {_options(best.options)}"
        table.add_row(words.strip(), "", "fits: the fewest GPUs of this size")
    if table.row_count:
        console.print(table, highlight=False)
    ranks = plan.ranks if plan.sync is not None else 1
    parts = plan.points[0].by_category
    lines = [
        f"an optimizer with 16-bit state saves about {bytes_said(parts['optimizer state'] / 2)}"
    ]
    if plan.sync is not None:
        whole = plan.parameter_bytes * (ranks - 1) // ranks
        lines += [
            f"gradients kept whole until the end of a window (--sync hold) take {bytes_said(whole)}"
            "; parameters kept whole, too (--sync gathered), as much again"
        ]
    if plan.fewest_ranks is None and not any(rung.fits for rung in plan.rungs):
        lines.append(
            "nothing here is enough: take a smaller model, shorter samples or a larger GPU"
        )
    for line in lines:
        say(console, line, indent=2)


def _options(how: dict[str, Any]) -> str:
    """Return the options of `plan`, and of `train`, that ask for this."""
    words = [f"--precision {how['precision']}"] if how["precision"] not in ("full", "fp32") else []
    return " ".join([*words, *(["--checkpointing"] if how["checkpoints"] else [])])
