"""A training run put together from its recipe and settings, saved and restored as one."""

from __future__ import annotations

import platform
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wholebatch import WholeBatch, __version__
from wholebatch.cli.checkpoints import Checkpoints, Found
from wholebatch.cli.deepspeed_run import Zero
from wholebatch.cli.fit_option import apply_checkpointing, fit_in
from wholebatch.cli.parallel_ranks import Crew
from wholebatch.cli.peak_memory import PeakMemory
from wholebatch.cli.pipeline_run import Staged
from wholebatch.cli.recipes import Batches, Nothing, Position, Recipe, share_of
from wholebatch.cli.run_checkpoint import Parts, restore, save
from wholebatch.cli.run_schedule import Pace, paced
from wholebatch.cli.run_settings import Config
from wholebatch.cli.training_engines import micro_batch_of, move, train_with
from wholebatch.core.splitting import batch_size_of, split
from wholebatch.coupled import batchnorms
from wholebatch.errors import OptionError

__all__ = ["Session", "about_here", "build", "choose_device", "fitted_to"]


@dataclass
class Session:
    """Everything that trains, with the settings that it was built from."""

    recipe: Recipe
    config: Config
    crew: Crew
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: WholeBatch | Staged
    memory: PeakMemory
    batches: Batches
    position: Position  # of the batch that the open or next window is made from
    pace: Pace
    fitted: str | None = None  # what --fit has applied
    engine: Zero | Staged | None = None

    @property
    def device(self) -> torch.device:
        return self.crew.device

    @property
    def windows(self) -> int:
        """Windows closed so far, those without an update too."""
        return self.train.updates + self.train.skipped

    def save(self, checkpoints: Checkpoints, *, micro_batches: int = 0) -> Path:
        """A checkpoint of this moment; of one process also in the middle of a window."""
        data = {**self.batches.state_dict(self.position), **self.pace.state_dict()}
        return save(self._parts, self.crew, checkpoints, data=data, micro_batches=micro_batches)

    def restore(self, found: Found) -> None:
        """Go on from a checkpoint; a StateError when it does not belong to this recipe."""
        restore(self._parts, self.crew, found, data=self.batches, seed=self.config.seed)
        self.position = self.batches.position
        self.pace.load_state_dict(found.state["data"])

    @property
    def _parts(self) -> Parts:
        return Parts(self.recipe.name, self.model, self.optimizer, self.train, self.engine)

    def choose(self) -> str | None:
        """Let "auto" choose its micro-batch before the first step: what, and why, in two lines."""
        if self.train.micro_batch_size is not None or self.train.micro_batch != "auto":
            return None  # given, or chosen by the run that is resumed
        batch = self.batches.peek()
        return self.train.choose(batch.like if isinstance(batch, Nothing) else batch)

    def micro_batches(self) -> list[list[int]] | None:
        """Samples in each micro-batch of a full batch, by rank; None where it must be seen."""
        by, ranks = self.config.micro_batch, self.crew.shares
        if by == "auto":
            by = self.train.micro_batch_size or by
        if isinstance(by, int) and self.batches.kind != "loader":
            shares = [
                share_of(self.config.batch_size, rank=rank, ranks=ranks) for rank in range(ranks)
            ]
            return [_pieces(share.stop - share.start, by) for share in shares]
        if by == "auto":
            return None
        batch = self.batches.peek()
        how = by if isinstance(by, int) else micro_batch_of(self.recipe, self.config)
        mine = [] if isinstance(batch, Nothing) else split(batch, how)
        return self.crew.gathered([batch_size_of(micro) for micro in mine])


def _pieces(samples: int, by: int) -> list[int]:
    whole, rest = divmod(samples, by)
    return [by] * whole + [rest] * bool(rest)


def build(
    recipe: Recipe,
    config: Config,
    crew: Crew,
    *,
    fits: bool = False,
    keeps_precision: bool = False,
) -> Session:
    """The parts of the recipe, from the seed on the same every time, on every rank.

    `fits`: let the model fit the memory, by what `--fit` may apply.
    """
    _seed(config.seed)
    batches = Batches(
        recipe.build_data,
        batch_size=config.batch_size,
        seed=config.seed,
        collate=recipe.collate,
        rank=crew.share,
        ranks=crew.shares,
    )
    config = paced(fitted_to(config, batches), recipe, batches)
    model = recipe.build_model()
    _check_last_batch(model, config, batches, crew)
    move(model, config, crew)
    fitted = None
    if fits:
        config, fitted = fit_in(
            recipe, config, model, batches, crew, keeps_precision=keeps_precision
        )
    if config.checkpointing:
        apply_checkpointing(model)
    trained = train_with(recipe, config, crew, model)
    optimizer, train = trained.optimizer, trained.train
    memory = PeakMemory(model, optimizer, device=crew.device)
    # The meter knows whole tensors only.
    memory.settled = memory.settled or crew.parallel != "ddp"
    if crew.rank:  # dropout of its own on every rank
        _seed(config.seed + crew.rank)
    return Session(
        recipe,
        config,
        crew,
        model,
        optimizer,
        train,
        memory,
        batches,
        batches.position,
        Pace(config, batches=batches, optimizer=optimizer, train=train),
        fitted,
        trained.engine,
    )


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one; what is asked for and not there is refused."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"--device {name}: must be auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"--device {name}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            there = f"there are {count} CUDA devices" if count else "there is no CUDA device here"
            raise OptionError(f"--device {name}: {there}")
    return device


def about_here() -> dict[str, Any]:
    """What else a reader of `config.json` may want to know."""
    return {
        "wholebatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def fitted_to(config: Config, batches: Batches) -> Config:
    """The settings, with the batch size that the data really has."""
    if batches.kind == "loader":
        size = batches.loader_batch_size
        if size is None:  # batches of the loader's own making: each is taken whole
            return config
        config = replace(config, batch_size=size)
    elif batches.length is not None and config.batch_size > batches.length:
        raise OptionError(
            f"--batch-size {config.batch_size}: is more than the {batches.length:,} samples that "
            "the recipe's data() has"
        )
    if isinstance(config.micro_batch, int) and config.micro_batch > config.batch_size:
        raise OptionError(
            f"--micro-batch {config.micro_batch}: is more than the batch of {config.batch_size}; "
            'give at most that, or "auto"'
        )
    return config


def _check_last_batch(model: nn.Module, config: Config, batches: Batches, crew: Crew) -> None:
    """Exact BatchNorm meets on all ranks at every layer: each must have a sample."""
    if batches.length is None or not batchnorms(model):
        return
    for size in (config.batch_size, batches.length % config.batch_size):
        if 0 < size < crew.shares:
            raise OptionError(
                f"--batch-size {config.batch_size}: a batch of an epoch has {size} samples for "
                f"{crew.shares} ranks, and exact BatchNorm needs one on every rank; choose another"
            )


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
