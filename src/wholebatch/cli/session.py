"""A training run put together from its recipe and settings, saved and restored as one."""

from __future__ import annotations

import os
import platform
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wholebatch import WholeBatch, __version__
from wholebatch.checkpoint import Checkpoints, Found, check_model
from wholebatch.cli.memory import PeakMemory
from wholebatch.cli.options import Config
from wholebatch.errors import OptionError, RecipeError, StateError, UnsupportedError
from wholebatch.recipes import Batches, Position, Recipe
from wholebatch.splitting import batch_size_of, split

__all__ = ["Session", "about_here", "build", "choose_device"]


@dataclass
class Session:
    """Everything that trains, with the settings that it was built from."""

    recipe: Recipe
    config: Config
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: WholeBatch
    memory: PeakMemory
    batches: Batches
    position: Position  # of the batch that the open or next window is made from

    @property
    def windows(self) -> int:
        """Windows closed so far, those without an update too."""
        return self.train.updates + self.train.skipped

    def save(self, checkpoints: Checkpoints, *, micro_batches: int = 0) -> Path:
        """A checkpoint of this moment, also in the middle of a window."""
        state = {
            "recipe": self.recipe.name,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "train": self.train.state_dict(),
            "data": self.batches.state_dict(self.position),
        }
        return checkpoints.save(state, windows=self.windows, micro_batches=micro_batches)

    def restore(self, found: Found) -> None:
        """Go on from a checkpoint; a StateError when it does not belong to this recipe."""
        state = found.state
        missing = {"model", "optimizer", "train", "data"} - state.keys()
        if missing:
            raise StateError(f"{found.path} is damaged: it has no {', '.join(sorted(missing))}")
        check_model(self.model, state["model"], where=str(found.path))
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError, RuntimeError) as error:
            raise StateError(
                f"{found.path} does not fit this recipe's optimizer: {error}"
            ) from error
        self.batches.load_state_dict(state["data"])
        self.position = self.batches.position
        self.train.load_state_dict(state["train"])  # last: it puts the random generators back

    def micro_batches(self) -> Sequence[int] | None:
        """Samples in each micro-batch of a full batch; None where the first window decides."""
        by = self.train.micro_batch
        if by == "auto":
            return None
        if isinstance(self.config.micro_batch, int) and self.batches.kind != "loader":
            whole, rest = divmod(self.config.batch_size, self.config.micro_batch)
            return [self.config.micro_batch] * whole + [rest] * bool(rest)
        batch = self.batches.peek()
        return [batch_size_of(micro) for micro in split(batch, by)]


def build(recipe: Recipe, config: Config, *, device: torch.device) -> Session:
    """The parts of the recipe, from the seed on the same every time."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise UnsupportedError(
            f"WORLD_SIZE={world}: wholebatch train runs as one process; start it without a "
            "launcher, or wrap the model in DDP in a script of your own with wb.WholeBatch"
        )
    _seed(config.seed)
    batches = Batches(
        recipe.build_data, batch_size=config.batch_size, seed=config.seed, collate=recipe.collate
    )
    config = _fitted(config, batches)
    model = recipe.build_model()
    if config.precision == "bf16-pure":
        model.to(torch.bfloat16)
    try:
        model.to(device)
    except (RuntimeError, NotImplementedError) as error:
        raise RecipeError(f"the recipe's model cannot be moved to {device}: {error}") from error
    optimizer = recipe.build_optimizer(model, lr=config.lr)
    memory = PeakMemory(model, optimizer, device=device)

    def loss(model: nn.Module, micro: Any) -> Any:
        memory.follow()
        return recipe.loss(model, micro)

    train = WholeBatch(
        model,
        optimizer,
        loss=loss,
        units=recipe.units,
        micro_batch=_micro_batch(recipe, config),
        precision=config.autocast,
        clip_norm=config.clip_norm,
        scheduler=recipe.build_scheduler(optimizer, steps=config.steps),
    )
    return Session(
        recipe, config, device, model, optimizer, train, memory, batches, batches.position
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


def _fitted(config: Config, batches: Batches) -> Config:
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


def _micro_batch(recipe: Recipe, config: Config) -> Any:
    return config.micro_batch if config.tokens is None else recipe.build_tokens(config.tokens)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
