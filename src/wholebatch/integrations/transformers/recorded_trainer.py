"""`RecordedTrainer`: trainers of TRL whose micro-steps are one graph, metrics included.

TRL's own losses read the metrics of every batch on the host, and index by masks, so that shapes
depend on the data: neither can be part of a graph. Here the loss is computed from all logits, and
the sums that the metrics are made of leave the graph as tensors. They stay on the device until the
trainer logs. The numbers in the log are TRL's own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.compile.token_statistics import token_statistics
from wholebatch.integrations.transformers.exact_trainer import ExactTrainerMixin
from wholebatch.integrations.transformers.given_windows import GivenWindows
from wholebatch.losses.loss import Loss

IGNORED = -100
_log = logging.getLogger("wholebatch")


class RecordedTrainer(ExactTrainerMixin):
    """A trainer of TRL whose loss is computed here, as a function that can be one graph."""

    means_over: ClassVar[Mapping[str, str]] = {}
    """The metrics that are means: extras of the loss by name, and the extra that counts them."""
    combined_by: ClassVar[Mapping[str, str]] = {}
    """The metrics that are not: extras that combine by "amin" or "amax". All others are summed."""
    leaves_out_empty: ClassVar[bool] = False
    """True if a mean over nothing is left out of the log; else it is 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread: list[Tensor] = []  # [names, batches], for each window since the last log
        self._names: tuple[str, ...] = ()

    def recorded_loss(self) -> Callable[..., Loss]:
        """Return the loss of `model` and `inputs`, as a sum, with the metrics' sums as extras."""
        raise NotImplementedError

    def metrics_of(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return what TRL logs of a batch, from the extras of its loss."""
        return {name: sums[name] for name in self.combined_by} | {
            name: sums[name] / max(sums[count], 1)
            for name, count in self.means_over.items()
            if sums[count] or not self.leaves_out_empty
        }

    def needs_trl_loss(self) -> str | None:
        """Return why TRL's own `compute_loss` must run, as eager code; None if it need not."""
        trainer: Any = self
        owner = next(
            kind
            for kind in type(self).__mro__
            if "compute_loss" in vars(kind) and not issubclass(kind, ExactTrainerMixin)
        )
        if not owner.__module__.startswith("trl."):
            return f"{owner.__name__}.compute_loss is not TRL's own"
        for name, what in _OUTSIDE.items():
            if getattr(trainer, name, None):
                return what
        return None

    def _loss_options(self) -> dict[str, Any]:
        why = "units= is your own" if self.units_of is not None else self.needs_trl_loss()
        if why is not None:
            _log.info("micro-steps run eagerly, by TRL's own loss: %s", why)
            return super()._loss_options()
        inner = self.recorded_loss()
        loss: Any = functools.partial(
            _in_context, context=self.compute_loss_context_manager, loss=inner
        )
        loss.__name__ = "the loss"
        loss.reads, loss.as_read = inner, self.compute_loss_context_manager
        return {"loss": loss, "units": self.count_units, "combined_by": self.combined_by}

    def _run_window(self, whole: GivenWindows, model: nn.Module) -> Sequence[Tensor]:
        shares = super()._run_window(whole, model)
        if whole.extras:
            self._names = tuple(whole.extras)
            rows = [self._over_ranks(name, values) for name, values in whole.extras.items()]
            self._unread.append(torch.stack(rows))
        return shares

    def _over_ranks(self, name: str, values: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return values
        by_rank: Tensor = self.accelerator.gather(values[None])
        return getattr(by_rank, self.combined_by.get(name, "sum"))(0)  # type: ignore[no-any-return]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Read the metrics from the device, and log as TRL does."""
        trainer: Any = self
        if self._unread:
            metrics = trainer._metrics["train"]
            for column in torch.cat(self._unread, dim=1).T.tolist():
                sums = dict(zip(self._names, column, strict=True))
                for name, value in self.metrics_of(sums).items():
                    metrics[name].append(value)
                trainer._total_train_tokens += int(sums["tokens"])
            metrics["num_tokens"] = [trainer._total_train_tokens]
            self._unread.clear()
        super().log(logs, *args, **kwargs)


def _in_context(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    context: Callable[[], AbstractContextManager[Any]],
    loss: Callable[..., Loss],
) -> Loss:
    with context():
        return loss(model, inputs)


_OUTSIDE = {
    "compute_loss_func": "compute_loss_func",
    "label_smoother": "label smoothing",
    "aux_loss_enabled": "the balance of experts",
}


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log p of each label, shaped as the labels; 0 where a label is ignored."""
    losses = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(labels.shape)


def statistics_of(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entropy of each position, its most likely class, and its mean logit."""
    results = token_statistics(logits.flatten(0, 1))
    entropies, likeliest, means = (result.view(logits.shape[:2]) for result in results)
    return entropies, likeliest, means


def count_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """Return the tokens of a batch that are not padding, as TRL counts them."""
    if "attention_mask" in inputs:
        tokens: Tensor = inputs["attention_mask"].sum()
        return tokens
    positions: Tensor = inputs["position_ids"]
    return (positions >= 0).sum()  # packed rows have no padding
