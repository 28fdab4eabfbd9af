"""FSDP2 whose parameters are gathered once per window: micro-steps are those of one process.

FSDP2 gathers a block's parameters in every forward and every backward. Here each `fully_shard`
group is gathered once, at the start of a window, into whole parameters that live as long as this
object. Until the close the model holds these plain parameters, and FSDP2's own hooks are off its
modules. So a micro-step runs no collective: it may be one recorded graph, ranks may bring different
numbers of micro-batches, and a window that runs out of memory may begin again. At the close the
gradients of each group are reduced and scattered once, the model holds its shards again, and the
optimizer steps on them.

The memory is that of ZeRO-2: whole parameters, in the dtype of the forward, and whole gradients in
the dtype of the shards, beside the shards and their optimizer state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only

from wholebatch.distributed.fsdp import check_parameters
from wholebatch.distributed.process_group import Group
from wholebatch.distributed.sync_strategy import Parameters, ReducesAtClose
from wholebatch.distributed.tensor_parallel import norm_over_meshes
from wholebatch.errors import UnsupportedError, WindowError

# torch 2.13 has renamed them.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_AT_ONCE = 2
"""The most groups whose gradients are on the wire at once: each needs a copy of its gradients."""


def why_not(model: nn.Module) -> str | None:
    """Return why the parameters of a `fully_shard` model cannot be gathered; None if they can."""
    shards = [p for p in model.parameters() if isinstance(p, DTensor)]
    if not hasattr(nn.Parameter, "grad_dtype"):
        return "it needs torch 2.11 or newer"
    if len({p.device_mesh for p in shards}) != 1:
        return "its parameters are on several meshes"
    if shards[0].device_mesh.ndim > 2:  # Gradients are reduced over one dimension of replicas.
        return f"its mesh has {shards[0].device_mesh.ndim} dimensions, and at most 2 are known"
    for shard in shards:
        *replicas, last = shard.placements
        if type(last) is not Shard or any(type(p) is not Replicate for p in replicas):
            return "its layers are sliced by tensor parallelism too"
        local = shard.to_local()
        if type(local.detach()) not in (Tensor, nn.Parameter) or not shard.is_floating_point():
            return f"a parameter is a {type(local).__name__} of {shard.dtype}"
        if local.device.type != shard.device_mesh.device_type:
            return "its shards are offloaded to the host"
    return None


def whole_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of the whole parameters that a window gathers, and of their gradients."""
    policies: dict[int, torch.dtype | None] = {}
    for module in _fsdp_modules(model):
        dtype = module._get_fsdp_state()._mp_policy.param_dtype
        policies |= {id(p): dtype for p in module.parameters()}
    shards = {id(p): p for p in model.parameters()}
    weights = sum(p.numel() * (policies.get(key) or p.dtype).itemsize for key, p in shards.items())
    trained = (p for p in shards.values() if p.requires_grad)
    return weights, sum(p.numel() * p.element_size() for p in trained)


def _fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@dataclass(eq=False)
class _Wire:
    """The parameters of one `fully_shard` group: one collective each way for all of them.

    A flat tensor of a collective holds, for each rank, its slices of all parameters one behind the
    other, each padded to the size of the first rank's.
    """

    shards: list[Any]
    whole: list[nn.Parameter]
    mesh: DeviceMesh
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        ranks = self.mesh.size(self.mesh.ndim - 1)
        self.lengths = [
            p.chunk(ranks, dim)[0].numel() if p.numel() else 0
            for p, dim in zip(self.whole, self._dims(), strict=True)
        ]

    def _dims(self) -> list[int]:
        return [shard.placements[-1].dim for shard in self.shards]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold different slices."""
        group: dist.ProcessGroup = self.mesh.get_group(self.mesh.ndim - 1)
        return group

    def slices(self, flat: Tensor, tensors: Sequence[Tensor | None]) -> Iterator[Any]:
        """Yield each slice in the flat tensor, with the same slice of the whole tensor."""
        ranks = self.mesh.size(self.mesh.ndim - 1)
        begin = 0
        rows = flat.view(ranks, -1)
        for tensor, length, dim in zip(tensors, self.lengths, self._dims(), strict=True):
            if tensor is not None and length:
                for row, part in zip(rows, tensor.chunk(ranks, dim), strict=False):
                    yield row[begin : begin + part.numel()].view(part.shape), part
            begin += length

    def gather(self) -> None:
        """Gather the shards of all ranks into the whole parameters."""
        dtype = self.whole[0].dtype
        own = self.whole[0].new_zeros(sum(self.lengths), dtype=dtype)
        for shard, place in zip(self.shards, own.split(self.lengths), strict=True):
            local = shard.to_local()
            place[: local.numel()].copy_(local.reshape(-1))
        flat = own.new_empty(own.numel() * dist.get_world_size(self.group))
        _all_gather(flat, own, group=self.group)
        pairs = list(self.slices(flat, [parameter.detach() for parameter in self.whole]))
        torch._foreach_copy_([whole for _, whole in pairs], [sent for sent, _ in pairs])

    def send(self) -> Callable[[], None]:
        """Reduce the whole gradients and scatter them; return what makes them the shards'."""
        gradients = [parameter.grad for parameter in self.whole]
        dtype = self.shards[0].dtype
        ranks = dist.get_world_size(self.group)
        flat = self.whole[0].new_zeros(sum(self.lengths) * ranks, dtype=dtype)
        pairs = list(self.slices(flat, [None if g is None else g.to_dense() for g in gradients]))
        if pairs:
            torch._foreach_copy_([sent for sent, _ in pairs], [whole for _, whole in pairs])
        own = flat.new_empty(sum(self.lengths))
        work = _reduce_scatter(own, flat, group=self.group, async_op=True)

        def receive() -> None:
            work.wait()
            if self.mesh.ndim > 1:
                dist.all_reduce(own, group=self.mesh.get_group(0))
            for shard, part in zip(self.shards, own.split(self.lengths), strict=True):
                local = shard.to_local()
                shard.grad = DTensor.from_local(
                    part[: local.numel()].view(local.shape),
                    self.mesh,
                    shard.placements,
                    run_check=False,
                    shape=shard.shape,
                    stride=shard.stride(),
                )

        return receive


@dataclass(eq=False)
class _Swap:
    """FSDP2's hooks of a module, by their keys, and what runs in their place."""

    hooks: dict[int, Any]
    theirs: dict[int, Any]
    ours: dict[int, Any]
    order: list[int] = field(default_factory=list)

    def lift(self) -> None:
        self.order = list(self.hooks)
        self._replace(self.theirs, self.ours)

    def put_back(self) -> None:
        self._replace(self.ours, self.theirs)

    def _replace(self, old: dict[int, Any], new: dict[int, Any]) -> None:
        """Replace hooks at their places; hooks that were added meanwhile stay behind them."""
        hooks = {key: hook for key, hook in self.hooks.items() if key not in old} | new
        self.hooks.clear()
        self.hooks.update({key: hooks.pop(key) for key in self.order if key in hooks} | hooks)


def _swaps(module: Any) -> Iterator[_Swap]:
    """Yield FSDP2's forward hooks; over whole parameters only a policy's casts are needed."""
    state = module._get_fsdp_state()
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    keys = {h.id for handle in handles for h in getattr(handle, "handles", (handle,))}
    policy = state._mp_policy
    inputs = policy.param_dtype if policy.cast_forward_inputs else None
    for hooks, ours in (
        (module._forward_pre_hooks, inputs and _casts_inputs(inputs)),
        (module._forward_hooks, policy.output_dtype and _casts_output(policy.output_dtype)),
    ):
        theirs = {key: hook for key, hook in hooks.items() if key in keys}
        yield _Swap(hooks, theirs, {} if ours is None else dict.fromkeys(theirs, ours))


def _casts_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, _to(dtype), (args, kwargs))

    return cast


def _casts_output(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda _, args, output: tree_map_only(Tensor, _to(dtype), output)


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


class Gathered(ReducesAtClose):
    """A model whose modules were passed through `fully_shard`, whole in a window."""

    def __init__(self, model: nn.Module) -> None:
        why = why_not(model)
        if why is not None:
            raise UnsupportedError(
                f'sync="gathered" on this model: {why}; use close=wb.Close(sync="hold")'
            )
        check_parameters(model)
        self._model = model
        shards = [p for p in model.parameters() if isinstance(p, DTensor)]
        mesh = self._mesh = shards[0].device_mesh
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        device = shards[0].to_local().device
        super().__init__(Group(groups, device, rank=dist.get_rank()))
        if mesh.ndim > 1:
            self.replicas = Group(groups[:1], device, rank=dist.get_rank())
        self._wires: list[_Wire] = []
        self._whole: dict[int, nn.Parameter] = {}  # by the id of its shard
        self._shards: dict[int, Any] = {}  # by the id of the whole parameter
        self._places: list[tuple[nn.Module, str, Any]] = []  # with its shard
        self._hooks: list[_Swap] = []
        self._flagged: list[nn.Module] = []
        self._is_whole = False

    def _prepare(self) -> None:
        """Allocate the whole parameters, and note where the model holds the shards."""
        modules = _fsdp_modules(self._model)
        for module in reversed(modules):  # the inner ones first
            state = module._get_fsdp_state()
            new: dict[int, Any] = {
                id(p): p
                for p in module.parameters()
                if isinstance(p, DTensor) and id(p) not in self._whole
            }
            kinds: dict[torch.dtype, list[Any]] = {}
            for shard in new.values():
                kinds.setdefault(shard.dtype, []).append(shard)
            for shards in kinds.values():
                whole = [_empty(shard, state._mp_policy.param_dtype) for shard in shards]
                self._wires.append(_Wire(shards, whole, self._mesh))
                for shard, parameter in zip(shards, whole, strict=True):
                    self._whole[id(shard)], self._shards[id(parameter)] = parameter, shard
        for owner in self._model.modules():
            if "_is_fsdp_managed_module" in vars(owner):
                self._flagged.append(owner)
            named = owner.named_parameters(recurse=False, remove_duplicate=False)
            self._places += [(owner, n, p) for n, p in named if id(p) in self._whole]
        self._hooks = [swap for module in modules for swap in _swaps(module)]

    def before_forwards(self) -> None:
        """Gather the parameters, and let the model hold them whole."""
        if self._is_whole:
            return
        if not self._wires:
            self._prepare()
        with torch.no_grad():
            for wire in self._wires:
                wire.gather()
        for owner, name, shard in self._places:
            whole = self._whole[id(shard)]
            whole.requires_grad_(shard.requires_grad)
            setattr(owner, name, whole)
        for swap in self._hooks:
            swap.lift()
        for module in self._flagged:  # torch.compile would not guard what such a module holds
            module._is_fsdp_managed_module = False  # type: ignore[assignment]
        self._is_whole = True

    def restore(self) -> None:
        """Let the model hold its shards again."""
        if not self._is_whole:
            return
        self._is_whole = False
        for owner, name, shard in self._places:
            setattr(owner, name, shard)
        for swap in self._hooks:
            swap.put_back()
        for module in self._flagged:
            module._is_fsdp_managed_module = True  # type: ignore[assignment]

    def in_window(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._whole.get(id(parameter), parameter) if self._is_whole else parameter

    def stepped(self, parameters: Parameters) -> Parameters:
        return [self._shards.get(id(parameter), parameter) for parameter in parameters]

    def begin(self, parameters: Parameters) -> None:
        if not self._is_whole:
            raise WindowError(
                'sync="gathered" gathers the parameters before the first forward of a window, and '
                "this window begins after it: take the micro-batches from acc.over(loader), give "
                'the loss function to acc.run(), or use close=wb.Close(sync="hold")'
            )

    @torch.no_grad()
    def reduce(self, parameters: Parameters) -> Collection[int]:
        """Reduce and scatter all gradients; the model holds its shards from here on."""
        filled_in = {
            id(shard)
            for wire in self._wires
            for shard, whole in zip(wire.shards, wire.whole, strict=True)
            if whole.grad is None
        }
        underway: deque[Callable[[], None]] = deque()
        for wire in self._wires:
            if not any(parameter.requires_grad for parameter in wire.whole):
                continue
            underway.append(wire.send())
            if len(underway) == _AT_ONCE:
                underway.popleft()()
        for receive in underway:
            receive()
        for shard, whole in chain.from_iterable(
            zip(wire.shards, wire.whole, strict=True) for wire in self._wires
        ):
            if not shard.requires_grad or (self.ranks == 1 and whole.grad is None):
                shard.grad = None
            whole.grad = None
        self.restore()
        return filled_in

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return norm_over_meshes(gradients)


def _empty(shard: DTensor, dtype: torch.dtype | None) -> nn.Parameter:
    """Return an uninitialised whole parameter; its gradient has the dtype of the shard."""
    local = shard.to_local()
    whole = nn.Parameter(
        torch.empty(shard.shape, dtype=dtype or shard.dtype, device=local.device),
        requires_grad=shard.requires_grad,
    )
    if whole.dtype is not shard.dtype:
        whole.grad_dtype = shard.dtype
    return whole
