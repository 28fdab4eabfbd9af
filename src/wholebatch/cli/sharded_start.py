"""Build a model for FSDP2 that is never whole on one rank: on meta, sharded, then initialised.

On the meta device a constructor allocates nothing, and the values that it gives to parameters and
buffers are lost. So each module that has some gives them again, one module at a time, on the CPU,
by its `reset_parameters()` and by the model's `_init_weights(module)`. A rank keeps its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from wholebatch.cli.recipes.recipe_batches import seeded
from wholebatch.errors import RecipeError
from wholebatch.memory.activation_checkpointing import repeated_blocks


def build_sharded(
    build: Callable[[], nn.Module], *, seed: int, device: torch.device, ranks: int
) -> tuple[nn.Module, Callable[[], None]]:
    """Return the model in shards without values, and a function that gives it its first values."""
    try:
        with torch.device("meta"):
            model = build()
    except (NotImplementedError, RuntimeError) as error:
        raise RecipeError(
            f"--parallel fsdp2: model() cannot be built on the meta device ({error}): its "
            "constructor must not read the values of tensors"
        ) from error
    init_weights = getattr(model, "_init_weights", None)
    for name, module in model.named_modules():
        if _tensors_of(module) and not (init_weights or _resets(module)):
            raise _without_values(name, next(iter(_tensors_of(module))))
    mesh = init_device_mesh(device.type, (ranks,))
    for name in repeated_blocks(model):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)

    def initialise() -> None:
        done: set[int] = set()
        for place, (name, module) in enumerate(model.named_modules()):
            with seeded(seed, "weights", place), torch.no_grad():
                for own, tensor, whole in _first_values(module, init_weights):
                    if _is_unset(whole):
                        raise _without_values(name, own)
                    if id(tensor) not in done:  # a tied one has the values of its first module
                        _fill(tensor, whole)
                    done.add(id(tensor))

    return model, initialise


def _resets(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module itself, by name."""
    return {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }


def _first_values(
    module: nn.Module, init_weights: Callable[[nn.Module], object] | None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Let a module initialise whole tensors on the CPU in place of its own; yield both.

    They begin with all bits set: that is NaN in every float, and -1 in every integer.
    """
    own = _tensors_of(module)
    if not own:
        return
    whole: dict[str, Tensor] = {}
    try:
        for name, tensor in own.items():
            blank = torch.full((tensor.numel() * tensor.itemsize,), 255, dtype=torch.uint8)
            blank = blank.view(tensor.dtype).reshape(tensor.shape)
            if isinstance(tensor, nn.Parameter):
                blank = nn.Parameter(blank, requires_grad=tensor.requires_grad)
            setattr(module, name, blank)
        if _resets(module):
            module.reset_parameters()  # type: ignore[operator]
        if init_weights is not None:
            init_weights(module)
        whole = {name: getattr(module, name).detach() for name in own}
    finally:
        for name, tensor in own.items():
            setattr(module, name, tensor)
    for name, tensor in own.items():
        yield name, tensor, whole[name]


def _is_unset(tensor: Tensor) -> bool:
    """True if a tensor has kept bits that it was created with."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.numel() > 0 and bool((tensor.reshape(-1).view(torch.uint8) == 255).all())


def _fill(tensor: Tensor, whole: Tensor) -> None:
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        shard = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        tensor.to_local().copy_(shard.to_local())
    else:
        tensor.copy_(whole)


def _without_values(name: str, own: str) -> RecipeError:
    return RecipeError(
        f"--parallel fsdp2: nothing gives {name + '.' if name else ''}{own} its first values: the "
        f"model is built without values, so give {name or 'it'} a reset_parameters() that sets "
        "them, or the model an _init_weights(module), as the models of Hugging Face have"
    )
