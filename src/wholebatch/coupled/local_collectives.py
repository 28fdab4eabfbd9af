"""Collectives without the other ranks, for forwards that one rank runs by itself.

A look runs a user's loss on a few samples, and how often depends on what it finds. A loss that
talks to other ranks (a metric that is gathered, as in TRL's SFTTrainer) would then wait for ranks
that have run it less often. Within `local_collectives()` every rank is answered at once, as if
all ranks had the same tensors as this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch.distributed.process_group import world_size

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


class LocalCollectiveError(Exception):
    """A collective whose result cannot be told from this rank's tensors."""


def local_collectives() -> AbstractContextManager[Any]:
    """Answer collectives from this rank's own tensors; other kinds raise `LocalCollectiveError`."""
    if world_size() == 1:
        return nullcontext()
    local: AbstractContextManager[Any] = _Local()  # type: ignore[no-untyped-call]
    return local


class _Local(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in _NAMESPACES:
            return func(*args, **(kwargs or {}))
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args)}  # noqa: B905
        return _answered(func._schema.name.split("::")[1], given | (kwargs or {}))


def _answered(name: str, given: dict[str, Any]) -> Any:
    """Write a collective's result into its tensors; return what the operation returns."""
    if name in ("allreduce_", "reduce_"):
        for tensor in given["tensors"]:
            tensor.mul_(_factor(given["reduce_op"], given["process_group"]))
    elif name == "allgather_":
        for outputs, source in zip(given["output_tensors"], given["input_tensors"], strict=True):
            for output in outputs:
                output.copy_(source)
    elif name == "_allgather_base_":
        output, source = given["output_tensor"], given["input_tensor"]
        parts: list[Tensor] = list(output.view(-1).split(max(source.numel(), 1)))
        for part in parts:
            part.copy_(source.reshape(-1))
    elif name not in ("broadcast_", "barrier"):
        raise LocalCollectiveError(f"the loss runs the collective {name.strip('_')}")
    done = torch._C._distributed_c10d.FakeWork().boxed()
    if name in ("reduce_", "barrier"):
        return done
    for key in ("output_tensors", "output_tensor", "tensors"):
        if key in given:
            return given[key], done
    raise AssertionError(name)


def _factor(reduce_op: Any, group: Any) -> int:
    """Return what equal tensors of all ranks are reduced to, as a multiple of one of them."""
    op, kinds = reduce_op.op(), distributed.ReduceOp
    if op == kinds.SUM:
        return int(distributed.ProcessGroup.unbox(group).size())
    if op in (kinds.AVG, kinds.MIN, kinds.MAX):
        return 1
    raise LocalCollectiveError("the loss reduces over ranks, and not by a sum, mean, min or max")
