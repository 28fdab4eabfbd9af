"""The loss functions that users give, and their models: what is refused before the first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from wholebatch.errors import OptionError
from wholebatch.losses.coupled import Coupled
from wholebatch.losses.loss import Loss, Terms

LossFunction: TypeAlias = Callable[[Any, Any], Loss | Terms | Tensor]
_SUCH_AS = "such as lambda model, micro: wb.cross_entropy(model(micro[0]), micro[1])"


def check_functions(loss: object, units: object) -> None:
    """Refuse a loss that is not callable, and `units=` with a loss that has its own units."""
    if isinstance(loss, Coupled):
        if units is not None:
            raise OptionError(
                "units= with wb.Coupled: the loss of the whole batch returns its units before any "
                "backward; leave units= out"
            )
    elif not callable(loss) or isinstance(loss, nn.modules.loss._Loss):
        raise OptionError(
            f"loss={loss!r}: must be a function of the model and a micro-batch, {_SUCH_AS}, or "
            "wb.Coupled"
        )
    if units is not None and not callable(units):
        raise OptionError(f"units={units!r}: must be a function")


def check_run_function(loss: object) -> None:
    """Refuse a loss that cannot be called with the micro-batch alone."""
    if not callable(loss):
        raise OptionError(
            f"run({type(loss).__name__}, micro): must be a function of the micro-batch that "
            "returns a wb.Loss; a loss that is computed already goes to backward()"
        )


def modules_of(model: Any) -> tuple[nn.Module, list[nn.Module]]:
    """One module that holds everything, and the models one by one."""
    if isinstance(model, nn.Module):
        return model, [model]
    several = isinstance(model, Mapping | Sequence)
    models = list(model.values() if isinstance(model, Mapping) else model) if several else []
    if not models or not all(isinstance(module, nn.Module) for module in models):
        raise OptionError(
            f"model={type(model).__name__}: must be an nn.Module, or a list or dict of them"
        )
    if isinstance(model, Mapping):
        return nn.ModuleDict(dict(model)), models
    return nn.ModuleList(models), models
