"""Options of `wholebatch train`, those whose description is long."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = [
    "AutoResume",
    "BaseBatch",
    "BatchSize",
    "Betas",
    "Checkpointing",
    "Deadline",
    "Execute",
    "Fit",
    "From",
    "Gradients",
    "LrRule",
    "LrSteps",
    "Memory",
    "Noise",
    "Resume",
    "Schedule",
    "Wandb",
    "Warmup",
    "Zero",
]

_BATCH, _RUN, _FOLLOWS = "The batch and the update", "The run", "What follows the batch"

BatchSize: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="N|SCHEDULE",
        help="Samples that make one update, those of all ranks together; or a schedule over "
        "updates, epochs or tokens: 64@0,128@1000 or 64@0,128@2ep or 64@0,128@2Mtok.",
        rich_help_panel=_BATCH,
    ),
]
Execute: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="auto|eager|compile|graph",
        help="How a micro-batch is run.",
        rich_help_panel=_BATCH,
    ),
]
Gradients: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="device|host|swap|release|moments",
        help="Where gradients go: they stay on the device, are summed on the host, take the place "
        "of Adam's moments, which wait on the host, are used and freed in the last backward, or go "
        "into Adam's moments (an approximation).",
        rich_help_panel=_BATCH,
    ),
]
LrRule: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="none|linear|sqrt",
        help="How the learning rate follows the batch size (linear: SGD; sqrt: Adam).",
        rich_help_panel=_FOLLOWS,
    ),
]
BaseBatch: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="The batch size that the learning rate and the betas are meant for. Default: the "
        "schedule's first, else the recipe's own.",
        rich_help_panel=_FOLLOWS,
    ),
]
Betas: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="keep|beta2|both",
        help="Which of Adam's betas keep their half-life in tokens when the batch changes.",
        rich_help_panel=_FOLLOWS,
    ),
]
Warmup: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="N|Nep|Ntok",
        help="Raise the learning rate over so many updates, epochs (5ep) or tokens (2Mtok), from "
        "that of the base batch (from 0 where --lr-rule does not raise it).",
        rich_help_panel=_FOLLOWS,
    ),
]
Noise: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="auto|off|N",
        help="Estimate the gradient noise scale from every N-th window (auto: one in 16), and say "
        "what it means for the batch size.",
        rich_help_panel=_RUN,
    ),
]
Wandb: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="PROJECT|off",
        help="Log to this project of Weights & Biases too (WANDB_MODE=offline: without network).",
        rich_help_panel=_RUN,
    ),
]
From: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Settings from a JSON file: manifest.json of a run makes it again, tune.json takes "
        "what was found. The command line wins.",
        rich_help_panel=_RUN,
    ),
]
Zero: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="0|1|2|3",
        help="With --parallel deepspeed: what is sharded; nothing, optimizer state (the default), "
        "gradients too, parameters too.",
        rich_help_panel=_RUN,
    ),
]
Schedule: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="1f1b|gpipe|interleaved",
        help="With --parallel pipeline: the order of forwards and backwards; interleaved has two "
        "stages on every rank.",
        rich_help_panel=_RUN,
    ),
]
LrSteps: TypeAlias = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Updates that the learning-rate schedule is made for; then the rate stays. Default: "
        "--steps of the run's beginning.",
        rich_help_panel=_FOLLOWS,
    ),
]
Deadline: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS|auto|off",
        help="Under torchrun: end all ranks if one makes no progress for this long. auto: ten "
        "times the slowest window so far, at least 5 minutes.",
        rich_help_panel=_RUN,
    ),
]
Memory: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE|SHARE|free",
        help="How much memory to use, such as 20GiB, 0.8 of the device, or what is free: the "
        "largest micro-batch that fits is chosen, if --micro-batch is not given.",
        rich_help_panel=_BATCH,
    ),
]
Fit: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--fit",
        help="If not even one sample fits: bf16 autocast, then checkpointing of the model's "
        "repeated blocks too, then gradients on the host.",
        rich_help_panel=_BATCH,
    ),
]
Checkpointing: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--checkpointing",
        help="Compute the activations of the model's repeated blocks again in the backward "
        "pass, instead of keeping them.",
        rich_help_panel=_BATCH,
    ),
]
Resume: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the run in --out (else the newest in runs/), bit for bit.",
        rich_help_panel=_RUN,
    ),
]
AutoResume: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--auto-resume",
        help="Continue the run in --out if it has begun, else begin it: one command line for "
        "both. A restart by torchrun does so by itself.",
        rich_help_panel=_RUN,
    ),
]
