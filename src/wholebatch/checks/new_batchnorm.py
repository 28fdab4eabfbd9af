"""A BatchNorm that came into a model after its policy was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from wholebatch.checks.check import Answer, Check, Refused
from wholebatch.coupled.normalisation_layers import batchnorms, why_refused_later
from wholebatch.errors import UnsupportedError


class NewBatchNorm(Check):
    """A BatchNorm that came into a model after its policy was chosen.

    Finds: a BatchNorm in training mode that the models did not have when the object was made.

    Costs: one look at every module of the models.

    Certain: its statistics would be those of a micro-batch.

    Cannot see: a layer of your own that normalises over the samples, which `FirstCall` finds.
    """

    windows = "1, 2, 4, 8, …"

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._known = {norm for model in models for _, norm in batchnorms(model)}

    def window_begins(self, models: Sequence[nn.Module]) -> Answer:
        because = why_refused_later(models, self._known)
        return None if because is None else Refused(UnsupportedError, because)
