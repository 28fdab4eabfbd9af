"""`wholebatch train`: train a recipe with the update of the whole batch.

The options are in `run_settings`, what they become in `training_run`, the loop in `train_loop`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wholebatch import __version__
from wholebatch.cli.batch_scaling import Arithmetic
from wholebatch.cli.command_options import command
from wholebatch.cli.report.terminal_output import (
    Spinner,
    Terminal,
    console_of,
    path_from_here,
    say_command,
    short_duration,
)
from wholebatch.cli.run_settings import Config, Given, config_text, read_config, resolve
from wholebatch.cli.stop_signal import STOPPED
from wholebatch.cli.updates_made import batchnorm_warning, not_whole, whole
from wholebatch.errors import OptionError, StateError
from wholebatch.plain_files import reason, write_atomically
from wholebatch.readable_sizes import memory_said, short_count

if TYPE_CHECKING:
    from wholebatch.cli.checkpoints import Loaded
    from wholebatch.cli.parallel_ranks import World
    from wholebatch.cli.recipes.recipe import Recipe
    from wholebatch.cli.train_loop import TrainingLoop
    from wholebatch.cli.training_run import TrainingRun

_RUNS = Path("runs")


@command(
    Config,
    "wholebatch train bytes-gpt --batch-size 64 --micro-batch 8",
    'wholebatch train my_recipe.py --micro-batch "4096 tokens" --precision bf16',
    "wholebatch train my_recipe.py --memory 20GiB --out runs/first",
    "wholebatch train --resume --out runs/first",
    "torchrun --nproc-per-node 8 -m wholebatch train mine.py",
    partial=True,
)
def train(given: Given) -> int:
    """Train a recipe: every update is that of the whole batch.

    Defaults come from the recipe. Ctrl-C finishes the window, saves a checkpoint and prints the
    command that continues the run. Under torchrun, every rank takes its share of the batch.
    """
    if given.get("resume") and "out" not in given:
        raise OptionError("--resume: needs --out, the folder of the run to continue")
    resolve(given, {}, stored=None)  # a wrong option is refused at once
    with Spinner(console_of()) as doing:
        doing("importing torch")
        from wholebatch.cli.parallel_ranks import World, process_group

        with process_group() as (rank, where):
            world = World(rank, device=where)
            return _train(given, world, doing)


def _train(given: Given, world: World, doing: Spinner) -> int:
    from wholebatch.cli.checkpoints import Checkpoints
    from wholebatch.cli.recipes.recipe import load_recipe
    from wholebatch.cli.training_run import build_run

    doing("reading the recipe")
    folder = Path(world.on_first_rank(lambda: str(_folder_of(given))))
    stored = None
    if given.get("resume") and (folder / "config.json").exists():
        stored = world.together(lambda: read_config(folder / "config.json"))
    name = given.get("recipe") or (None if stored is None else stored["recipe"])
    recipe = world.together(lambda: load_recipe(name))
    settings = None if stored is None else stored["settings"]
    config = world.together(lambda: resolve(given, recipe.defaults, stored=settings))
    terminal = Terminal(doing.console, name=recipe.name, unit=recipe.unit)
    with ExitStack() as stack:
        world.on_first_rank(lambda: stack.enter_context(_held(folder, is_new=stored is None)) and 0)
        checkpoints = Checkpoints(folder / "checkpoints", world)
        loaded = None
        if stored is not None:
            doing("reading the checkpoint")
            loaded = checkpoints.load()
        doing("building the model and reading the data")
        horizon = config.updates if stored is None else stored["schedule_updates"]
        run = world.together(
            lambda: build_run(recipe, config, world, schedule_updates=int(horizon))
        )
        world.together(lambda: _start(run, loaded, given))
        doing("choosing the micro-batch")
        chosen = world.together(run.choose)
        doing.stop()
        if world.is_first:
            about = {
                "recipe": recipe.known_as,
                "recipe_sha256": recipe.digest,
                "unit": recipe.unit,
                "schedule_updates": horizon,
                "epoch_batches": run.batches.in_an_epoch,
                "data_sha256": run.batches.fingerprint,
                **_about_here(world, recipe),
            }
            text = config_text(run.config, **about)
            write_atomically(folder / "config.json", text, OptionError)
            checkpoints.clean()
        for note in _notes(run, given, stored):
            terminal.note(f"note: {note}")
        about_it = f": {recipe.description}" if recipe.description else ""
        head = f"wholebatch {__version__}  {recipe.name}{about_it}"
        terminal.rows(head, head_rows(run, loaded, folder=folder, chosen=chosen))
        if run.train.updates >= run.config.updates:
            done = run.train.updates
            terminal.note(f"nothing to do: the run has its {done} updates; give --updates for more")
            return 0
        written = None if loaded is None else loaded.path
        return _run(run, folder, checkpoints, terminal, written)


def _start(run: TrainingRun, loaded: Loaded | None, given: Given) -> None:
    """Give the model the values of the checkpoint, if there is one."""
    if given.get("batch_size") not in (None, run.config.batch_size):
        raise OptionError(
            f"--batch-size {given['batch_size']}: the recipe's DataLoader gives batches of "
            f"{run.config.batch_size}; change it there"
        )
    if loaded is not None:
        run.restore(loaded)


def _run(
    run: TrainingRun, folder: Path, checkpoints: Any, terminal: Terminal, written: Path | None
) -> int:
    from wholebatch.cli.metrics import Metrics
    from wholebatch.cli.stop_signal import StopRequest
    from wholebatch.cli.train_loop import TrainingLoop
    from wholebatch.window.forward_state import restore_random

    world, config, metrics = run.world, run.config, None
    again = f"--resume --out {path_from_here(folder)}"
    with ExitStack() as stack:
        if world.is_first:
            random = run.train.state_dict()["random"]  # opening TensorBoard may draw numbers
            metrics = stack.enter_context(
                closing(
                    Metrics(folder, windows=run.windows, wandb=config.wandb, settings=config.stored)
                )
            )
            restore_random(random)
        stop = stack.enter_context(StopRequest(told=world.is_first))
        terminal.begin(done=run.train.updates, total=config.updates)
        stack.callback(terminal.end)
        loop = TrainingLoop(run, checkpoints, metrics, terminal, stop, checkpoint=written)
        began = time.perf_counter()
        loop.updates()
        taken = time.perf_counter() - began
    if not loop.finished:
        where = path_from_here(loop.checkpoint) if loop.checkpoint is not None else folder
        terminal.note(
            f"stopped after update {run.train.updates} of {config.updates}; checkpoint {where}"
        )
        say_command(terminal.console, "Continue with:", command_line(world.ranks, again))
        return STOPPED
    if world.is_first:
        many = f"{run.train.updates} update{'' if run.train.updates == 1 else 's'}"
        title = f"{run.recipe.name}: {many}, {short_duration(taken)}"
        terminal.rows(title, summary_rows(run, loop, folder))
        more = f"{again} --updates {2 * run.train.updates}"
        say_command(terminal.console, "Continue with:", command_line(world.ranks, more))
    return 0


# --------------------------------------------------------------------------------- the run's folder


def _folder_of(given: Given) -> Path:
    """Return the folder of the run; refuse one that has another run."""
    out = given.get("out")
    if out is None:
        name = Path(given.get("recipe") or "bytes-gpt").stem
        stamp = time.strftime("%Y%m%d-%H%M%S")
        places = (
            _RUNS / f"{name}-{stamp}{more}" for more in ("", *(f"-{n}" for n in range(2, 99)))
        )
        return next(place for place in places if not place.exists())
    folder = Path(out)
    try:
        has_run = any(folder.glob("checkpoints/window-*"))
        metrics = folder / "metrics.jsonl"
        has_run = has_run or (metrics.is_file() and metrics.stat().st_size > 0)
    except (OSError, ValueError) as error:
        raise OptionError(f"--out {out}: {reason(error)}") from None
    if has_run and not given.get("resume"):
        raise OptionError(
            f"--out {out}: has a run already; continue it with --resume, or give another --out"
        )
    if given.get("resume") and not has_run and "recipe" not in given:
        raise OptionError(f"--resume: there is no run in {out}; name the RECIPE to begin one")
    return folder


@contextmanager
def _held(folder: Path, *, is_new: bool) -> Iterator[bool]:
    """Make the folder and hold its lock: one process writes to a run.

    A new folder that is left by an error before anything was written is removed again.
    """
    is_made = not folder.exists()
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        raise OptionError(f"--out {folder}: cannot be written: {reason(error)}") from error
    with lock:
        with suppress(ImportError, OSError):  # Windows, a file system without locks
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StateError(
                    f"{folder} is being written by another process; wait, or stop it"
                ) from None
        try:
            yield True
        except BaseException:
            with suppress(OSError):  # of a folder that is not empty
                if is_made and is_new:
                    (folder / "checkpoints").rmdir()
                    (folder / ".lock").unlink()
                    folder.rmdir()
            raise


def command_line(ranks: int, options: str) -> str:
    """Return the command that trains with these options on as many ranks."""
    if ranks == 1:
        return f"wholebatch train {options}"
    local = os.environ.get("LOCAL_WORLD_SIZE", str(ranks))
    return f"torchrun --nproc-per-node {local} -m wholebatch train {options}"


def _about_here(world: World, recipe: Recipe) -> dict[str, Any]:
    """Return the versions, the commit, the device and the ranks, for `config.json`."""
    from wholebatch.cli.provenance import git_state, versions
    from wholebatch.memory.budget import device_name

    return {
        "versions": versions(),
        "git": git_state(recipe.path.parent),
        "device": device_name(world.device),
        "ranks": world.ranks,
    }


# --------------------------------------------------------------------------- the rows on the screen

Rows = list[tuple[str, str]]


def _notes(run: TrainingRun, given: Given, stored: dict[str, Any] | None) -> Iterator[str]:
    """Yield notes on settings that the user may not expect."""
    if stored is not None and stored.get("recipe_sha256") != run.recipe.digest:
        yield f"{run.recipe.path} has changed since this run began"
    if stored is not None and stored.get("data_sha256") != run.batches.fingerprint:
        yield "the data have changed since this run began"
    if stored is not None and run.config.updates != stored["schedule_updates"]:
        yield f"the learning-rate schedule stays that of {stored['schedule_updates']} updates"
    if stored is None and given.get("lr") is None and run.config.lr_rule == "none":
        yield from _rate_notes(run)
    samples = -(-run.config.batch_size // run.world.ranks)
    size = run.train.micro_batch_size
    micro_batches = 1 if size is None else -(-samples // size)
    if (seen := run.batchnorm_sees(samples, micro_batches)) is not None:
        yield batchnorm_warning(seen)


def _rate_notes(run: TrainingRun) -> Iterator[str]:
    """Yield that the batch is another than the learning rate was chosen for, from 2 times on."""
    base, config = run.recipe.batch_size, run.config
    most = max(steps for _, steps in config.schedule)
    times = config.batch_size * most / base
    if times < 2 or run.batches.kind == "loader":  # whose batch is the recipe's own
        return
    grows = "grows to" if len(config.schedule) > 1 else "is"
    whose = "the recipe's" if "batch_size" in run.recipe.defaults else "the default"
    yield (
        f"the batch {grows} {times:.3g} times {whose} {base} at the same learning rate; --lr-rule "
        "sqrt scales it (linear: for SGD)"
    )


def head_rows(run: TrainingRun, loaded: Loaded | None, *, folder: Path, chosen: str | None) -> Rows:
    """Return what will be done, with the arithmetic of the batch."""
    config, world, batches = run.config, run.world, run.batches
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    over = "" if world.ranks == 1 else ", copied on ranks"
    length = batches.length
    data = "a DataLoader" if length is None else f"{length:,} samples"
    if length is not None:
        data += f", {batches.in_an_epoch:,} batches an epoch"
    clip = f", clipped to norm {config.clip_norm:g}" if config.clip_norm else ""
    group = run.optimizer.param_groups[0]
    rate = float(group.get("initial_lr", group["lr"]))
    rows = [
        ("model", f"{short_count(parameters)} parameters on {world.device}{over}"),
        ("data", data),
        ("batch", _batch_text(run)),
        *(("memory", line) for line in (chosen or "").split("\n") if line),
        ("update", f"{type(run.optimizer).__name__}, learning rate {rate:g}{clip}"),
        ("run", f"{config.updates} updates, written to {path_from_here(folder)}/"),
    ]
    if loaded is not None:
        rows.append(("resumed", f"after update {run.train.updates}"))
    return rows


def _batch_text(run: TrainingRun) -> str:
    """Return the arithmetic of the global batch."""
    config, size = run.config, run.train.micro_batch_size
    if run.is_undivided:
        over = "" if run.world.ranks == 1 else f" over {run.world.ranks} ranks"
        return f"{config.batch_size} samples an update{over}, not split (BatchNorm)"
    if size is None:
        by = config.micro_batch if config.tokens else "as memory allows"
        return f"{config.batch_size} samples an update, in micro-batches of {by}"
    if config.steps is not None:
        by = ", ".join(f"{steps} from update {begins}" for begins, steps in config.schedule)
        return f"{size} × steps × {run.world.ranks} samples an update; steps: {by}"
    return Arithmetic(config.batch_size, size, run.world.ranks).line


def summary_rows(run: TrainingRun, loop: TrainingLoop, folder: Path) -> Rows:
    """Return the results of a run, and the folder they are in."""
    rows = [("loss", f"{loop.first_loss:.4f} → {loop.last_loss:.4f}")]
    if loop.validation_loss is not None:
        rows.append(("held out", f"loss {loop.validation_loss:.4f}"))
    if run.train.skipped:
        rows.append(("skipped", f"{run.train.skipped} windows made no update"))
    if run.train.recoveries:
        again = "the window began again in smaller micro-batches"
        rows.append(("out of memory", f"{run.train.recoveries} times; {again}"))
    if loop.watch.ending is not None:
        rows.append(("warning", loop.watch.ending))
    speed = loop.units / loop.seconds if loop.seconds else 0.0
    rows.append(("mean speed", f"{short_count(speed)} {run.recipe.unit}/s"))
    rows.append(("peak memory", memory_said(loop.peak, loop.undivided)))
    rows.append(("updates", _updates_made(run, loop)))
    return [
        *rows,
        ("written to", f"{path_from_here(folder)}/"),
        ("page", f"wholebatch report {path_from_here(folder)}"),
    ]


def _updates_made(run: TrainingRun, loop: TrainingLoop) -> str:
    """Return what the updates of this process are."""
    if loop.batchnorm_saw:
        return not_whole(loop.batchnorm_saw)
    return whole(
        recipe=run.recipe.name if run.recipe.is_embedded else path_from_here(run.recipe.path),
        is_frozen=run.config.batchnorm == "freeze" and run.has_batchnorm,
        is_split=loop.most_micro_batches > 1 or run.world.ranks > 1,
        is_tested=run.recipe.audit,
    )
