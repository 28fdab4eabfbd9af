"""Build a model for FSDP2 that is never whole on one rank: on meta, sharded, then initialised.

Building a model on the meta device allocates nothing, and loses the values that its constructor
gives to parameters. So the operations of the constructor are recorded. After sharding, those that
made one parameter are run again for that parameter alone, on the CPU, and the rank keeps its shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from wholebatch.cli.recipes.recipe_batches import seeded
from wholebatch.errors import RecipeError
from wholebatch.memory.activation_checkpointing import repeated_blocks
from wholebatch.memory.meter import storage_id


def build_sharded(
    build: Callable[[], nn.Module], *, seed: int, device: torch.device, ranks: int
) -> tuple[nn.Module, Callable[[], None]]:
    """Return the model in shards without values, and a function that gives it its first values."""
    recorder = _Recorder()
    try:
        with recorder.watching():
            model = build()
    except (NotImplementedError, RuntimeError) as error:
        raise RecipeError(
            f"--parallel fsdp2: model() cannot be built on the meta device ({error}): its "
            "constructor must not read the values of tensors"
        ) from error
    made = {name: tensor.detach() for name, tensor in _tensors_of(model)}
    mesh = init_device_mesh(device.type, (ranks,))
    for name in repeated_blocks(model):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)

    def initialise() -> None:
        for place, (name, tensor) in enumerate(_tensors_of(model)):
            with seeded(seed, "weights", place), torch.no_grad():
                whole = recorder.replay(made[name], name)
                if isinstance(tensor, DTensor):
                    mesh, placements = tensor.device_mesh, tensor.placements
                    shard = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                    tensor.to_local().copy_(shard.to_local())
                else:
                    tensor.copy_(whole)

    return model, initialise


# Functions of torch.nn.init that return at once for a meta tensor: their calls are recorded.
_SKIPPED: dict[CodeType, Callable[..., Any]] = {
    function.__code__: function
    for function in (
        nn.init.dirac_,
        nn.init.eye_,
        nn.init.orthogonal_,
        nn.init.sparse_,
        nn.init.trunc_normal_,
    )
}


class _Constants(TorchFunctionMode):
    """Keeps the values of `torch.tensor(...)`, which the recorder of operations does not see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor):
            value: Tensor = func(*args, **{**(kwargs or {}), "device": "cpu"})
            return value.to("meta")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Records every operation, with the storages that it reads and those that it writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Callable[..., Any], Any, list[Tensor], set[int], set[int]]]
        self._operations = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Aliases: `parameter.data = other` gives a parameter another storage later.
        given, made = tree_map(_alias, ((args, kwargs or {}), _tensors_in(result)))
        reads = {_storage(tensor) for tensor in _tensors_in(given)}
        in_place = str(func).split(".")[1].endswith("_")
        writes = {_storage(tensor) for tensor in made}
        if writes - reads or in_place:  # else it is a view
            self._operations.append((func, given, made, reads, writes))
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record everything that makes tensors, on the meta device."""

        def profile(frame: FrameType, event: str, argument: object) -> None:
            function = _SKIPPED.get(frame.f_code) if event == "call" else None
            if function is not None:
                given = tree_map(_alias, ((), dict(frame.f_locals)))
                tensor = given[1]["tensor"]
                place = {_storage(tensor)}
                self._operations.append((function, given, [tensor], place, place))

        before = sys.getprofile()
        with self, torch.device("meta"), _Constants():
            sys.setprofile(profile)
            try:
                yield
            finally:
                sys.setprofile(before)

    def replay(self, wanted: Tensor, name: str) -> Tensor:
        """Run the operations that made this meta tensor again, on the CPU."""
        needed = {_storage(wanted)}
        chosen = []
        for operation in reversed(self._operations):
            *_, reads, writes = operation
            if writes & needed:
                needed |= reads
                chosen.append(operation)
        real: dict[int, Tensor] = {}

        def on_cpu(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_meta:
                whole = real[_storage(value)]
                return whole.as_strided(value.size(), value.stride(), value.storage_offset())
            return torch.device("cpu") if value == torch.device("meta") else value

        try:
            for func, given, made, _, _ in reversed(chosen):
                args, kwargs = tree_map(on_cpu, given)
                for meta, result in zip(made, _tensors_in(func(*args, **kwargs)), strict=True):
                    real.setdefault(_storage(meta), result)
            found: Tensor = on_cpu(wanted)
        except KeyError:
            raise RecipeError(
                f"--parallel fsdp2: the initial values of {name} are not known, because model() "
                "creates it from an array; create it with torch's functions, such as torch.arange"
            ) from None
        return found


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())
