"""What changes on the way of a run: the batch size, and with it the learning rate and the betas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from wholebatch import WholeBatch
from wholebatch.cli.pipeline_run import Staged
from wholebatch.cli.recipes import Batches, Recipe
from wholebatch.cli.run_settings import Config
from wholebatch.errors import OptionError
from wholebatch.tune.batch_scaling import BatchSchedule, Follow, parse_amount

__all__ = ["Pace", "paced"]


def paced(config: Config, recipe: Recipe, batches: Batches) -> Config:
    """The settings, with the batch that the learning rate is for; what is impossible is refused."""
    if config.batch_schedule is not None and batches.kind == "loader":
        raise OptionError(
            f"--batch-size {config.batch_schedule}: the recipe's DataLoader makes the batches; "
            "return the dataset from data() instead"
        )
    warmup = None if config.warmup is None else parse_amount(config.warmup)
    if warmup is not None and warmup.by == "epochs" and batches.length is None:
        raise OptionError(
            f"--warmup {config.warmup}: how long an epoch is, is not known before its end; give "
            "updates (500) or tokens (2Mtok)"
        )
    if config.base_batch is not None:
        return config
    if config.batch_schedule is not None:
        base = BatchSchedule.parse(config.batch_schedule).first
    elif batches.kind == "loader":
        base = config.batch_size
    else:
        base = recipe.defaults.get("batch_size", config.batch_size)
    return replace(config, base_batch=base)


class Pace:
    """Sets the size of every batch before it is read, and the rate before the update is made."""

    def __init__(
        self,
        config: Config,
        *,
        batches: Batches,
        optimizer: torch.optim.Optimizer,
        train: WholeBatch | Staged,
    ) -> None:
        self.tokens = 0.0  # units of all windows so far
        self._batches = batches
        self._train = train
        text = config.batch_schedule
        self.schedule = None if text is None else BatchSchedule.parse(text)
        self._warmup = None if config.warmup is None else parse_amount(config.warmup)
        assert config.base_batch is not None
        self._follow = Follow(
            optimizer,
            base_batch=config.base_batch,
            rule=config.lr_rule,
            betas=config.betas,
            first_batch=None if self.schedule is None else self.schedule.first,
        )
        if self.schedule is not None:
            batches.follow(self._size_at)

    def _size_at(self, epoch: int) -> int:
        assert self.schedule is not None
        return self.schedule.at(update=self._train.updates, epoch=epoch, tokens=self.tokens)

    def begin(self, *, samples: int) -> list[float]:
        """A window begins with the batch that was read last; the learning rates it is made with.

        `samples` of this epoch were taken before it.
        """
        size = self._batches.batch_size
        if self._batches.kind == "loader":
            size = self._follow.base_batch
        self._follow.set(size, warmth=self._warmth(samples))
        return self._follow.rates()

    def closed(self, units: float) -> None:
        """A window is over."""
        self.tokens += units

    def _warmth(self, samples: int) -> float:
        if self._warmup is None or self._warmup.number == 0:
            return 1.0
        done: float
        if self._warmup.by == "epochs":
            assert self._batches.length is not None
            done = self._batches.position.epoch + samples / self._batches.length
        else:
            done = self._train.updates if self._warmup.by == "updates" else self.tokens
        return min(1.0, done / self._warmup.number)

    def state_dict(self) -> dict[str, Any]:
        """What the place in the data does not say."""
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens = float(state.get("tokens", 0.0))
