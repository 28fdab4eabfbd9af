"""`wholebatch plan`: predict the peak memory before anything runs.

A plan is made of a recipe, or of a Hugging Face model from its configuration alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from wholebatch.cli.batch_scaling import Arithmetic
from wholebatch.cli.command_options import (
    choice,
    command,
    must_be,
    option,
    recipe_argument,
    switch,
    whole_number,
)
from wholebatch.cli.plan_arithmetic import SHARE, fits, parameters_of
from wholebatch.cli.report.terminal_output import (
    Spinner,
    console_of,
    plain_table,
    say,
    say_command,
)
from wholebatch.cli.run_settings import autocast_option, like_train
from wholebatch.errors import OptionError
from wholebatch.gpus import GPUS, Gpu, find_gpu
from wholebatch.readable_sizes import bytes_said, short_count

if TYPE_CHECKING:
    from wholebatch.cli.planned_model import PlannedModel
    from wholebatch.memory.plan import Plan


_TAKES_LONG = (
    "note: windows run on fake tensors: seconds for small models, 10 minutes and more for 70 B; "
    "--parameters N is arithmetic, at once"
)


def _gpu(text: str, label: str) -> Gpu:
    try:
        return find_gpu(text)
    except OptionError as error:
        raise OptionError(f"{label} {error}") from None


@dataclass(frozen=True)
class PlanOptions:
    """The options of `wholebatch plan`."""

    recipe: str | None = recipe_argument(
        "A recipe, as for wholebatch train, or the configuration of a Hugging Face language model "
        "or image classifier.",
        "RECIPE|hf:CONFIG.json",
    )
    batch_size: int | None = like_train("batch_size", "Samples per update, over all GPUs.")
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
    )
    gpus: int = option(1, "N", "Number of data-parallel GPUs.", check=whole_number())
    parallel: str = choice(
        "ddp|fsdp2",
        "ddp: the whole model on every GPU. fsdp2: sharded over them, block by block.",
    )
    precision: str | None = autocast_option()
    checkpointing: bool = switch("Gradient checkpointing of the model's repeated blocks.")
    parameters: int | None = option(
        None,
        "N",
        "Instead of a RECIPE: a number of parameters, 70B or 350M. Which ways to train them fit "
        "these GPUs, by arithmetic, at once.",
        typed=str | None,
        check=parameters_of,
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
    'wholebatch plan --parameters 70B --gpus 8 --gpu "A100 40"',
)
def plan(options: PlanOptions) -> int:
    """Predict peak memory and recommend a micro-batch. Nothing is trained.

    Exit status: 0 if a micro-batch fits, 1 if none does.
    """
    _check(options)
    if options.parameters is not None:
        return _by_arithmetic(options, options.parameters)
    with Spinner(console_of(stderr=options.as_json)) as doing:
        doing("importing torch")
        plan = _planned(options, doing)
    return 0 if plan.micro_batch is not None else 1


def _planned(options: PlanOptions, doing: Spinner) -> Plan:
    from wholebatch.compile.fusion import collection_paused
    from wholebatch.coupled.normalisation_layers import needs_whole_batch
    from wholebatch.memory.fsdp_sharding import Sharding, choose_sync
    from wholebatch.memory.plan import make_plan

    gpus = options.gpus
    device, budget, where = _budget(options)
    doing("building the model without its weights")
    with collection_paused():
        subject = _model(options)
    if str(options.recipe).startswith("hf:"):
        say(console_of(stderr=True), _TAKES_LONG)
    size = options.batch_size or max(subject.batch_size, gpus)
    if size < gpus:
        raise OptionError(
            f"--gpus {gpus}: a batch of {size} samples leaves some of them without a sample; "
            f"give a --batch-size of at least {gpus}"
        )
    sharding = None
    if options.parallel == "fsdp2":
        sharding = Sharding(gpus, choose_sync(subject.model, ranks=gpus, budget=budget))
    if not options.as_json:
        over = "" if sharding is None else f", sharded by FSDP2 (sync {sharding.sync})"
        about = f": {subject.parameters:,} parameters, {subject.sample}; {gpus} × {where}{over}"
        say(doing.console, Text.assemble((subject.name, "bold"), about))
    is_whole = needs_whole_batch(subject.model)
    doing("predicting the memory of each micro-batch")
    with collection_paused():
        plan = make_plan(
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
            beside_undivided=is_whole,
        )
    if options.as_json:
        described = {"subject": subject.name, "parameters": subject.parameters, "device": device}
        print(json.dumps({**described, **asdict(plan)}, indent=2))
    else:
        doing.stop()
        _show(doing.console, plan, subject.parameters)
        if is_whole:
            say(doing.console, _batchnorm(plan))
    return plan


def _by_arithmetic(options: PlanOptions, parameters: int) -> int:
    """Print which ways to train so many parameters fit; nothing is built."""
    if options.gpu is not None:
        memory, where = options.gpu.memory, options.gpu.name
    elif options.gpu_memory is not None:
        from wholebatch.memory.budget import parse_memory

        memory, where = parse_memory(options.gpu_memory, device="cuda"), "GPU"
    else:
        raise OptionError(f"--parameters {parameters}: also give --gpu or --gpu-memory")
    found = [*fits(parameters, gpus=options.gpus, memory=memory)]
    if options.as_json:
        about = {"parameters": parameters, "gpus": options.gpus, "memory": memory}
        print(json.dumps({**about, "ways": [asdict(fit) for fit in found]}, indent=2))
        return 0 if any(fit.fits for fit in found) else 1
    console = console_of()
    head = f"{short_count(parameters).replace('G', 'B')} parameters on {options.gpus} × {where}"
    say(console, f"{head} with {bytes_said(memory)}, by arithmetic", style="bold")
    table = plain_table("way", ">each GPU", ">host", ">fewest GPUs", "", padding=(0, 2, 0, 0))
    for fit in found:
        table.add_row(
            fit.way,
            bytes_said(fit.each),
            bytes_said(fit.host) if fit.host else "",
            "none" if fit.gpus is None else f"{fit.gpus:,}",
            "fits" if fit.fits else "",
            style="" if fit.fits else "dim",
        )
    console.print(table, highlight=False)
    say(
        console,
        f"parameters, gradients and optimizer state, which may fill {SHARE:.0%} of a GPU; "
        "activations come on top: checkpointing and small micro-batches reduce those alone",
    )
    return 0 if any(fit.fits for fit in found) else 1


def _check(options: PlanOptions) -> None:
    """Refuse options that do not go together."""
    if options.parameters is not None and options.recipe:
        raise OptionError("--parameters: takes the place of a recipe")
    if options.parallel != "ddp" and options.gpus < 2:
        raise OptionError(
            f"--parallel {options.parallel} with --gpus {options.gpus}: give the number of GPUs, "
            "from 2"
        )
    if options.gpu is not None and options.gpu_memory is not None:
        raise OptionError("--gpu and --gpu-memory: give one of them")


def _budget(options: PlanOptions) -> tuple[str, int, str]:
    """Return the device to predict for, its bytes, and its description."""
    import torch

    from wholebatch.memory.budget import device_memory, device_name, parse_memory

    if options.gpu is not None:
        return "cuda", options.gpu.memory, f"{options.gpu.name} with {options.gpu.gib:g} GiB"
    if options.gpu_memory is not None:
        budget = parse_memory(options.gpu_memory, device="cuda")
        return "cuda", budget, f"{bytes_said(budget)} of GPU memory"
    if torch.cuda.is_available():
        budget = device_memory("cuda")
        return "cuda", budget, f"{device_name('cuda')} with {bytes_said(budget)}"
    budget = device_memory("cpu")
    return "cpu", budget, f"this machine's {bytes_said(budget)} (no GPU; see --gpu)"


# ------------------------------------------------------------------------------ what is planned


def _model(options: PlanOptions) -> PlannedModel:
    from wholebatch.cli import planned_model as models

    recipe, seq, in_float32 = options.recipe, options.seq, options.parallel == "fsdp2"
    if recipe is not None and recipe.startswith("hf:"):
        subject = models.of_file(Path(recipe[3:]), seq=seq, in_float32=in_float32)
    elif seq is not None:
        raise OptionError("--seq: is for hf:CONFIG.json; a recipe's data has its own length")
    else:
        subject = models.of_recipe(recipe)
    return replace(subject, precision=options.precision or subject.precision)


# ------------------------------------------------------------------------------ on the screen


def _show(console: Console, plan: Plan, parameters: int) -> None:
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
        _show_ways(console, plan, parameters)
        return
    larger = ""
    if plan.largest != plan.micro_batch:
        larger = f" (up to {plan.largest} would fit, in as many steps, the last one smaller)"
    sums = Arithmetic(plan.batch_size, plan.micro_batch, plan.ranks)
    say(console, Text.assemble((sums.line, "bold"), larger))


def _batchnorm(plan: Plan) -> str:
    need = plan.undivided or 0
    fits = "fits" if need <= plan.budget else "does not fit: train then checkpoints its blocks"
    return (
        "BatchNorm: train does not split this batch, unless its policy is freeze or allow; "
        f"undivided, it needs {bytes_said(need)} on each GPU, and {fits}"
    )


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


def _show_ways(console: Console, plan: Plan, parameters: int) -> None:
    """Print that nothing fits, and what would help."""
    need, room = bytes_said(plan.points[0].peak), bytes_said(plan.budget)
    say(console, f"a micro-batch of one sample needs {need} of {room}", style="red")
    say(
        console,
        "what helps: --precision bf16, --checkpointing, --parallel fsdp2 on more "
        "--gpus, shorter samples; and what each way to keep the model's state takes:",
    )
    whole_gib = plan.budget >= 2**30
    size = f"{plan.budget / 2**30:.4g}GiB" if whole_gib else f"{plan.budget}B"
    line = f"wholebatch plan --parameters {parameters} --gpus {plan.ranks} --gpu-memory {size}"
    say_command(console, " ", line)
