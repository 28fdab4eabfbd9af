"""`wholebatch train`: a recipe, trained with the update of the whole batch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from wholebatch import __version__
from wholebatch.cli.options import Given, check
from wholebatch.errors import OptionError

if TYPE_CHECKING:
    from wholebatch.checkpoint import Found
    from wholebatch.cli.crew import Crew
    from wholebatch.cli.folder import RunFolder
    from wholebatch.cli.session import Session
    from wholebatch.cli.start import Asked
    from wholebatch.report.terminal import Terminal

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
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Samples that make one update, those of all ranks together.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
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
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in --out (else the newest in runs/), bit for bit.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="Continue the run in --out if it has begun, else begin it: one command line for "
            "both. A restart by torchrun does so by itself.",
            rich_help_panel=_RUN,
        ),
    ] = False,
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
    device: Annotated[
        str,
        typer.Option(metavar="auto|cpu|cuda", help="Where to train.", rich_help_panel=_RUN),
    ] = "auto",
    parallel: Annotated[
        str,
        typer.Option(
            metavar="ddp|fsdp2",
            help="Under torchrun: the model whole on every rank, or sharded over them.",
            rich_help_panel=_RUN,
        ),
    ] = "ddp",
) -> None:
    """Train a recipe: every update is that of the whole batch, in the memory of a micro-batch.

    Defaults come from the recipe. Ctrl-C stops cleanly, and says how to go on from there.
    Under torchrun, every rank takes its share of the batch.
    """
    given = Given(batch_size, micro_batch, steps, precision, clip_norm, lr, seed, checkpoint_every)
    for name, value in vars(given).items():
        check(name, value, "--" + name.replace("_", "-"))
    check("parallel", parallel, "--parallel")

    # Torch is imported from here on: a wrong option was told at once.
    from wholebatch.cli.crew import Crew
    from wholebatch.cli.failure import short_warnings
    from wholebatch.cli.ranks import process_group
    from wholebatch.cli.start import Asked

    asked = Asked(recipe, given, out=out, resume=resume, auto_resume=auto_resume)
    with process_group(device) as (rank, where):
        crew = Crew(rank, device=where, parallel=parallel)
        with crew.failures(), short_warnings(shown=crew.is_first):
            status = _train(asked, crew)
    raise typer.Exit(status)


def _train(asked: Asked, crew: Crew) -> int:
    from wholebatch.cli.failure import training_failures
    from wholebatch.cli.said import head_rows
    from wholebatch.cli.session import build
    from wholebatch.cli.start import checkpoint_of, find
    from wholebatch.report.terminal import Terminal

    start = find(asked, crew)
    recipe, folder = start.recipe, start.folder
    # The other ranks are quiet; a bar that draws nothing would cost them time all the same.
    console = Console() if crew.is_first else Console(quiet=True, force_terminal=False)
    terminal = Terminal(console, name=recipe.name, unit=recipe.unit)
    with folder.held(start.wait) if crew.is_first else nullcontext():
        found = checkpoint_of(start, crew)
        session = crew.together(lambda: build(recipe, start.config, crew))
        crew.together(lambda: _take_up(session, found, asked.given.batch_size))
        rows = head_rows(session, found, folder=folder.path)
        # Everything fits: from here on the folder is written.
        if start.has_changed:
            terminal.note(f"note: {recipe.path} has changed since this run began")
        crew.first(lambda: _begin(session, folder, found, terminal))
        about = f": {recipe.description}" if recipe.description else ""
        terminal.rows(f"wholebatch {__version__}  {recipe.name}{about}", rows)
        precision = session.config.precision
        if session.device.type == "cpu" and precision != "full":
            terminal.note(f"note: {precision} is slow on a CPU without hardware for it")
        if session.train.updates >= session.config.steps:
            done = session.train.updates
            terminal.note(f"nothing to do: the run has its {done} updates; give --steps for more")
            return 0
        with training_failures(recipe.path, folder.path, crew), crew.failures():
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
    from wholebatch.checkpoint import Checkpoints, write_atomically
    from wholebatch.cli.options import config_text
    from wholebatch.cli.session import about_here

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
    parallel = {"ranks": crew.ranks, "sharded": crew.is_sharded}
    about = {"device": str(session.device), **parallel, **about_here()}
    write_atomically(
        folder.config,
        config_text(session.config, recipe=known, digest=recipe.digest, about=about),
    )


def _run(session: Session, folder: RunFolder, found: Found | None, terminal: Terminal) -> int:
    from wholebatch.cli.folder import resume_command, shown
    from wholebatch.cli.loop import run_loop
    from wholebatch.cli.said import summary_rows
    from wholebatch.cli.stop import STOPPED
    from wholebatch.report.terminal import time_said

    crew = session.crew
    mid_window = crew.ranks == 1 and bool(found and found.state["train"]["window"] is not None)
    outcome = run_loop(session, folder, terminal, mid_window=mid_window)
    updates = session.train.updates
    if not outcome.finished:
        place = f"after update {updates} of {session.config.steps}"
        if outcome.of:
            place += f", {outcome.micro_batches} of {outcome.of} micro-batches into the next"
        terminal.note(f"stopped {place}; checkpoint {shown(outcome.checkpoint)}")
        again = resume_command(folder.path, sharded=crew.is_sharded)
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
    again = resume_command(folder.path, steps=2 * updates, sharded=crew.is_sharded)
    terminal.note(f"go on with: {again}")
    return 0
