"""`wholebatch plan`: what fits where, before anything runs."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from wholebatch.cli.plan_show import show
from wholebatch.cli.plan_subject import from_configuration, from_recipe
from wholebatch.cli.run_settings import check, check_recipe
from wholebatch.errors import OptionError

__all__ = ["plan"]

_PARALLEL = ("ddp", "fsdp2")
_PRECISIONS = ("full", "fp32", "bf16", "fp16")


def plan(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE|hf:CONFIG.json",
            help="A recipe as for [bold]wholebatch train[/], or a Hugging Face model (of language, "
            "or that classifies images) from its configuration alone.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Samples that make one update, on all GPUs.")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of each GPU, such as 24GiB; the GPU need not be here. Default: this machine's "
            "GPU, else its main memory.",
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="Data-parallel GPUs.")] = 1,
    parallel: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="ddp: all of the model on every GPU; fsdp2: sharded over them, block by block.",
        ),
    ] = "ddp",
    sync: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With fsdp2, when gradients are reduced: hold (once per update), every (after "
            "each micro-batch). Default: as a run would choose.",
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="full (or fp32), bf16 or fp16.")
    ] = None,
    seq: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Sequence length, for hf: only.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what other settings would change.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Predict the peak memory over micro-batch sizes, and recommend one. Nothing is trained."""
    check_recipe(recipe)
    check("batch_size", batch_size, "--batch-size")
    if gpu_memory is not None and not (gpu_memory.isascii() and gpu_memory.isdigit()):
        check("memory", gpu_memory, "--gpu-memory")
    if gpus < 1:
        raise OptionError(f"--gpus {gpus}: must be a whole number, at least 1")
    if precision is not None and precision not in _PRECISIONS:
        raise OptionError(f"--precision {precision}: must be one of {', '.join(_PRECISIONS)}")
    _check_parallel(parallel, sync, gpus)
    if seq is not None and seq < 1:
        raise OptionError(f"--seq {seq}: must be a number of tokens, at least 1")

    # Torch is imported from here on: a wrong option was told at once.
    from wholebatch.memory.fsdp_sharding import choose_sync
    from wholebatch.memory.plan import make_plan

    if recipe is not None and recipe.startswith("hf:"):
        subject = from_configuration(Path(recipe[3:]), seq, wide=parallel == "fsdp2")
    elif seq is not None:
        raise OptionError("--seq: is for hf:CONFIG.json; a recipe's data has its own length")
    else:
        subject = from_recipe(recipe)
    device, budget, where = _budget(gpu_memory)
    size = batch_size or subject.batch_size
    if size < gpus:
        raise OptionError(
            f"--gpus {gpus}: an update of {size} samples has none for some of them; give a"
            " --batch-size of at least as many"
        )
    if parallel == "fsdp2":
        sync = sync or choose_sync(subject.model, ranks=gpus, budget=budget)
    console = Console()
    if not as_json:
        over = "" if sync is None else f", sharded by FSDP2 (sync {sync})"
        console.print(
            f"[bold]{subject.name}[/]: {subject.parameters:,} parameters, {subject.sample};"
            f" {gpus} × {where}{over}",
            highlight=False,
            soft_wrap=True,
        )
    with _no_collections():
        made = make_plan(
            subject.model,
            subject.loss,
            subject.batch,
            batch_size=size,
            budget=budget,
            ranks=gpus,
            optimizer=subject.optimizer,
            precision=_known(precision or subject.precision),
            device=device,
            variants=not quick,
            sync=sync,  # type: ignore[arg-type]
        )
    if as_json:
        about = {"subject": subject.name, "parameters": subject.parameters, "device": device}
        print(json.dumps({**about, **asdict(made)}, indent=2))
    else:
        show(console, made)
    raise typer.Exit(0 if made.micro_batch is not None else 1)


def _check_parallel(parallel: str, sync: str | None, gpus: int) -> None:
    if parallel not in _PARALLEL:
        raise OptionError(f"--parallel {parallel}: must be one of {', '.join(_PARALLEL)}")
    if sync is not None and (parallel != "fsdp2" or sync not in ("hold", "every")):
        raise OptionError(f"--sync {sync}: must be hold or every, with --parallel fsdp2")
    if parallel == "fsdp2" and gpus < 2:
        raise OptionError(f"--parallel fsdp2 with --gpus {gpus}: give the number of GPUs, from 2")


@contextmanager
def _no_collections() -> Iterator[None]:
    """Predictions make many small objects and no cycles: looking for some takes a tenth longer."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _known(precision: str) -> str:
    return "full" if precision == "fp32" else precision


def _budget(gpu_memory: str | None) -> tuple[str, int, str]:
    """The device to predict for, its bytes, and how it is called."""
    import torch

    from wholebatch.memory.budget import bytes_said, device_memory, is_share, parse_memory

    if gpu_memory is not None:
        total = device_memory("cuda") if torch.cuda.is_available() else None
        if total is None and is_share(gpu_memory):
            raise OptionError(
                f"--gpu-memory {gpu_memory}: there is no GPU here to take a share of; give a size"
            )
        budget = parse_memory(gpu_memory, device="cuda", total=total)
        return "cuda", budget, f"{bytes_said(budget)} of GPU memory"
    if torch.cuda.is_available():
        budget = device_memory("cuda")
        return "cuda", budget, f"{torch.cuda.get_device_name()} with {bytes_said(budget)}"
    budget = device_memory("cpu")
    return "cpu", budget, f"this machine's {bytes_said(budget)} (no GPU; see --gpu-memory)"
