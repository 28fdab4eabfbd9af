"""A model, an optimizer and a batch of fake tensors, for predictions.

Fake tensors have a shape, a dtype, strides and a device, and operations on them compute only
those. The real model is read (its shapes), never written.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from wholebatch.batch.samples import Leaf, flatten
from wholebatch.errors import UnsupportedError
from wholebatch.window.replaced_attributes import replaced_attributes


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same nested batch with `function` applied to every tensor."""
    leaves, structure = flatten(batch)
    return structure.build(
        [
            function(leaf.value) if isinstance(leaf.value, torch.Tensor) else leaf.value
            for leaf in leaves
        ]
    )


def fake_mode_of(model: torch.nn.Module) -> FakeTensorMode:
    """Return the fake mode that a model was built under, or a new one for real tensors."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor):
            mode: FakeTensorMode = tensor.fake_mode
            return mode
    # Constants that the loss reaches through a closure (class weights) are real and may be used.
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake tensor of the same shape, strides and dtype on `device`."""
    if tensor.device == device:
        if isinstance(tensor, FakeTensor):
            return tensor
        # This keeps ties: tensors that share a storage share one afterwards.
        same: torch.Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
        return same
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def fake_model(
    model: torch.nn.Module, mode: FakeTensorMode, device: torch.device
) -> tuple[torch.nn.Module, dict[int, torch.nn.Parameter]]:
    """Return a copy of the model with fake tensors, and its parameters by the originals' ids.

    A tensor that two modules share is one tensor in the copy too.
    """
    parameters: dict[int, torch.nn.Parameter] = {}
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = torch.nn.Parameter(
            fake_tensor(mode, parameter, device), requires_grad=parameter.requires_grad
        )
        memo[id(parameter)] = parameters[id(parameter)] = fake
    for buffer in model.buffers():
        memo[id(buffer)] = fake_tensor(mode, buffer, device)
    for module in model.modules():
        for value in vars(module).values():  # tensors that are neither parameter nor buffer
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = fake_tensor(mode, value, device)
    try:
        with mode:
            return copy.deepcopy(model, memo), parameters
    except Exception as error:
        raise UnsupportedError(
            f"memory cannot be predicted for {type(model).__name__}, because it cannot be copied"
            f" ({type(error).__name__}: {error}); give the micro-batch size as a number instead"
        ) from error


def fake_batch(mode: FakeTensorMode, batch: Any, device: torch.device) -> Any:
    """Return a batch of fake tensors, each with its own storage, like a micro-batch on a device."""
    shapes = shapes_of(batch)
    with mode:
        return map_tensors(shapes, lambda shape: torch.empty_like(shape, device=device))


def shapes_of(batch: Any) -> Any:
    """Return a batch on the meta device, of which any number of samples can be made.

    An `attention_mask` that hides nothing is left out, as models of transformers do by reading it:
    attention needs less memory without a mask.
    """

    def shape(leaf: Leaf) -> Any:
        value = leaf.value
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or value.is_meta:
            return value
        if leaf.name.endswith("attention_mask") and bool(value.all()):
            return None
        return value.to("meta")

    leaves, structure = flatten(batch)
    return structure.build([shape(leaf) for leaf in leaves])


def fake_optimizer(
    optimizer: torch.optim.Optimizer,
    mode: FakeTensorMode,
    device: torch.device,
    parameters: Mapping[int, torch.nn.Parameter],
    *,
    on_cuda: bool = False,
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class, options and state over the fake parameters.

    On CUDA torch chooses its `foreach` implementation by itself, but not for fake tensors.
    """

    def fake_state(tensor: torch.Tensor) -> torch.Tensor:
        # Counts of steps stay on the CPU, beside moments on the device.
        return fake_tensor(mode, tensor, device if tensor.dim() else tensor.device)

    groups = []
    for group in optimizer.param_groups:
        fakes = [parameters[id(p)] for p in group["params"] if id(p) in parameters]
        options = {name: value for name, value in group.items() if name != "params"}
        if on_cuda and options.get("foreach", False) is None and not options.get("fused"):
            options["foreach"] = True
        groups.append({**options, "params": fakes})
    # Copy the attributes instead of calling the constructor, whose arguments are unknown. Leave out
    # the `step` that schedulers bind to the real optimizer, and the user's hooks.
    fake = object.__new__(type(optimizer))
    fake.__dict__ = {
        name: type(value)() if name.endswith("_hooks") else value
        for name, value in vars(optimizer).items()
        if name != "step"
    }
    fake.param_groups = groups
    fake.state = defaultdict(dict)
    for key, state in optimizer.state.items():
        if id(key) in parameters:
            fake.state[parameters[id(key)]] = map_tensors(dict(state), fake_state)
    return fake


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return products of groups of rows (experts): torch's shape function refuses fp32."""
    if a.dim() == b.dim() == 2:
        assert offs is not None
        shape = [offs.shape[0], a.shape[0], b.shape[1]]
    elif a.dim() == b.dim():
        shape = [a.shape[0], a.shape[1], b.shape[2]]
    else:
        shape = [a.shape[-2], b.shape[-1]]
    return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


def as_on_cuda() -> AbstractContextManager[None]:
    """Make dropout need as much memory on a CPU as CUDA's fused kernels do.

    CUDA's fused attention keeps q, k, v, the output and the sums of the softmax, with dropout as
    without: it draws the mask again in the backward. The CPU's kernel has no dropout, and with it
    the matrix of all pairs is computed. Dropout's mask has one byte for each number on CUDA; on a
    CPU it has the dtype of the input.
    """
    attention, dropout = functional.scaled_dot_product_attention, functional.dropout

    def attended(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *more: Any,
        **options: Any,
    ) -> torch.Tensor:
        return attention(query, key, value, attn_mask, 0.0, *more, **options)

    def dropped(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if inplace or not training or not 0.0 < p < 1.0:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, train=True)[0]

    return replaced_attributes(functional, scaled_dot_product_attention=attended, dropout=dropped)
