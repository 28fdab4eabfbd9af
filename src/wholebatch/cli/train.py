"""`wholebatch train`: a recipe, trained with the update of the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from wholebatch import __version__
from wholebatch.cli.options import Given, check, read_config, resolve
from wholebatch.errors import OptionError

if TYPE_CHECKING:
    from wholebatch.checkpoint import Found
    from wholebatch.cli.folder import RunFolder
    from wholebatch.cli.session import Session
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
        typer.Option(metavar="N", help="Samples that make one update.", rich_help_panel=_BATCH),
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
) -> None:
    """Train a recipe: every update is that of the whole batch, in the memory of a micro-batch.

    Defaults come from the recipe. Ctrl-C stops cleanly, and says how to go on from there.
    """
    given = Given(batch_size, micro_batch, steps, precision, clip_norm, lr, seed, checkpoint_every)
    for name, value in vars(given).items():
        check(name, value, "--" + name.replace("_", "-"))
    raise typer.Exit(_train(recipe, given, out=out, resume=resume, device=device))


def _train(name: str | None, given: Given, *, out: Path | None, resume: bool, device: str) -> int:
    # Torch is imported from here on: a wrong option was told at once.
    from wholebatch.checkpoint import Checkpoints
    from wholebatch.cli.failure import short_warnings, training_failures
    from wholebatch.cli.folder import find_run, new_folder
    from wholebatch.cli.said import head_rows
    from wholebatch.cli.session import build, choose_device
    from wholebatch.recipes import EMBEDDED, load_recipe
    from wholebatch.report.terminal import Terminal

    folder = find_run(name, out) if resume else None
    stored = read_config(folder.config) if folder else None
    recipe = load_recipe(name or (stored["recipe"] if stored else next(iter(EMBEDDED))))
    config = resolve(given, recipe.defaults, stored=stored["settings"] if stored else None)
    folder = folder or new_folder(recipe.name, out)
    where = choose_device(device)
    terminal = Terminal(Console(), name=recipe.name, unit=recipe.unit)

    with short_warnings(), folder.held():
        found = Checkpoints(folder.checkpoints).load() if resume else None
        session = build(recipe, config, device=where)
        if given.batch_size not in (None, session.config.batch_size):
            raise OptionError(
                f"--batch-size {given.batch_size}: the recipe's DataLoader gives batches of "
                f"{session.config.batch_size}; change it there"
            )
        if found is not None:
            session.restore(found)
        rows = head_rows(session, found, folder=folder.path)
        # Everything fits: from here on the folder is written.
        if stored is not None and stored["recipe_sha256"] != recipe.digest:
            terminal.note(f"note: {recipe.path} has changed since this run began")
        _begin(session, folder, found, terminal)
        about = f": {recipe.description}" if recipe.description else ""
        terminal.rows(f"wholebatch {__version__}  {recipe.name}{about}", rows)
        if where.type == "cpu" and config.precision != "full":
            terminal.note(f"note: {config.precision} is slow on a CPU without hardware for it")
        if session.train.updates >= session.config.steps:
            done = session.train.updates
            terminal.note(f"nothing to do: the run has its {done} updates; give --steps for more")
            return 0
        with training_failures(recipe.path, folder.path):
            return _run(session, folder, found, terminal)


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
    about = {"device": str(session.device), **about_here()}
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

    mid_window = bool(found and found.state["train"]["window"] is not None)
    outcome = run_loop(session, folder, terminal, mid_window=mid_window)
    updates = session.train.updates
    if not outcome.finished:
        place = f"after update {updates} of {session.config.steps}"
        if outcome.of:
            place += f", {outcome.micro_batches} of {outcome.of} micro-batches into the next"
        terminal.note(f"stopped {place}; checkpoint {shown(outcome.checkpoint)}")
        terminal.note(f"go on with: {resume_command(folder.path)}")
        return STOPPED
    with terminal.working("predicting the memory of the whole batch at once"):
        memory = session.memory.said(
            session.recipe.loss, outcome.batch, precision=session.config.autocast
        )
    rows = summary_rows(session, outcome, memory=memory, folder=folder.path)
    title = f"{session.recipe.name}: {updates} updates, {time_said(outcome.seconds)}"
    terminal.rows(title, rows, boxed=True)
    # Outside the box: a line to copy.
    terminal.note(f"go on with: {resume_command(folder.path, steps=2 * updates)}")
    return 0
