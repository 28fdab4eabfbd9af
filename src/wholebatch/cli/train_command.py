"""`wholebatch train`: a recipe, trained with the update of the whole batch.

The options are in `run_settings`, what they become in `training_run`, the loop in `train_loop`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from wholebatch import __version__
from wholebatch.cli.command_options import command
from wholebatch.cli.report.terminal_output import (
    Spinner,
    Terminal,
    console_of,
    path_from_here,
    short_count,
    short_duration,
)
from wholebatch.cli.run_settings import Config, Given, SettingsFile, given_of, read_settings_file
from wholebatch.cli.stop_signal import STOPPED
from wholebatch.errors import OptionError
from wholebatch.readable_sizes import bytes_said
from wholebatch.tune.batch_scaling import Arithmetic, lr_factor
from wholebatch.tune.batch_scaling.batch_arithmetic import runs_said

if TYPE_CHECKING:
    from wholebatch.cli.checkpoints import Found
    from wholebatch.cli.parallel_ranks import World
    from wholebatch.cli.run_folder import RunFolder, RunStart
    from wholebatch.cli.train_loop import TrainingLoop
    from wholebatch.cli.training_run import Pace, Session

Rows = list[tuple[str, str]]


@command(
    Config,
    "wholebatch train bytes-gpt --batch-size 64 --micro-batch 8",
    'wholebatch train my_recipe.py --micro-batch "4096 tokens" --precision bf16',
    "wholebatch train my_recipe.py --memory 20GiB --fit",
    "wholebatch train --resume",
    "torchrun --nproc-per-node 8 -m wholebatch.cli train my_recipe.py --parallel fsdp2",
    partial=True,
)
def train(typed: Given) -> int:
    """Train a recipe: every update is that of the whole batch.

    Defaults come from the recipe. Ctrl-C saves a checkpoint and prints the command that continues
    the run. Under torchrun, every rank takes its share of the batch.
    """
    for flag, name in (("--from", "source"), ("--fit", "fit")):
        if "resume" in typed and name in typed:
            raise OptionError(f"{flag} with --resume: a run goes on with its own settings")
    source = read_settings_file(typed.get("source"))
    given = given_of(typed, source)
    parallel = given.get("parallel", "ddp")
    for name, engine in (("zero", "deepspeed"), ("schedule", "pipeline"), ("sync", "fsdp2")):
        if name in typed and parallel != engine:
            raise OptionError(f"--{name} {typed[name]}: belongs to --parallel {engine}")

    with Spinner(console_of()) as doing:
        doing("importing torch")
        return _in_group(given, source, parallel, doing, typed=frozenset(typed))


def _in_group(
    given: Given, source: SettingsFile, parallel: str, doing: Spinner, *, typed: frozenset[str]
) -> int:
    """Join the ranks, if there are several, and train."""
    import torch

    from wholebatch.cli.error_messages import short_warnings
    from wholebatch.cli.parallel_ranks import World, process_group

    if source.threads is not None:
        torch.set_num_threads(source.threads)
    with process_group(given.get("device", "auto")) as (rank, where):
        world = World(rank, device=where, parallel=parallel)
        with world.failures(), short_warnings(shown=world.is_first):
            return _train(given, source, world, doing, typed=typed)


def _train(
    given: Given, source: SettingsFile, world: World, doing: Spinner, *, typed: frozenset[str]
) -> int:
    from wholebatch.cli.error_messages import training_failures
    from wholebatch.cli.run_folder import checkpoint_of, find
    from wholebatch.cli.training_run import build
    from wholebatch.cli.validation import check_validation

    doing("reading the recipe")
    start = find(given, world, typed=typed)
    recipe, folder = start.recipe, start.folder
    terminal = Terminal(doing.console, name=recipe.name, unit=recipe.unit)
    with folder.held(start.wait) if world.is_first else nullcontext():
        doing("building the model and reading the data")
        found = checkpoint_of(start, world)
        fits = start.config.fit and not start.is_resumed
        keeps = "precision" in given
        session = world.together(
            lambda: build(recipe, start.config, world, fits=fits, keeps_precision=keeps)
        )
        check_validation(session)
        world.together(lambda: _take_up(session, found, given.get("batch_size")))
        with training_failures(session, folder.path):  # a first batch may be read here
            doing("choosing the micro-batch")
            chosen = world.together(session.choose)
            rows = head_rows(session, found, folder=folder.path, chosen=chosen)
        doing.stop()
        # Everything fits: from here on the folder is written.
        for note in _differences(start, source, session, found):
            terminal.note(f"note: {note}")
        world.first(lambda: _begin(session, folder, found, terminal))
        about = f": {recipe.description}" if recipe.description else ""
        terminal.rows(f"wholebatch {__version__}  {recipe.name}{about}", rows)
        for note in _idle(session):
            terminal.note(f"note: {note}")
        done = session.progress
        if done >= session.config.steps:
            terminal.note(f"nothing to do: the run has its {done} updates; give --steps for more")
            return 0
        with training_failures(session, folder.path), world.failures():
            return _run(session, folder, found, terminal, doing)


def _take_up(session: Session, found: Found | None, batch_size: int | None) -> None:
    from wholebatch.cli.run_checkpoint import restore_run

    if batch_size not in (None, session.config.batch_size):
        raise OptionError(
            f"--batch-size {batch_size}: the recipe's DataLoader gives batches of "
            f"{session.config.batch_size}; change it there"
        )
    if found is not None:
        restore_run(session, found)


def _differences(
    start: RunStart, source: SettingsFile, session: Session, found: Found | None
) -> Iterator[str]:
    """Yield a note for each thing that is not as it was in the run that is resumed or repeated."""
    from wholebatch.cli.run_folder import versions_here

    recipe = start.recipe
    if start.has_changed:
        yield f"{recipe.path} has changed since this run began"
    ranks = session.world.ranks
    yield from source.notes(digest=recipe.digest, versions=versions_here(), ranks=ranks)
    if found is not None and (goes_on := schedule_text(session, found)):
        yield goes_on


def _idle(session: Session) -> Iterator[str]:
    """Yield a note for each option that does little or nothing here."""
    world, precision = session.world, session.config.precision
    if session.world.device.type == "cpu" and precision != "full":
        yield f"{precision} is slow on a CPU without hardware for it"
    yield from _unscaled(session)
    if world.asked != world.parallel:
        yield f"--parallel {world.asked} has no effect: it is for torchrun; this is one process"
    if session.config.workers and not session.batches.reads_ahead:
        yield "--workers reads ahead for datasets and one batch size; here it does nothing"


def _unscaled(session: Session) -> Iterator[str]:
    """Yield a note if the batch is not the recipe's, and nobody has said what the rate does."""
    config, schedule = session.config, session.pace.schedule
    base, size = config.base_batch, schedule.largest if schedule else config.batch_size
    if base in (None, size) or config.lr_rule or config.lr or config.grows:
        return
    rule = "sqrt" if all("betas" in g for g in session.optimizer.param_groups) else "linear"
    factor = lr_factor(base_batch=base, batch=size, rule=rule)
    yield (
        f"the learning rate is for batches of {base}, and batches of {size} come: --lr-rule {rule} "
        f"multiplies it by {factor:.3g}; --lr-rule none keeps it"
    )


def _begin(session: Session, folder: RunFolder, found: Found | None, terminal: Terminal) -> None:
    """Put the folder in order: what was left half written goes, what is damaged steps aside."""
    from wholebatch.cli.checkpoints import Checkpoints
    from wholebatch.cli.run_folder import describe_run

    checkpoints = Checkpoints(folder.checkpoints)
    checkpoints.clean()
    if found is None:
        folder.clear_beginning()
    else:
        for _, reason in found.damaged:
            terminal.note(f"note: {reason}; going back to {found.path.name}")
        checkpoints.set_aside(found)
    describe_run(folder, session)


def _run(
    session: Session, folder: RunFolder, found: Found | None, terminal: Terminal, doing: Spinner
) -> int:
    from wholebatch.cli.run_folder import resume_command
    from wholebatch.cli.train_loop import run_loop

    world = session.world
    outcome = run_loop(session, folder, terminal)
    updates = session.train.updates
    if not outcome.finished:
        auto = session.pace.auto
        data = "" if auto is None else f" ({auto.done} by the data)"
        place = f"after update {updates}{data} of {session.config.steps}"
        terminal.note(f"stopped {place}; checkpoint {path_from_here(outcome.checkpoint)}")
        again = resume_command(folder.path, parallel=world.parallel)
        terminal.command("Continue with:", again)
        return STOPPED
    if not world.is_first:
        return 0
    if world.ranks > 1:
        peak = session.memory.measured  # of its share of the batch
        memory = (
            "not measured" if peak is None else f"{bytes_said(peak)} measured on the first rank"
        )
    else:
        doing("predicting the memory of the whole batch at once")
        memory = session.memory.text(
            session.recipe.loss, outcome.largest[1], precision=session.config.autocast
        )
        doing.stop()
    rows = summary_rows(session, outcome, memory=memory, folder=folder.path)
    many = f"{updates} update{'' if updates == 1 else 's'}"
    title = f"{session.recipe.name}: {many}, {short_duration(outcome.seconds)}"
    terminal.rows(title, rows, boxed=True)
    # Outside the box: a line to copy.
    again = resume_command(folder.path, steps=2 * session.progress, parallel=world.parallel)
    terminal.command("Continue with:", again)
    return 0


# --------------------------------------------------------------------------- the rows on the screen


def head_rows(session: Session, found: Found | None, *, folder: Path, chosen: str | None) -> Rows:
    """Return what will be done, with the arithmetic of the batch and how it was chosen."""
    config = session.config
    group = session.optimizer.param_groups[0]
    rate = float(group.get("initial_lr", group["lr"]))
    clip = f"clipped to norm {config.clip_norm:g}" if config.clip_norm else "not clipped"
    rule, base, size = session.pace.rule, config.base_batch, config.batch_size
    scaled = ""
    if rule != "none" and base not in (None, size) and not session.pace.changes:
        factor = lr_factor(base_batch=base, batch=size, rule=rule)
        scaled = f" × {factor:.3g} (--lr-rule {rule}, {base} → {size} samples)"
    update = (
        f"{type(session.optimizer).__name__}, learning rate {rate:g}{scaled}, {clip}, "
        f"precision {config.precision}"
    )
    auto, updates = session.pace.auto, f"{config.steps} update{'' if config.steps == 1 else 's'}"
    length = updates if auto is None else f"the data of {updates} of {auto.first}"
    rows = [
        ("model", _model_text(session)),
        ("data", _data_text(session)),
        *_batch_rows(session),
        *(
            ("" if place else "memory", line)
            for place, line in enumerate(_memory_text(session, chosen))
        ),
        ("update", update),
        ("run", f"{length}, seed {config.seed}, in {path_from_here(folder)}/"),
    ]
    if found is not None:
        rows.append(("resumed", _resumed_text(found, session)))
    return rows


def _model_text(session: Session) -> str:
    import torch

    model, place = session.model, str(session.world.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    name = type(model).__name__
    if session.world.is_sharded:  # FSDP2 makes a subclass
        name = name.removeprefix("FSDP")
    if session.world.device.type == "cpu":
        threads = torch.get_num_threads()
        place += f" ({threads} thread{'' if threads == 1 else 's'})"
    spread = "" if session.world.ranks == 1 else f", {_spread_text(session)}"
    return f"{name}, {parameters:,} parameters, {dtype} on {place}{spread}"


def _spread_text(session: Session) -> str:
    config, world = session.config, session.world
    stages = world.ranks * (2 if config.schedule == "interleaved" else 1)
    return {
        "ddp": "DDP",
        "fsdp2": "sharded (FSDP2)",
        "deepspeed": f"DeepSpeed ZeRO {config.zero}",
        "pipeline": f"a pipeline of {stages} stages ({config.schedule})",
    }[world.parallel]


def _data_text(session: Session) -> str:
    batches = session.batches
    if batches.length is not None and session.pace.changes:
        return f"{batches.length:,} samples"
    if batches.length is not None:
        count = -(-batches.length // session.config.batch_size)
        return f"{batches.length:,} samples, {count:,} batches an epoch"
    return "batches of a DataLoader" if batches.kind == "loader" else "a stream of samples"


def _batch_rows(session: Session) -> Rows:
    """Return the arithmetic of the batch; of every size, where there is a schedule."""
    config, ranks, schedule = session.config, session.world.shares, session.pace.schedule
    size = session.train.micro_batch_size
    if schedule is None or size is None:
        rows = [("batch", batch_text(session.micro_batches(), config, ranks=ranks))]
        return [*rows, *([] if session.pace.auto is None else [("", growth_text(session.pace))])]
    what = schedule.by.removesuffix("s")
    return [
        (
            "batch" if not place else "",
            f"from {what} {place:,}: {Arithmetic(samples, size, ranks)} samples an update",
        )
        for place, samples in schedule.changes
    ]


def growth_text(pace: Pace) -> str:
    """Return how the batch grows, and how far."""
    assert pace.auto is not None
    most = "" if pace.auto.largest is None else f", at most {pace.auto.largest:,}"
    return f"doubled while the critical batch is larger{most}; learning rate by {pace.rule}"


def batch_text(sizes: Sequence[Sequence[int]] | None, config: Config, *, ranks: int) -> str:
    """Return the arithmetic of the global batch, from the micro-batches of each rank.

    >>> batch_text([[12, 12, 12, 12, 12, 4]], Config(), ranks=1)
    '(12 × 5 + 4) × 1 rank = 64 samples an update (micro-batch × steps × ranks)'
    >>> batch_text([[2, 2], [2, 1], [2, 1]], Config(), ranks=3)
    '2 × 2 × 1 rank + (2 × 1 + 1) × 2 ranks = 10 samples an update (micro-batch × steps × ranks)'
    """
    if sizes is None:
        over = "× 1 rank" if ranks == 1 else f"over {ranks} ranks"
        few = "as few micro-batches as memory allows"
        return f"{config.batch_size} samples {over} an update, {few}"
    budget = f", at most {config.micro_batch} each" if config.tokens else ""
    return f"{runs_said(sizes)} samples an update (micro-batch × steps × ranks{budget})"


def _memory_text(session: Session, chosen: str | None) -> list[str]:
    lines = [] if chosen is None else chosen.split("\n")
    if session.fitted is not None:
        lines.append(f"--fit: {session.fitted}")
    elif session.config.checkpointing:
        lines.append("repeated blocks are computed again in the backward pass")
    return lines


def _resumed_text(found: Found, session: Session) -> str:
    ranks = session.world.ranks
    into = f"after update {session.train.updates}"
    then = len(found.state.get("ranks", [0]))
    into += f", which {then} rank{'' if then == 1 else 's'} made" if then != ranks else ""
    return into


def schedule_text(session: Session, found: Found) -> str | None:
    """Return how the learning-rate schedule goes on, where that is not plain; else None."""
    horizon, steps = session.config.horizon, session.config.steps
    groups = found.state.get("optimizer", {}).get("param_groups", [{}])
    then, now = groups[0].get("lr"), float(session.optimizer.param_groups[0]["lr"])
    states = found.state["train"]["schedulers"]
    if any(state.get("horizon", horizon) != horizon for state in states):
        was = "" if then is None else f" (it was {float(then):.3g})"
        return f"the schedule is made anew for {horizon} updates: learning rate {now:.3g}{was}"
    if steps == horizon or not session.recipe.schedule_ends:
        return None
    stays = f"the learning-rate schedule stays that of {horizon} updates"
    if steps > horizon:
        rate = f" at {now:.3g}" if session.train.updates >= horizon else " as it is then"
        stays += f", after them the rate stays{rate}"
    return f"{stays};\n  --lr-steps {steps} makes it anew"


def summary_rows(session: Session, outcome: TrainingLoop, *, memory: str, folder: Path) -> Rows:
    """Return the results of a run, and the folder they are in."""
    train = session.train
    rows = [("loss", f"{outcome.first_loss:.4f} → {outcome.last_loss:.4f}")]
    if outcome.validation_loss is not None:
        rows.append(("held out", f"loss {outcome.validation_loss:.4f}"))
    if train.skipped:
        rows.append(("skipped", f"{train.skipped} windows made no update"))
    if session.spikes.count:
        where = (
            'marked "spike" in metrics.jsonl; a longer warm-up, a lower rate or --clip-norm help'
        )
        rows.append(("loss spikes", f"{session.spikes.count}, {where}"))
    if train.recoveries:
        again = "the window began again in smaller micro-batches"
        rows.append(("out of memory", f"{train.recoveries} times; {again}"))
    rows.append(("speed", f"{short_count(outcome.units_per_second)} {session.recipe.unit}/s"))
    auto = session.pace.auto
    if auto is not None:
        grown = f"{auto.first:,} → {auto.batch:,} samples an update"
        instead = f"{train.updates:,} updates instead of {auto.done:,}"
        rows.append(("batch", f"{grown}: {instead}" if auto.batch > auto.first else grown))
    if train.noise is not None and train.noise.samples >= 4:
        rows.append(("batch size", train.noise.advice(session.recipe.unit)))
    names = ("metrics.jsonl", "tensorboard", "checkpoints", "config.json", "manifest.json")
    written = (
        f"{name}/" if "." not in name else name for name in names if (folder / name).exists()
    )
    return [
        *rows,
        ("peak memory", memory),
        ("written to", f"{path_from_here(folder)}/"),
        ("", "  ".join(written)),
    ]
