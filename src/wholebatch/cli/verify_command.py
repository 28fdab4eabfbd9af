"""`wholebatch verify`: the proof on a recipe, or on someone's own training loop."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from wholebatch.cli.run_settings import Given, check, check_recipe, resolve
from wholebatch.errors import OptionError

if TYPE_CHECKING:
    from wholebatch.verification import LoopVerdict, Verdict

__all__ = ["verify"]

_BATCH, _LOOP, _OUT = "The batch and the update", "A loop of your own", "Output"

_BATCHNORM = ("exact", "statistics", "freeze", "group", "layer", "sync", "refuse")


def verify(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A Python file with model(), data() and loss(model, micro), or an embedded "
            "recipe: [bold]bytes-gpt[/] (the default) or [bold]digits-cnn[/].",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Samples that make one update.", rich_help_panel=_BATCH),
    ] = None,
    micro_batch: Annotated[
        str | None,
        typer.Option(
            metavar='N|"N tokens"',
            help="How the batch is divided. Default: the recipe's, else about four, unevenly.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="full (or fp32), bf16, fp16.", rich_help_panel=_BATCH),
    ] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(
            metavar="NORM",
            help="Clip to this norm. With --loop: what a loop that clips by hand clips to; "
            "torch's clip_grad_norm_ is noticed by itself.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    batchnorm: Annotated[
        str, typer.Option(metavar="POLICY", help="As in WholeBatch.", rich_help_panel=_BATCH)
    ] = "exact",
    execute: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="As in WholeBatch.", rich_help_panel=_BATCH),
    ] = None,
    gradients: Annotated[
        str | None,
        typer.Option(
            metavar="device|host|swap|release|moments",
            help="As in WholeBatch; release and moments without the recipe's clipping.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    float64: Annotated[
        bool,
        typer.Option(
            help="Prove it in float64 too, on a copy of the model.", rich_help_panel=_BATCH
        ),
    ] = True,
    loop: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Hold function(model, optimizer, micro_batches), which trains one window, against "
            "the undivided batch and every known mistake.",
            rich_help_panel=_LOOP,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="mlp|lm|cnn|all",
            help="The built-in models to try the loop on, if FILE.py has no model() of its own.",
            rich_help_panel=_LOOP,
        ),
    ] = "all",
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="What the loop calls a full window, in micro-batches. Default: 4, or "
            "[bold]steps[/] in FILE.py.",
            rich_help_panel=_LOOP,
        ),
    ] = None,
    equal: Annotated[
        bool,
        typer.Option(
            "--equal",
            help="The loop's micro-batches always have equally many units: do not try uneven ones.",
            rich_help_panel=_LOOP,
        ),
    ] = False,
    ddp: Annotated[
        bool,
        typer.Option(
            "--ddp",
            help="Under torchrun: hand the model over in DistributedDataParallel.",
            rich_help_panel=_LOOP,
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of the weights and the data.", rich_help_panel=_BATCH)
    ] = 0,
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda", help="Where to run.", rich_help_panel=_BATCH)
    ] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead.", rich_help_panel=_OUT)
    ] = False,
) -> None:
    """Prove that accumulation makes the update of the undivided batch, or find out why not.

    Exit status: 0 the same update, 1 another one, 2 wrong usage.
    """
    given = Given(batch_size, micro_batch, None, precision, clip_norm, None, seed, None)
    for name, value in vars(given).items():
        check(name, value, "--" + name.replace("_", "-"))
    check_recipe(recipe)
    check("execute", execute, "--execute")
    if batchnorm not in _BATCHNORM:
        raise OptionError(f"--batchnorm {batchnorm}: must be one of {', '.join(_BATCHNORM)}")
    if loop is not None and recipe is not None:
        raise OptionError("RECIPE and --loop together: a loop's FILE.py brings its own model")
    if loop is None and (steps is not None or equal or model != "all"):
        raise OptionError("--steps, --equal and --model belong to --loop FILE.py:FUNCTION")
    if loop is not None:
        of_recipes = {
            "--batch-size": batch_size is not None,
            "--micro-batch": micro_batch is not None,
            "--precision": precision is not None,
            "--batchnorm": batchnorm != "exact",
            "--execute": execute is not None,
            "--gradients": gradients is not None,
            "--no-float64": not float64,
        }
        for flag in (flag for flag, is_given in of_recipes.items() if is_given):
            raise OptionError(f"{flag}: belongs to a RECIPE; a --loop has its own way to train")
    if ddp and "WORLD_SIZE" not in os.environ:
        raise OptionError("--ddp: belongs to torchrun; this is one process")
    from wholebatch.cli.parallel_ranks import process_group

    verdict: Verdict | LoopVerdict
    with process_group(device) as (rank, where):
        if loop is None:
            options = {"batchnorm": batchnorm, "float64": float64, "ddp": ddp}
            if execute is not None:
                options["execute"] = execute
            if gradients is not None:
                options["gradients"] = check("gradients", gradients, "--gradients")
            title, verdict = _recipe(recipe, given, where=where, rank=rank, options=options)
        else:
            from wholebatch.cli.loop_file import verify_file

            title = loop
            verdict = verify_file(
                loop,
                model=model,
                steps=steps,
                clip_norm=clip_norm,
                uneven=not equal,
                ddp=ddp,
                seed=seed,
                device=where,
            )
    if rank == 0:
        _show(title, verdict, as_json=as_json)
    raise typer.Exit(verdict.exit_status)


def _recipe(
    name: str | None, given: Given, *, where: Any, rank: int, options: dict[str, Any]
) -> tuple[str, Verdict]:
    """The proof on the first batch of a recipe, with its own optimizer and settings."""
    import random

    import torch

    from wholebatch.cli.recipes import EMBEDDED, Batches, load_recipe
    from wholebatch.cli.training_run import fitted_to
    from wholebatch.verification import verify as prove

    recipe = load_recipe(name or next(iter(EMBEDDED)))
    config = resolve(given, recipe.defaults, stored=None)
    torch.manual_seed(config.seed)
    random.seed(config.seed)
    model = recipe.build_model()
    if config.precision == "bf16-pure":
        model.to(torch.bfloat16)
    model.to(where)
    batches = Batches(
        recipe.build_data,
        batch_size=config.batch_size,
        seed=config.seed + rank,
        collate=recipe.collate,
    )
    if given.batch_size is not None:
        config = fitted_to(config, batches)
    optimizer = recipe.build_optimizer(model, lr=None)
    wrapped: torch.nn.Module = model
    if options.pop("ddp") and torch.distributed.is_initialized():
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    micro = config.micro_batch if config.tokens is None else recipe.build_tokens(config.tokens)
    clip_norm = config.clip_norm
    if options.get("gradients") in ("release", "moments"):
        clip_norm = given.clip_norm  # there is never a whole gradient to clip
    if options.get("gradients") == "release":
        options["nonfinite"] = "skip"
    verdict = prove(
        wrapped,
        recipe.loss,
        batches.peek(),
        micro_batch=micro,
        optimizer=optimizer,
        precision=config.autocast,
        clip_norm=clip_norm,
        units=recipe.units,
        **options,
    )
    about = f": {recipe.description}" if recipe.description else ""
    return f"{recipe.name}{about}", verdict


def _show(title: str, verdict: Verdict | LoopVerdict, *, as_json: bool) -> None:
    from wholebatch.cli.verify_show import show_loop, show_verdict
    from wholebatch.verification import Verdict

    if as_json:
        print(verdict.to_json())
        return
    console = Console(file=sys.stdout)
    if isinstance(verdict, Verdict):
        show_verdict(console, title, verdict)
    else:
        show_loop(console, verdict)
