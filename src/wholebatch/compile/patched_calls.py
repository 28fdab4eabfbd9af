"""Functions of torch that behave differently while a micro-step is traced.

Each of them would read the data, or an address, of a fake tensor. The replacement does what the
original does for a model that runs, as operations of the graph.
"""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wholebatch.compile.execute_mode import CannotTrace
from wholebatch.compile.traced_attention import attention
from wholebatch.window.replaced_attributes import replaced_attributes

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def traceable_calls(sources: list[Tensor]) -> Iterator[None]:
    """Within this context, assertions on tensors and `module.to()` are traceable.

    `sources` gets the constants whose values decide.

    - `torch._check_tensor_all` asserts on the device, in the graph, instead of reading the result.
    - `module.to(dtype)` in a forward may convert nothing; a conversion is refused.
    - Distributions do not check the values of their parameters.
    - Attention knows a mask that is always causal, and gets others in rows.
    - Grouped products of experts follow autocast, as `linear` does.
    - Functions of TorchScript run as the Python that they were made from.
    """
    grouped = {"grouped_mm": _grouped_mm} if _GROUPED_MM is not None else {}
    with (
        _ONE_AT_A_TIME,
        replaced_attributes(torch, _check_tensor_all_with=_assert_in_graph),
        replaced_attributes(nn.Module, _apply=_convert_nothing),
        replaced_attributes(torch.jit.ScriptFunction, __call__=_as_python),
        replaced_attributes(
            functional, scaled_dot_product_attention=partial(attention, sources), **grouped
        ),
        # torch.compile also leaves out these checks, which read the parameters.
        replaced_attributes(torch.distributions.Distribution, _validate_args=False),
    ):
        yield


def _assert_in_graph(_: type[Exception], condition: Tensor, message: Any = None) -> None:
    torch.ops.aten._assert_async.msg(condition.all(), "an assertion of the model's code failed")


def _as_python(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function._torchdynamo_inline(*args, **kwargs)


def _convert_nothing(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        if function(tensor) is not tensor:
            raise CannotTrace(f"its forward moves or casts a {type(module).__name__}")
    return module


def _same_module(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    """Convert nothing: the trace sees what `module.to()` would convert."""
    return module


_GROUPED_MM: Any = getattr(functional, "grouped_mm", None)


def _grouped_mm(left: Tensor, right: Tensor, **more: Any) -> Tensor:
    """Multiply in autocast's dtype, which must be bfloat16.

    Autocast does not know this operation. In other dtypes torch can neither trace nor record it: it
    reads the sizes of the groups on the host.
    """
    device = right.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        left, right = left.to(dtype), right.to(dtype)
    if right.dtype is not torch.bfloat16:
        kind = str(right.dtype).removeprefix("torch.")
        raise CannotTrace(
            f"its experts multiply groups of tokens in {kind}, which reads the sizes of the groups "
            "on the host; only bfloat16 does not (precision='bf16')"
        )
    product: Tensor = _GROUPED_MM(left, right, **more)
    return product


class _Uniform:
    """A random number between 0 and 1 that answers only what is the same for all of them."""

    def __lt__(self, bound: float) -> bool:
        if 0 < bound < 1:
            raise RuntimeError("a decision by a random number")
        return bound >= 1


def _rand(*size: Any, **more: Any) -> Any:
    if torch.compiler.is_compiling() and len(size) == 1 and size[0] == []:
        return _Uniform()
    return _RAND(*size, **more)


def _nothing(*_: Any, **__: Any) -> None:
    """Show nothing."""


def _grouped_in_form(
    left: Tensor, right: Tensor, *, offs: Tensor | None = None, **_: Any
) -> Tensor:
    """Give a result of the right shape: the original reads the sizes of the groups."""
    return left @ (right if offs is None else right[0])


def _weight_of(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight


def _metadata(name: str) -> Any:
    return _METADATA(name)


def _version(name: str) -> str:
    return _VERSION(name)


_RAND: Any = torch.rand
_METADATA, _VERSION = importlib.metadata.metadata, importlib.metadata.version
REPLACEMENTS = (_rand, _nothing, _grouped_in_form, _metadata, _version, _same_module, _weight_of)
"""The functions that stand in for others while Dynamo looks for what is read."""
_SHOWS = ("set_description", "set_description_str", "set_postfix", "set_postfix_str", "refresh")


@contextmanager
def calls_for_guards() -> Iterator[None]:
    """Within this context, Dynamo can follow more of the code that it looks at for guards.

    - LayerDrop with a probability of 0: models of transformers compare `torch.rand([])` with it.
    - Grouped products of experts, in the dtype of autocast, and `module.to()`.
    - Questions for installed packages: these stay the same.
    - Progress bars, which show nothing meanwhile.
    - DoRA of PEFT, which asks by a module's name if a weight is quantised, and clears its cache,
      which is empty in training.
    """
    for constant in (_metadata, _version):  # Not as a decorator: that would import Dynamo.
        torch.compiler.assume_constant_result(constant)
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    dora = sys.modules.get("peft.tuners.lora.dora")
    grouped = {} if _GROUPED_MM is None else {"grouped_mm": _grouped_in_form}
    with (
        replaced_attributes(torch, rand=_rand),
        replaced_attributes(functional, **grouped),
        replaced_attributes(nn.Module, _apply=_same_module),
        replaced_attributes(importlib.metadata, metadata=_metadata, version=_version),
        replaced_attributes(bars or _Uniform, **dict.fromkeys(_SHOWS, _nothing)),
        replaced_attributes(dora or _Uniform, dequantize_module_weight=_weight_of),
        replaced_attributes(getattr(dora, "DoraLinearLayer", _Uniform), _cache_clear=_nothing),
    ):
        yield
