"""The loss and the callback for a GradientAccumulateOptimizer that is used alone."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops
from keras.src.trainers.compile_utils import get_loss

from wholebatch.errors import WindowError
from wholebatch.integrations.keras.loss_units import Observed, Term, wide

__all__ = ["CountedLoss", "Tail"]


@keras.saving.register_keras_serializable(package="wholebatch")
class CountedLoss(keras.losses.Loss):  # type: ignore[misc]
    """A loss that passes its units to a GradientAccumulateOptimizer (`optimizer.loss(...)`)."""

    def __init__(self, loss: Any, name: str | None = None) -> None:
        self.loss = loss if isinstance(loss, keras.losses.Loss) else None
        self._given = loss
        self._optimizer: Any = None
        super().__init__(name=name or "counted_loss")

    def bound_to(self, optimizer: Any) -> CountedLoss:
        self._optimizer = optimizer
        return self

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if self._optimizer is None:
            raise WindowError(
                "this loss was loaded from a file and has no optimizer: compile the model again "
                "with loss=optimizer.loss(...)"
            )
        if self.loss is None:
            self.loss = get_loss(self._given, y_true, y_pred)
        noted: list[Term] = []
        value = Observed(self.loss, None, noted)(y_true, y_pred, sample_weight)
        units = noted[0].units
        self._optimizer.note(ops.ones((), wide()) if units is None else units)
        return value

    def get_config(self) -> dict[str, Any]:
        return {"loss": keras.saving.serialize_keras_object(self._given), "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**{**config, "loss": keras.saving.deserialize_keras_object(config["loss"])})


class Tail(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that closes a half-filled window at the end of an epoch, before validation.

    After every batch it raises if a window was skipped that must not be (`nonfinite="raise"`).
    """

    def _flush(self) -> None:
        flush = getattr(self.model, "flush", None) or self.model.optimizer.flush
        flush()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if not optimizer.driven or optimizer.place == 0:
            optimizer.report_skipped(self.model)

    def on_test_begin(self, logs: Any = None) -> None:
        self._flush()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._flush()
