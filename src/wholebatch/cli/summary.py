"""What a run says before it begins and after it ended: labelled lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from wholebatch.cli.checkpoints import Found
from wholebatch.cli.report.terminal_output import count_said, shown
from wholebatch.cli.run_settings import Config
from wholebatch.cli.train_loop import Outcome
from wholebatch.cli.training_run import Session
from wholebatch.tune.batch_scaling import Arithmetic

__all__ = ["arithmetic", "head_rows", "schedule_said", "summary_rows"]

Rows = list[tuple[str, str]]


def head_rows(
    session: Session, found: Found | None, *, folder: Path, chosen: str | None = None
) -> Rows:
    """What will be done, with the arithmetic of the batch, and how its micro-batch was chosen."""
    config, model = session.config, session.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    place = str(session.device)
    ranks = session.crew.ranks
    name = type(model).__name__
    if session.crew.is_sharded:  # FSDP2 makes a subclass
        name = name.removeprefix("FSDP")
    spread = "" if ranks == 1 else f", {_spread_said(session)}"
    if session.device.type == "cpu":
        threads = torch.get_num_threads()
        place += f" ({threads} thread{'' if threads == 1 else 's'})"
    group = session.optimizer.param_groups[0]
    rate = float(group.get("initial_lr", group["lr"]))
    clip = f"clipped to norm {config.clip_norm:g}" if config.clip_norm else "not clipped"
    rows = [
        ("model", f"{name}, {parameters:,} parameters, {dtype} on {place}{spread}"),
        ("data", _data_said(session)),
        *_batch_rows(session),
        *(
            ("" if place else "memory", line)
            for place, line in enumerate(_memory_said(session, chosen))
        ),
        (
            "update",
            f"{type(session.optimizer).__name__}, learning rate {rate:g}, {clip}, "
            f"precision {config.precision}",
        ),
        ("run", f"{config.steps} updates, seed {config.seed}, in {shown(folder)}/"),
    ]
    if found is not None:
        state = found.state["train"]
        into = ""
        if state["window"]:
            into = f", {state['done']} micro-batches into the next"
            into += " (begun again: there were no ranks)" if ranks > 1 else ""
        then = len(found.state.get("ranks", [0]))
        into += f", which {then} rank{'' if then == 1 else 's'} made" if then != ranks else ""
        rows.append(("resumed", f"after update {session.train.updates}{into}"))
    return rows


def schedule_said(session: Session, found: Found) -> str | None:
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
    said = f"the learning-rate schedule stays that of {horizon} updates"
    if steps > horizon:
        rate = f" at {now:.3g}" if session.train.updates >= horizon else " as it is then"
        said += f", after them the rate stays{rate}"
    return f"{said};\n  --lr-steps {steps} makes it anew"


def _batch_rows(session: Session) -> Rows:
    """The arithmetic of the batch; of every size, where there is a schedule."""
    config, ranks, schedule = session.config, session.crew.shares, session.pace.schedule
    size = session.train.micro_batch_size
    if schedule is None or size is None:
        return [("batch", batch_said(session.micro_batches(), config, ranks=ranks))]
    what = schedule.by.removesuffix("s")
    return [
        (
            "batch" if not place else "",
            f"from {what} {place:,}: {Arithmetic(samples, size, ranks)} samples an update",
        )
        for place, samples in schedule.changes
    ]


def _spread_said(session: Session) -> str:
    config, crew = session.config, session.crew
    stages = crew.ranks * (2 if config.schedule == "interleaved" else 1)
    return {
        "ddp": "DDP",
        "fsdp2": "sharded (FSDP2)",
        "deepspeed": f"DeepSpeed ZeRO {config.zero}",
        "pipeline": f"a pipeline of {stages} stages ({config.schedule})",
    }[crew.parallel]


def _memory_said(session: Session, chosen: str | None) -> list[str]:
    lines = [] if chosen is None else chosen.split("\n")
    if session.fitted is not None:
        lines.append(f"--fit: {session.fitted}")
    elif session.config.checkpointing:
        lines.append("repeated blocks are computed again in the backward pass")
    return lines


def summary_rows(session: Session, outcome: Outcome, *, memory: str, folder: Path) -> Rows:
    """What came out, and where it is."""
    rows = [
        ("loss", f"{outcome.first_loss:.4f} → {outcome.last_loss:.4f}"),
        ("speed", f"{count_said(outcome.units_per_second)} {session.recipe.unit}/s"),
        ("peak memory", memory),
        ("written to", f"{shown(folder)}/"),
        ("", "metrics.jsonl  tensorboard/  checkpoints/  config.json  manifest.json"),
    ]
    noise = session.train.noise
    if noise is not None and noise.samples >= 4:
        rows.insert(2, ("batch size", noise.advice(session.recipe.unit)))
    if session.train.recoveries:
        count = session.train.recoveries
        rows.insert(
            1, ("out of memory", f"{count} times; the window began again in smaller micro-batches")
        )
    if session.train.skipped:
        rows.insert(1, ("skipped", f"{session.train.skipped} windows made no update"))
    return rows


def arithmetic(sizes: Sequence[int] | None, config: Config, *, ranks: int = 1) -> str:
    """How the global batch comes about: micro-batch × steps × ranks, with a remainder as it is.

    >>> from wholebatch.cli.run_settings import Config
    >>> config = Config(64, 12, 1, "full", None, None, 0, 1)
    >>> arithmetic([12, 12, 12, 12, 12, 4], config)
    '(12 × 5 + 4) × 1 rank = 64 samples an update (micro-batch × steps × ranks)'
    """
    said = f"{ranks} rank{'' if ranks == 1 else 's'}"
    if sizes is None:
        return (
            f"{config.batch_size} samples × {said} an update, as few micro-batches as memory allows"
        )
    total = sum(sizes) * ranks
    groups: list[tuple[int, int]] = []  # (samples, how many in a row)
    for size in sizes:
        if groups and groups[-1][0] == size:
            groups[-1] = (size, groups[-1][1] + 1)
        else:
            groups.append((size, 1))
    first, *others = groups
    terms = f"{first[0]} × {first[1]}"
    for size, count in others:
        terms += f" + {size}" if count == 1 else f" + {size} × {count}"
    if len(groups) > 1:
        terms = f"({terms})"
    budget = f", at most {config.micro_batch} each" if config.tokens else ""
    return f"{terms} × {said} = {total} samples an update (micro-batch × steps × ranks{budget})"


def batch_said(sizes: Sequence[Sequence[int]] | None, config: Config, *, ranks: int) -> str:
    """The same, where the batch may not divide by the ranks: micro-batches of each of them.

    >>> from wholebatch.cli.run_settings import Config
    >>> config = Config(10, 2, 1, "full", None, None, 0, 1)
    >>> batch_said([[2, 2], [2, 1], [2, 1]], config, ranks=3)
    '2 × 2 × 1 rank + (2 × 1 + 1) × 2 ranks = 10 samples an update (micro-batch × steps × ranks)'
    """
    if sizes is None:
        if ranks == 1:
            return arithmetic(None, config)
        return (
            f"{config.batch_size} samples over {ranks} ranks an update, as few micro-batches as "
            "memory allows"
        )
    alike: list[tuple[Sequence[int], int]] = []  # (micro-batches, ranks in a row that have them)
    for one in sizes:
        if alike and list(alike[-1][0]) == list(one):
            alike[-1] = (one, alike[-1][1] + 1)
        else:
            alike.append((one, 1))
    if len(alike) == 1:
        return arithmetic(sizes[0], config, ranks=ranks)
    said = [arithmetic(one or [0], config, ranks=count) for one, count in alike]
    terms = " + ".join(one.partition(" = ")[0] for one in said)
    total = sum(map(sum, sizes))
    return f"{terms} = {total} samples an update{said[0].partition(' samples an update')[2]}"


def _data_said(session: Session) -> str:
    batches = session.batches
    if batches.length is not None and session.pace.schedule is not None:
        return f"{batches.length:,} samples"
    if batches.length is not None:
        count = -(-batches.length // session.config.batch_size)
        return f"{batches.length:,} samples, {count:,} batches an epoch"
    return "batches of a DataLoader" if batches.kind == "loader" else "a stream of samples"
