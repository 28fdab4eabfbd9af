"""Run a batch that must not be split (a BatchNorm trains) in as little memory as it needs.

There are up to three settings, from the fastest to the one that needs the least memory:

1. the model as it is;
2. its repeated blocks checkpointed: they keep their inputs and are computed again in the backward;
3. the same, with the blocks' inputs in host memory (on CUDA).

Running out of memory moves to the next setting. The results do not change.
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
            if next(model.parameters()).device.type == "cuda":
                self.settings.append(f"{self.settings[-1]}, their inputs in host memory")
        self.place = 0
        """The index of the setting in use."""

    def running(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward and the backward run."""
        if self.place == 0:
            return nullcontext()
        return checkpointed(self._model, self._blocks, inputs_on_host=self.place == 2)

    def save_memory(self, failure: str) -> None:
        """Move to the next setting; raise an error that names other ways if there is none."""
        if self.place + 1 < len(self.settings):
            self.place += 1
            _log.warning("out of memory: the batch now runs %s", self.settings[self.place])
            return
        raise torch.OutOfMemoryError(
            f"the batch does not fit {self.settings[self.place]} ({failure}), and it must not be "
            "split, because a BatchNorm trains with the statistics of the whole batch. Use "
            'precision="bf16", batchnorm="freeze" (normalise with the running statistics), '
            'batchnorm="allow" (normalise each micro-batch alone: another update), GroupNorm '
            "instead of BatchNorm, a smaller batch, or more ranks"
        )
