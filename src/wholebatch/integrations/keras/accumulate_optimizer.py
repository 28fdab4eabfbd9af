"""`GradientAccumulateOptimizer`: any Keras optimizer, once per window, on its exact gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from wholebatch.errors import OptionError, UnsupportedError, WindowError
from wholebatch.integrations.keras.keras_window import (
    NonFinite,
    Window,
    check_nonfinite,
    check_steps,
    replicas,
)
from wholebatch.integrations.keras.loss_units import Group, wide

__all__ = ["GradientAccumulateOptimizer"]

LOSS, EQUAL = "loss", "equal"


@keras.saving.register_keras_serializable(package="wholebatch")
class GradientAccumulateOptimizer(Window):
    """`optimizer`, once per `accum_steps` micro-batches, on the gradient of their whole batch.

    Clipping, weight decay, moving averages, constraints and the learning rate's schedule belong to
    `optimizer` and so happen once per update.

    An optimizer does not see what a gradient is a mean over. It must be told: compile the model
    with `loss=optimizer.loss("mse")`, which notes the units of that one loss (TensorFlow and torch
    backends), or say `units="equal"`, which is exact only if every micro-batch has the same number
    of units: no masks, no short last batch. `callbacks=[optimizer.tail()]` closes a half-filled
    window at the end of an epoch; without it, it goes on in the next. `GradientAccumulateModel`
    needs none of this.

    A window with a gradient that is not finite makes no update. `nonfinite="raise"` raises then,
    inside a compiled step through the callback of `tail()`; "skip" counts it in `skipped`.
    """

    def __init__(
        self,
        optimizer: Any,
        accum_steps: int,
        *,
        units: str = LOSS,
        groups: Sequence[bool] = (False,),
        nonfinite: NonFinite = "raise",
        name: str | None = None,
    ) -> None:
        inner = keras.optimizers.get(optimizer)
        if units not in (LOSS, EQUAL):
            raise OptionError(f'units={units!r}: must be "loss" or "equal"')
        if isinstance(inner, GradientAccumulateOptimizer):
            raise OptionError("a GradientAccumulateOptimizer around another: one is enough")
        base = getattr(inner, "inner_optimizer", inner)
        if base.gradient_accumulation_steps:
            raise OptionError(
                f"the optimizer has gradient_accumulation_steps={base.gradient_accumulation_steps} "
                "of its own: leave that away, windows would be accumulated twice"
            )
        if keras.backend.backend() == "jax" and isinstance(base, keras.optimizers.Nadam):
            raise UnsupportedError(
                "Nadam on the JAX backend keeps a number outside of its variables, which a "
                "compiled step loses (in Keras's own training too): use Adam, or another backend"
            )
        super().__init__(learning_rate=0.0, name=name or "gradient_accumulate_optimizer")
        self.inner_optimizer = inner
        self.accum_steps = check_steps(accum_steps)
        self.units = units
        self.nonfinite = check_nonfinite(nonfinite)
        self.driven = False  # by a GradientAccumulateModel, which says itself when to close
        self._sums_only = tuple(groups)
        self._noted: Any = None  # the units of the loss that was computed last
        self._weighed: Any = None  # those that the last scaled loss was multiplied by
        self._now: int | None = None
        self._flush: Any = None
        self._inside = True

    @property
    def loss_scale_factor(self) -> bool:
        return False  # not None: TensorFlow's tracking drops an assignment of what is there

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        if getattr(self, "_inside", False):
            raise UnsupportedError(
                "a LossScaleOptimizer around GradientAccumulateOptimizer would skip single "
                "micro-batches of a window: put it inside, and keep Keras from adding one: "
                "compile(GradientAccumulateOptimizer(LossScaleOptimizer(optimizer), accum_steps), "
                "auto_scale_loss=False); or use GradientAccumulateModel"
            )

    # ------------------------------------------------- as an optimizer by itself

    def loss(self, loss: Any) -> Any:
        """The loss (a name, function or `keras.losses.Loss`), which notes its units for this."""
        from wholebatch.integrations.keras.counted_loss import CountedLoss

        if keras.backend.backend() == "jax":
            raise UnsupportedError(
                "on the JAX backend a loss cannot hand its units to an optimizer: use "
                'GradientAccumulateModel, or units="equal" where every micro-batch has as many'
            )
        return CountedLoss(loss).bound_to(self)

    def tail(self) -> Any:
        """A callback that closes a half-filled window at the end of every epoch."""
        from wholebatch.integrations.keras.counted_loss import Tail

        return Tail()

    def note(self, units: Any) -> None:
        """Called by `loss()`: the units of the micro-batch whose gradients come next."""
        if self._noted is not None and _same_step(self._noted, units):
            raise UnsupportedError(
                "optimizer.loss(...) on several outputs: it gets one gradient for all of "
                "them and cannot weigh them apart; use GradientAccumulateModel"
            )
        self._noted = units

    def scale_loss(self, loss: Any) -> Any:
        if self.driven:
            raise WindowError(
                "this GradientAccumulateOptimizer belongs to a GradientAccumulateModel, whose own "
                "train_step uses it: do not override train_step, or use TapeAccumulator"
            )
        if self.units == EQUAL:
            self._noted = ops.ones((), wide())
        if self._noted is None:
            raise WindowError(
                "no loss has noted the units of this micro-batch: compile with "
                'loss=optimizer.loss("..."), or use GradientAccumulateModel, or units="equal" '
                "where every micro-batch has as many"
            )
        (weighted,) = self.weighted([Group(ops.cast(loss, wide()), self._noted)])
        self._weighed, self._noted = (self._noted, weighted), None
        return weighted

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if not self.built:
            self.build(list(trainable_variables or ()))
        if replicas() > 1:
            raise UnsupportedError(
                "GradientAccumulateOptimizer alone on several replicas: use GradientAccumulateModel"
            )
        if self._weighed is None:
            raise WindowError(
                "gradients of a loss that did not pass through optimizer.scale_loss(): use "
                "TapeAccumulator in a loop of your own"
            )
        units, weighted = self._weighed
        self.add([grads], [units], [weighted])
        self._weighed = None
        if keras.backend.backend() == "torch":
            if self.place >= self.accum_steps:
                self.close()
                self.report_skipped()
        else:
            ops.cond(ops.greater_equal(self._place, self.accum_steps), self.close, lambda: None)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        """JAX: `apply` as a function of the variables' values."""
        from wholebatch.integrations.keras.jax_step import stateless_apply

        return stateless_apply(self, optimizer_variables, grads, trainable_variables)

    def flush(self) -> bool:
        """Close a half-filled window; return True if there was one."""
        if self.place == 0:
            return False
        backend = keras.backend.backend()
        if backend == "jax":
            from wholebatch.integrations.keras.jax_step import flush

            flush(self)
        elif backend == "torch":
            import torch

            with torch.no_grad():
                self.close()
        else:
            import tensorflow as tf

            if self._flush is None:
                self._flush = tf.function(lambda: self._distribution_strategy.run(self.close))
            self._flush()
        self._now = 0
        self.report_skipped()
        return True

    # -------------------------------------------------- what the inner one has

    @property
    def variables(self) -> list[Any]:
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """Updates made so far."""
        return self.inner_optimizer.iterations

    def finalize_variable_values(self, var_list: Any) -> None:
        self.inner_optimizer.finalize_variable_values(var_list)

    def load_own_variables(self, store: Any) -> None:
        own = getattr(self, "_skipped", None)
        rest = [variable for variable in self.variables if variable is not own]
        if self.built and len(store.keys()) == len(
            rest
        ):  # saved before windows were skipped and counted
            for index, variable in enumerate(rest):
                variable.assign(store[str(index)])
        else:
            super().load_own_variables(store)
        self._now = None
        self._reported = self.skipped

    def get_config(self) -> dict[str, Any]:
        return {
            "optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "accum_steps": self.accum_steps,
            "units": self.units,
            "groups": list(self._sums_only),
            "nonfinite": self.nonfinite,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        inner = keras.saving.deserialize_keras_object(
            config["optimizer"], custom_objects=custom_objects
        )
        return cls(**{**config, "optimizer": inner})


def _same_step(before: Any, now: Any) -> bool:
    """Whether two units were noted in one training step, the first of them not used."""
    if keras.backend.backend() == "tensorflow":
        graph = getattr(now, "graph", None) if not hasattr(now, "numpy") else None
        return graph is not None and getattr(before, "graph", None) is graph
    return False
