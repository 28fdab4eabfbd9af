"""`wholebatch train`: a recipe, trained with the update of the whole batch."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from wholebatch import __version__
from wholebatch.cli.from_file import given_of, read_source
from wholebatch.cli.run_settings import check, check_recipe
from wholebatch.cli.train_flags import (
    AutoResume,
    BaseBatch,
    BatchSize,
    Betas,
    Checkpointing,
    Deadline,
    Execute,
    Fit,
    From,
    Gradients,
    LrRule,
    LrSteps,
    Memory,
    Noise,
    Resume,
    Schedule,
    Wandb,
    Warmup,
    Zero,
)
from wholebatch.distributed.rank_progress import DEADLINE, parse_deadline
from wholebatch.errors import OptionError

if TYPE_CHECKING:
    from wholebatch.cli.checkpoints import Found
    from wholebatch.cli.parallel_ranks import Crew
    from wholebatch.cli.report.terminal_output import Terminal
    from wholebatch.cli.run_choice import Asked
    from wholebatch.cli.run_folder import RunFolder
    from wholebatch.cli.training_run import Session

__all__ = ["train"]

_BATCH, _RUN = "The batch and the update", "The run"


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A Python file with model(), data() and loss(model, micro), or an embedded "
            "recipe: [bold]bytes-gpt[/] (the default) or [bold]digits-cnn[/].",
            show_default=False,
        ),
    ] = None,
    batch_size: BatchSize = None,
    micro_batch: Annotated[
        str | None,
        typer.Option(
            metavar='auto|N|"N tokens"',
            help="How much of the batch is in memory at a time.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="full (or fp32): as the model is; bf16, fp16: autocast; bf16-pure: 16-bit "
            "parameters, their gradients added in fp32.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    memory: Memory = None,
    fit: Fit = False,
    checkpointing: Checkpointing = False,
    clip_norm: Annotated[
        float | None,
        typer.Option(
            metavar="NORM",
            help="Clip the gradient of the whole batch to this norm.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", help="Learning rate, over the recipe's own.", rich_help_panel=_BATCH
        ),
    ] = None,
    execute: Execute = None,
    gradients: Gradients = None,
    lr_steps: LrSteps = None,
    lr_rule: LrRule = None,
    base_batch: BaseBatch = None,
    betas: Betas = None,
    warmup: Warmup = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Updates to make in all.", rich_help_panel=_RUN),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where everything is written. Default: runs/RECIPE-TIME.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    resume: Resume = False,
    auto_resume: AutoResume = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(metavar="N", help="Updates between two checkpoints.", rich_help_panel=_RUN),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Of the weights and the order of the data.", rich_help_panel=_RUN
        ),
    ] = None,
    noise: Noise = None,
    wandb: Wandb = None,
    source: From = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="auto|cpu|cuda", help="Where to train.", rich_help_panel=_RUN),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="ddp|fsdp2|deepspeed|pipeline",
            help="Under torchrun: the model whole on every rank, sharded over them, in a DeepSpeed "
            "engine, or cut into stages.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    zero: Zero = None,
    schedule: Schedule = None,
    deadline: Deadline = None,
) -> None:
    """Train a recipe: every update is that of the whole batch, in the memory of a micro-batch.

    Defaults come from the recipe. Ctrl-C stops cleanly, and says how to go on from there.
    Under torchrun, every rank takes its share of the batch.
    """
    for flag, is_given in {"--from": source is not None, "--fit": fit}.items():
        if resume and is_given:
            raise OptionError(f"{flag} with --resume: a run goes on with its own settings")
    check_recipe(recipe)
    told = read_source(source)
    typed = {
        "batch_size": batch_size,
        "micro_batch": micro_batch,
        "steps": steps,
        "precision": precision,
        "clip_norm": clip_norm,
        "lr": lr,
        "seed": seed,
        "checkpoint_every": checkpoint_every,
        "memory": memory,
        "checkpointing": checkpointing or None,
        "fit": fit or None,
        "zero": zero,
        "schedule": schedule,
        "lr_steps": lr_steps,
        "lr_rule": lr_rule,
        "base_batch": base_batch,
        "betas": betas,
        "warmup": warmup,
        "execute": execute,
        "gradients": gradients,
        "noise": noise,
        "wandb": wandb,
    }
    given = given_of(typed, told)
    device = device or told.settings.get("device", "auto")
    parallel = check("parallel", parallel or told.settings.get("parallel", "ddp"), "--parallel")
    for flag, value, engine in (("zero", zero, "deepspeed"), ("schedule", schedule, "pipeline")):
        if value is not None and parallel != engine:
            raise OptionError(f"--{flag} {value}: belongs to --parallel {engine}")
    recipe = recipe or told.recipe
    given_deadline = deadline or os.environ.get(DEADLINE) or "auto"
    allowed = parse_deadline(given_deadline, DEADLINE if deadline is None else "--deadline")

    # Torch is imported from here on: a wrong option was told at once.
    import torch

    from wholebatch.cli.error_messages import short_warnings
    from wholebatch.cli.parallel_ranks import Crew
    from wholebatch.cli.run_choice import Asked
    from wholebatch.cli.torchrun import process_group

    if told.threads is not None:
        torch.set_num_threads(told.threads)
    asked = Asked(
        recipe,
        given,
        out=out,
        resume=resume,
        auto_resume=auto_resume,
        source=told,
        typed=frozenset(name for name, value in typed.items() if value is not None),
    )
    with process_group(device, deadline=allowed) as (rank, where):
        crew = Crew(rank, device=where, parallel=parallel, deadline=allowed)
        with crew.failures(), short_warnings(shown=crew.is_first):
            status = _train(asked, crew)
    raise typer.Exit(status)


def _train(asked: Asked, crew: Crew) -> int:
    from wholebatch.cli.error_messages import training_failures
    from wholebatch.cli.report.manifest import versions_here
    from wholebatch.cli.report.terminal_output import Terminal
    from wholebatch.cli.run_choice import checkpoint_of, find
    from wholebatch.cli.run_folder import resume_command
    from wholebatch.cli.summary import head_rows, schedule_said
    from wholebatch.cli.training_run import build

    start = find(asked, crew)
    recipe, folder = start.recipe, start.folder
    # The other ranks are quiet; a bar that draws nothing would cost them time all the same.
    console = Console() if crew.is_first else Console(quiet=True, force_terminal=False)
    terminal = Terminal(console, name=recipe.name, unit=recipe.unit)
    with folder.held(start.wait) if crew.is_first else nullcontext():
        found = checkpoint_of(start, crew)
        fits = bool(asked.given.fit) and not start.is_resumed
        session = crew.together(
            lambda: build(
                recipe,
                start.config,
                crew,
                fits=fits,
                keeps_precision=asked.given.precision is not None,
            )
        )
        crew.together(lambda: _take_up(session, found, asked.given.batch_size))
        with training_failures(recipe.path, folder.path, crew):  # a first batch may be read here
            with terminal.working("choosing the micro-batch"):
                chosen = crew.together(session.choose)
            rows = head_rows(session, found, folder=folder.path, chosen=chosen)
        # Everything fits: from here on the folder is written.
        if start.has_changed:
            terminal.note(f"note: {recipe.path} has changed since this run began")
        for note in asked.source.notes(
            digest=recipe.digest, versions=versions_here(), ranks=crew.ranks
        ):
            terminal.note(f"note: {note}")
        if found is not None and (goes_on := schedule_said(session, found)):
            terminal.note(f"note: {goes_on}")
        crew.first(lambda: _begin(session, folder, found, terminal))
        about = f": {recipe.description}" if recipe.description else ""
        terminal.rows(f"wholebatch {__version__}  {recipe.name}{about}", rows)
        precision = session.config.precision
        if session.device.type == "cpu" and precision != "full":
            terminal.note(f"note: {precision} is slow on a CPU without hardware for it")
        if crew.asked != crew.parallel:
            terminal.note(f"note: --parallel {crew.asked} is for torchrun; this is one process")
        if crew.deadline is not None and crew.ranks == 1:
            terminal.note("note: a deadline is for the ranks of torchrun; this is one process")
        if session.train.updates >= session.config.steps:
            done = session.train.updates
            terminal.note(f"nothing to do: the run has its {done} updates; give --steps for more")
            return 0
        again = resume_command(folder.path, parallel=crew.parallel)
        with (
            training_failures(recipe.path, folder.path, crew),
            crew.failures(),
            crew.watched(advice=f"  go on from the last checkpoint: {again}"),
        ):
            return _run(session, folder, found, terminal)


def _take_up(session: Session, found: Found | None, batch_size: int | None) -> None:
    if batch_size not in (None, session.config.batch_size):
        raise OptionError(
            f"--batch-size {batch_size}: the recipe's DataLoader gives batches of "
            f"{session.config.batch_size}; change it there"
        )
    if found is not None:
        session.restore(found)


def _begin(session: Session, folder: RunFolder, found: Found | None, terminal: Terminal) -> None:
    """Put the folder in order: what was left half written goes, what is damaged steps aside."""
    from wholebatch.cli.checkpoints import Checkpoints, write_atomically
    from wholebatch.cli.run_settings import config_text
    from wholebatch.cli.training_run import about_here

    checkpoints = Checkpoints(folder.checkpoints)
    checkpoints.clean()
    if found is None:
        folder.clear_beginning()
    else:
        for _, reason in found.damaged:
            terminal.note(f"note: {reason}; going back to {found.path.name}")
        checkpoints.set_aside(found)
    recipe = session.recipe
    known = recipe.name if recipe.is_embedded else str(recipe.path)
    crew = session.crew
    parallel = {"ranks": crew.ranks, "sharded": crew.is_sharded, "parallel": crew.parallel}
    about = {"device": str(session.device), **parallel, **about_here()}
    write_atomically(
        folder.config,
        config_text(session.config, recipe=known, digest=recipe.digest, about=about),
    )
    _write_manifest(session, folder)


def _write_manifest(session: Session, folder: RunFolder) -> None:
    """What `train --from` takes to make this run again; "auto" is written as what it chose."""
    from wholebatch.cli.checkpoints import write_atomically
    from wholebatch.cli.report.manifest import arithmetic_of, commit_of, manifest_text

    recipe, config, crew = session.recipe, session.config, session.crew
    size = session.train.micro_batch_size
    settings = asdict(config)
    if config.micro_batch == "auto" and size is not None:
        settings["micro_batch"] = size
    settings["device"] = session.device.type
    settings["parallel"] = crew.parallel
    text = manifest_text(
        recipe=recipe.name if recipe.is_embedded else str(recipe.path),
        digest=recipe.digest,
        unit=recipe.unit,
        settings=settings,
        arithmetic=arithmetic_of(
            config.batch_size, config.batch_schedule, micro_batch=size, ranks=crew.ranks
        ),
        device=session.device,
        ranks=crew.ranks,
        commit=commit_of(recipe.path),
    )
    write_atomically(folder.manifest, text)


def _run(session: Session, folder: RunFolder, found: Found | None, terminal: Terminal) -> int:
    from wholebatch.cli.report.terminal_output import time_said
    from wholebatch.cli.run_folder import resume_command, shown
    from wholebatch.cli.stop_signal import STOPPED
    from wholebatch.cli.summary import summary_rows
    from wholebatch.cli.train_loop import run_loop

    crew = session.crew
    mid_window = crew.ranks == 1 and bool(found and found.state["train"]["window"] is not None)
    outcome = run_loop(session, folder, terminal, mid_window=mid_window)
    updates = session.train.updates
    if not outcome.finished:
        place = f"after update {updates} of {session.config.steps}"
        if outcome.of:
            place += f", {outcome.micro_batches} of {outcome.of} micro-batches into the next"
        terminal.note(f"stopped {place}; checkpoint {shown(outcome.checkpoint)}")
        again = resume_command(folder.path, parallel=crew.parallel)
        terminal.note(f"go on with: {again}")
        return STOPPED
    if not crew.is_first:
        return 0
    if crew.ranks > 1:
        memory = session.memory.measured_said()
    else:
        with terminal.working("predicting the memory of the whole batch at once"):
            memory = session.memory.said(
                session.recipe.loss, outcome.batch, precision=session.config.autocast
            )
    rows = summary_rows(session, outcome, memory=memory, folder=folder.path)
    title = f"{session.recipe.name}: {updates} updates, {time_said(outcome.seconds)}"
    terminal.rows(title, rows, boxed=True)
    # Outside the box: a line to copy.
    again = resume_command(folder.path, steps=2 * updates, parallel=crew.parallel)
    terminal.note(f"go on with: {again}")
    return 0
