"""What commands that measure a recipe have in common: its batches, its clock, its page."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from wholebatch.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    import torch

    from wholebatch.cli.recipes import Recipe
    from wholebatch.cli.run_settings import Config

__all__ = ["CLOCKS", "check_measuring", "check_writable", "full_batches", "made", "page_beside"]

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""What `--clock` may be."""


def check_measuring(*, out: Path, clock: str, seconds: float) -> None:
    """Refuse what `--out`, `--clock` and `--seconds` cannot be."""
    if out.suffix != ".json":
        raise OptionError(f"--out {out}: must be the name of a .json file")
    if clock not in CLOCKS:
        raise OptionError(f"--clock {clock}: must be {' or '.join(CLOCKS)}")
    if not seconds > 0:
        raise OptionError(f"--seconds {seconds:g}: must be above 0")
    check_writable(out)


def check_writable(out: Path) -> None:
    """Refuse a file that could not be written, before hours are spent on what goes into it."""
    if out.is_dir():
        raise OptionError(f"--out {out}: is a folder; give the name of a file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out.parent):
            pass
        if out.exists() and not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise OptionError(f"--out {out}: cannot be written: {error.strerror}") from error


def full_batches(
    recipe: Recipe, config: Config, *, rank: int = 0, ranks: int = 1
) -> tuple[Config, Callable[[], Any]]:
    """The settings as the data has them, and a function that gives the next full batch.

    Of several ranks this one's share; epoch after epoch.
    """
    from wholebatch.cli.recipes import Batches
    from wholebatch.cli.training_run import fitted_to

    batches = Batches(
        recipe.build_data,
        batch_size=config.batch_size,
        seed=config.seed,
        collate=recipe.collate,
        rank=rank,
        ranks=ranks,
    )
    config = fitted_to(config, batches)
    whole = None if batches.length is None else batches.length // config.batch_size

    def take() -> Any:
        if whole and batches.position.batch >= whole:
            batches.take()  # the short last one of an epoch says nothing about the others
        return batches.take()

    return config, take


def made(
    recipe: Recipe, config: Config, where: torch.device
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The recipe's model on its device and its optimizer, the same every time."""
    import torch

    torch.manual_seed(config.seed)
    model = recipe.build_model()
    if config.precision == "bf16-pure":
        model.to(torch.bfloat16)
    model.to(where)
    return model, recipe.build_optimizer(model, lr=config.lr)


def page_beside(out: Path) -> Path | None:
    """The page beside the file; None without the package that draws it."""
    from wholebatch.cli.report.html_report import write_report

    try:
        return write_report([out], out.with_suffix(".html"))
    except MissingExtraError:
        return None
