"""Functions of torch that behave differently while a micro-step is traced.

Each of them would read the data, or an address, of a fake tensor. The replacement does what the
original does for a model that runs, as operations of the graph.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _VF, Tensor, nn
from torch.nn import functional

from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.recurrent_layers import RECURRENT, traceable
from wholebatch.compile.traced_attention import attention
from wholebatch.window.forward_state import replaced_attributes

_LEN = builtins.len
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def traceable_calls() -> Iterator[None]:
    """Within this context, assertions on tensors, `module.to()` and recurrent layers are traceable.

    - `torch._check_tensor_all` asserts on the device, in the graph, instead of reading the result.
    - `module.to(dtype)` in a forward may convert nothing; a conversion is refused.
    - Recurrent layers are one operation, and do not lay out their weights anew for cuDNN.
    - Distributions do not check the values of their parameters.
    - Attention knows a mask that is always causal, and gets others in rows.
    """
    with (
        _ONE_AT_A_TIME,
        replaced_attributes(torch, _check_tensor_all_with=_assert_in_graph),
        replaced_attributes(nn.Module, _apply=_convert_nothing),
        replaced_attributes(nn.RNNBase, flatten_parameters=_keep_layout, _apply=_convert_nothing),
        replaced_attributes(_VF, **{kind: traceable(kind) for kind in RECURRENT}),
        replaced_attributes(functional, scaled_dot_product_attention=attention),
        # torch.compile also leaves out these checks, which read the parameters.
        replaced_attributes(torch.distributions.Distribution, _validate_args=False),
    ):
        yield


def _assert_in_graph(_: type[Exception], condition: Tensor, message: Any = None) -> None:
    torch.ops.aten._assert_async.msg(condition.all(), "an assertion of the model's code failed")


def _convert_nothing(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        if function(tensor) is not tensor:
            raise CannotTrace(f"its forward moves or casts a {type(module).__name__}")
    return module


def _keep_layout(_: nn.RNNBase) -> None:
    """Replace `flatten_parameters`; the weights of a model that has run lie flat already."""


def refuse_recurrent_dropout(model: nn.Module) -> None:
    """Raise CannotTrace for dropout within a recurrent layer: torch's trace of it leaves it out."""
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.RNNBase) or layer.num_layers == 1:
            continue
        if layer.training and layer.dropout:
            raise CannotTrace(
                f"{name or 'the model'} is an nn.{type(layer).__name__} with dropout, which torch "
                "traces without it (nn.Dropout between single layers can be traced)"
            )


@contextmanager
def symbolic_lengths() -> Iterator[None]:
    """Let `len(tensor)` return a symbol within this context; Python's own would specialise it."""

    def length(of: Any, /) -> Any:
        if isinstance(of, Tensor) and of.dim() and isinstance(of.shape[0], torch.SymInt):
            return of.shape[0]
        return _LEN(of)

    with _ONE_AT_A_TIME, replaced_attributes(builtins, len=length):
        yield
