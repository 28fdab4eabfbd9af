"""`GradientAccumulateModel`: a Keras model with exact windows, for the usual compile and fit."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import keras
from keras.src.models.functional import functional_from_config

from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.integrations.keras.accumulate_optimizer import (
    GradientAccumulateOptimizer,
    NonFinite,
    Tail,
    check_nonfinite,
    check_steps,
)
from wholebatch.integrations.keras.loss_units import ObservedLosses, test_loss, units_of

BatchNorm = Literal["refuse", "warn", "allow"]
_OWN = ("accum_steps", "batchnorm", "nonfinite", "audit")


@keras.saving.register_keras_serializable(package="wholebatch")
class GradientAccumulateModel(keras.Model):  # type: ignore[misc]
    """A Keras model whose updates in `fit` are those of `accum_steps` batches taken as one.

    ```python
    model = GradientAccumulateModel(accum_steps=4, inputs=model.inputs, outputs=model.outputs)
    ```

    or derive from it in place of `keras.Model`. `compile` and `fit` stay as they are: the batches
    of `fit` are the micro-batches. Every loss is weighted by its units, including sample weights,
    masks, class weights, several outputs, regularisers and all reductions of Keras's losses. All
    losses of a model must be over the same units. A
    window that is not full at the end of an epoch is closed with the micro-batches it has.

    `units(x, y, sample_weight)` counts the units if the model cannot see them: for a custom
    `compute_loss`, or a loss that returns a single number. `batchnorm` sets how to treat
    BatchNormalization layers, which see one micro-batch at a time. A window with a loss or gradient
    that is not finite changes no weights and is counted in `optimizer.skipped`; `nonfinite="raise"`
    raises at the end of its epoch, "skip" does not. Before the first window the loss of one
    micro-batch is compared with those of its halves, and refused if they do not add up;
    `audit=False` leaves this out.
    """

    train_function: Any

    def __init__(
        self,
        *args: Any,
        accum_steps: int,
        units: Callable[[Any, Any, Any], Any] | None = None,
        batchnorm: BatchNorm = "refuse",
        nonfinite: NonFinite = "raise",
        audit: bool = True,
        **kwargs: Any,
    ) -> None:
        check_steps(accum_steps)
        check_nonfinite(nonfinite)
        if batchnorm not in ("refuse", "warn", "allow"):
            raise OptionError(f'batchnorm={batchnorm!r}: must be "refuse", "warn" or "allow"')
        if units is not None and not callable(units):
            raise OptionError(f"units={units!r}: must be a function of (x, y, sample_weight)")
        super().__init__(*args, **kwargs)
        self.accum_steps = accum_steps
        self.batchnorm = batchnorm
        self.nonfinite = nonfinite
        self.audit = audit
        self.must_test = False
        self.count_units = units

    # ---------------------------------------------------------------- compile

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        *args: Any,
        auto_scale_loss: bool = True,
        **kwargs: Any,
    ) -> None:
        """Compile as `keras.Model.compile` does; the optimizer makes one update per window."""
        self._audit()
        inner = keras.optimizers.get(optimizer)
        if not isinstance(inner, GradientAccumulateOptimizer):
            scaled = isinstance(inner, keras.mixed_precision.LossScaleOptimizer)
            if auto_scale_loss and self.dtype_policy.name == "mixed_float16" and not scaled:
                # The loss scale is inside, so an overflow skips the window as a whole.
                inner = keras.mixed_precision.LossScaleOptimizer(inner, name="loss_scale_optimizer")
            inner = GradientAccumulateOptimizer(inner, self.accum_steps)
        self.must_test = self.audit and self.accum_steps > 1
        inner.is_of_model = True
        inner.accum_steps = self.accum_steps
        inner.nonfinite = self.nonfinite
        super().compile(inner, loss, loss_weights, *args, auto_scale_loss=False, **kwargs)
        if loss is not None and self.count_units is None:
            names = getattr(self, "output_names", None)
            self._compile_loss = ObservedLosses(loss, loss_weights, output_names=names)

    def _audit(self) -> None:
        for name in ("train_step", "compute_loss"):
            own = getattr(type(self), name) is not getattr(GradientAccumulateModel, name)
            if own and (name == "train_step" or self.count_units is None):
                raise UnsupportedError(
                    f"{type(self).__name__} overrides {name}, so wholebatch does not know what its "
                    "loss is a mean over: "
                    + (
                        "use keras.Model, and examples/integrations/keras_tape.py in it"
                        if name == "train_step"
                        else "give units=, a function of (x, y, sample_weight) that counts it"
                    )
                )
        norms = [
            layer.name
            for layer in self._flatten_layers(include_self=False)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]
        if norms and self.batchnorm != "allow" and self.accum_steps > 1:
            message = (
                f"BatchNormalization ({', '.join(norms)}) normalises each micro-batch by itself: "
                "no accumulation is exact. Use GroupNormalization or LayerNormalization, set "
                'layer.trainable = False, or accept it: batchnorm="warn" or "allow"'
            )
            if self.batchnorm == "refuse":
                raise UnsupportedError(message)
            warnings.warn(message, UserWarning, stacklevel=3)

    # -------------------------------------------------------------------- fit

    def fit(self, *args: Any, callbacks: Any = None, **kwargs: Any) -> Any:
        """Fit as `keras.Model.fit` does; an epoch's last window is closed with what it has."""
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.callbacks.insert(0, Tail())
            callbacks.callbacks[0].set_model(self)
        else:
            several = isinstance(callbacks, list | tuple | None)
            callbacks = [Tail(), *((callbacks or ()) if several else [callbacks])]
        return super().fit(*args, callbacks=callbacks, **kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `keras.Model.train_on_batch` does; the batch is a micro-batch."""
        logs = super().train_on_batch(*args, **kwargs)
        if self.optimizer.place == 0:
            self.optimizer.report_skipped()
        return logs

    def flush(self) -> bool:
        """Close a half-filled window now, as `fit` does; return True if there was one."""
        return bool(self.compiled and self.optimizer.built and self.optimizer.flush())

    # ------------------------------------------------------------- a micro-batch

    def loss_and_units(
        self, x: Any, y: Any, sample_weight: Any, y_pred: Any, *, training: bool
    ) -> tuple[Any, Any]:
        """Return a micro-batch's loss as Keras computes it, and the units that it is over."""
        loss = super()._compute_loss(x, y, y_pred, sample_weight, training=training)
        return loss, units_of(self, (x, y, sample_weight))

    def _compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Compute the loss in Keras's own train step; note its units for the optimizer."""
        if not training:
            return super()._compute_loss(x, y, y_pred, sample_weight, training=training)
        loss, units = self.loss_and_units(x, y, sample_weight, y_pred, training=True)
        self.optimizer.note(units)
        return loss

    def train_step(self, *args: Any) -> Any:
        """Run Keras's own train step, whose optimizer adds the gradient to the window."""
        if keras.backend.backend() == "torch" or self.jit_compile:
            return super().train_step(*args)
        import tensorflow as tf

        # In a graph, what does not depend on the data (counting the update) would run even where
        # the iterator has come to its end.
        leaves = [each for each in keras.tree.flatten(args) if each is not None]
        with tf.control_dependencies(leaves):
            return super().train_step(*args)

    def make_train_function(self, force: bool = False) -> Any:
        """Make Keras's own train function, which tests the loss on its first micro-batch."""
        if self.train_function is not None and not force:
            return self.train_function
        super().make_train_function(force=force)
        run = self.train_function

        def function(*args: Any) -> Any:
            return run(*(self._tested(*args) if self.must_test else args))

        self.train_function = function
        return function

    def _tested(self, *args: Any) -> tuple[Any, ...]:
        """Test the next micro-batch; return the arguments with an iterator that gives it again."""
        *state, iterator = args
        if keras.backend.backend() == "torch":
            import torch

            with torch.no_grad():
                self.must_test = not test_loss(self, iterator[0], self._scope)
            return args
        if replicas_of(self) > 1:  # Its data are in pieces on several devices.
            self.must_test = False
            return args
        iterator = iter(iterator)
        data = next(iterator)
        if not self.built:
            self(keras.utils.unpack_x_y_sample_weight(data)[0])
        self.must_test = not test_loss(self, data, self._scope)
        return *state, itertools.chain([data], iterator)

    def _scope(self) -> Any:
        """Return a scope with the values of all variables, which forgets what a forward changes."""
        held = [
            (variable, variable.value) for variable in (*self.variables, *self.metrics_variables)
        ]
        return keras.StatelessScope(state_mapping=held, collect_losses=True)

    # ------------------------------------------------------------ save and load

    def get_config(self) -> dict[str, Any]:
        config = dict(super().get_config())
        for name in _OWN:
            config[name] = getattr(self, name)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        if not all(key in config for key in ("name", "layers", "input_layers", "output_layers")):
            return super().from_config(config, custom_objects=custom_objects)
        own = {name: config[name] for name in _OWN if name in config}
        rest = {key: value for key, value in config.items() if key not in own}

        def build(*args: Any, **kwargs: Any) -> Any:
            return cls(*args, **kwargs, **own)

        return functional_from_config(build, rest, custom_objects=custom_objects)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)


def replicas_of(model: Any) -> int:
    """Return the number of replicas that a model trains on."""
    strategy = getattr(model, "distribute_strategy", None)
    return 1 if strategy is None else int(strategy.num_replicas_in_sync)
