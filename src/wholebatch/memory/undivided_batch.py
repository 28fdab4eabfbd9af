"""Run a batch that must not be split (a BatchNorm trains) in as little memory as it needs.

Running out of memory checkpoints its repeated blocks: they keep their inputs and are computed again
in the backward. The results do not change.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from wholebatch.memory.activation_checkpointing import blocks_to_checkpoint, checkpointed

_log = logging.getLogger("wholebatch")


class UndividedBatch:
    """The setting in which an undivided batch runs.

    >>> batch = UndividedBatch(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    >>> batch.settings
    ['as it is']
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._blocks = blocks_to_checkpoint(model)
        self.settings = ["as it is"]
        if self._blocks:
            self.settings.append(f"with {len(self._blocks)} blocks checkpointed")
        self.place = 0
        """The index of the setting in use."""

    def running(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward and the backward run."""
        if self.place == 0:
            return nullcontext()
        return checkpointed(self._model, self._blocks)

    def save_memory(self, failure: str, *, may_change: bool = True) -> None:
        """Move to the next setting; raise an error that names other ways if there is none."""
        if may_change and self.place + 1 < len(self.settings):
            self.place += 1
            _log.warning("out of memory: the batch now runs %s", self.settings[self.place])
            return
        raise torch.OutOfMemoryError(
            f"the batch does not fit {self.settings[self.place]} ({failure}), and it must not be "
            "split, because a BatchNorm trains with the statistics of the whole batch. Use "
            'wholebatch.memory.with_checkpoints(model), precision="bf16", '
            'batchnorm="freeze" (normalise with the running statistics), '
            'batchnorm="allow" (normalise each micro-batch alone: another update), GroupNorm '
            "instead of BatchNorm, a smaller batch, or more ranks"
        )
