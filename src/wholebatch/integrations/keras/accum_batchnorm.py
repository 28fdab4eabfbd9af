"""`AccumBatchNormalization`: BatchNormalization with the running statistics of a window."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.integrations.keras.accumulate_optimizer import check_steps
from wholebatch.integrations.keras.loss_units import replicas


@keras.saving.register_keras_serializable(package="wholebatch")
class AccumBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """A BatchNormalization that updates its running mean and variance once per window.

    It updates them from the mean and variance over all samples of the window, merged exactly, as
    for the whole batch with the same inputs. BatchNormalization updates them `accum_steps` times,
    from single micro-batches. Training still normalises each micro-batch separately, because a
    layer cannot know the micro-batches to come. So gradients are not those of the whole batch.

    Inside a `GradientAccumulateModel` it uses the model's `accum_steps`; elsewhere pass them.
    """

    momentum: float

    def __init__(self, *args: Any, accum_steps: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if kwargs.get("renorm") or kwargs.get("synchronized"):
            raise OptionError("AccumBatchNormalization has no renorm= and no synchronized=")
        self.accum_steps = None if accum_steps is None else check_steps(accum_steps)

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        shape = self.moving_mean.shape
        for name, size in (("count", ()), ("place", ()), ("mean", shape), ("spread", shape)):
            variable = self.add_weight(
                shape=size,
                name=f"window_{name}",
                initializer="zeros",
                trainable=False,
                autocast=False,
                dtype=self.moving_mean.dtype,
            )
            setattr(self, f"window_{name}", variable)

    def follow(self, accum_steps: int) -> None:
        """Use the model's `accum_steps`; refuse a different number set on the layer."""
        if self.accum_steps not in (None, accum_steps):
            raise OptionError(
                f"{self.name} has accum_steps={self.accum_steps}, the model {accum_steps}: leave "
                "the layer's away"
            )
        self.accum_steps = accum_steps

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not training or not self.trainable:
            return super().call(inputs, training=training, mask=mask)
        if self.accum_steps is None:
            raise OptionError(
                f"{self.name} does not know its window: give accum_steps=, or use it in a "
                "GradientAccumulateModel"
            )
        if replicas() > 1:
            raise UnsupportedError(f"{self.name}: AccumBatchNormalization on several replicas")
        momentum, self.momentum = self.momentum, 1.0  # The base class then updates nothing.
        try:
            outputs = super().call(inputs, training=training, mask=mask)
        finally:
            self.momentum = momentum
        self._move(self.window_place >= self.accum_steps)
        return outputs

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        dtype = self.window_mean.dtype
        if mask is None:
            channels = ops.shape(inputs)[self.axis]
            count = ops.cast(ops.size(inputs), dtype) / ops.cast(channels, dtype)
        else:
            count = ops.sum(ops.cast(mask, dtype))
        # Chan's formula merges two means and their sums of squared distances.
        before = ops.convert_to_tensor(self.window_count)
        total = before + count
        gap = ops.cast(mean, dtype) - self.window_mean
        share = ops.divide_no_nan(count, total)
        spread = ops.cast(variance, dtype) * count + ops.square(gap) * before * share
        self.window_spread.assign(self.window_spread + spread)
        self.window_mean.assign(self.window_mean + gap * share)
        self.window_count.assign(total)
        self.window_place.assign(self.window_place + 1)
        return mean, variance

    def _move(self, closes: Any) -> None:
        """Update the running statistics and empty the window, if it closes."""
        closes = ops.logical_and(closes, self.window_count > 0)
        variance = ops.divide_no_nan(
            ops.convert_to_tensor(self.window_spread), ops.convert_to_tensor(self.window_count)
        )
        for moving, found in (
            (self.moving_mean, ops.convert_to_tensor(self.window_mean)),
            (self.moving_variance, variance),
        ):
            before = ops.convert_to_tensor(moving)
            moved = before * self.momentum + found * (1.0 - self.momentum)
            # A window that is not finite makes no update, and none of the statistics.
            moves = ops.logical_and(closes, ops.all(ops.isfinite(moved)))
            moving.assign(ops.where(moves, moved, before))
        for variable in (
            self.window_count,
            self.window_place,
            self.window_mean,
            self.window_spread,
        ):
            now = ops.convert_to_tensor(variable)
            variable.assign(ops.where(closes, ops.zeros_like(now), now))

    def close_window(self) -> None:
        """Update the running statistics from a half-filled window."""
        self._move(ops.greater(self.window_count, 0))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "accum_steps": self.accum_steps}
