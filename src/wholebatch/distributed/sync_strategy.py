"""The interface between a window and the engine that moves gradients between ranks."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.errors import RankError, WindowError

if TYPE_CHECKING:
    from wholebatch.distributed.process_group import Group


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Parameters: TypeAlias = Sequence[nn.Parameter]
Context: TypeAlias = AbstractContextManager[None]


class Sync(ABC):
    """One engine's way to add up gradients and counts over the data-parallel ranks."""

    group: Group | None = None
    """The data-parallel ranks; None in one process."""

    ranks: int = 1
    """The number of data-parallel ranks, whose batches together make the global batch."""

    rank: int = 0
    """The index of this process among them."""

    averaged_by: float = 1.0
    """The engine divides the reduced gradient by this; the seed of backward undoes it exactly."""

    counts_must_agree: bool = False
    """True if every rank must run equally many forwards (collectives run inside of them)."""

    keeps_gradients: bool = True
    """True if an open window's gradients are in `.grad`, where a checkpoint can take them."""

    grows_own_graph: bool = False
    """True if graphs lead to the engine's own tensors instead of the parameters themselves."""

    takes_graphs: bool = False
    """True if a micro-step may run as a graph, without autograd: the gradients that it adds are
    reduced at the close."""

    same_parameters: bool = True
    """True if all ranks hold the same parameters, whole or in slices."""

    replicas: Group | None = None
    """The ranks that hold the same numbers, and must start from the same; None if no two do."""

    owns_hooks: bool = False
    """True if the engine has put its own post-accumulate-grad hooks on the parameters."""

    owns_step: bool = False
    """True if the engine steps the optimizer itself."""

    hides_gradients: str | None = (
        "this engine shows no rank the gradient of its own micro-batches; measure on one process, "
        "or with DDP"
    )
    """Why no rank sees the gradient of its own micro-batches; None if it does."""

    clip_norm: float | None = None
    """A clipping set on the engine itself; the window does it in the engine's place."""

    def use_group(self, group: Group) -> None:
        """Sum over these data-parallel ranks."""
        self.group, self.ranks, self.rank = group, group.ranks, group.rank

    def optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer that steps the parameters, given the user's."""
        return optimizer

    def check(self, **options: Any) -> None:
        """Refuse options that this engine cannot keep exactly, at construction."""
        return

    def before_forwards(self) -> None:
        """Prepare for the forwards of a window."""
        return

    def refuse_other_parameters(
        self, named: Mapping[str, nn.Parameter], trained: Parameters
    ) -> None:
        """Refuse parameters that only some ranks train, or that start from other weights there.

        `named` are all parameters, `trained` those whose gradients are added up.
        """
        group = self.group if self.same_parameters else self.replicas
        if group is None or group.ranks == 1:
            return
        places = {id(parameter): place for place, parameter in enumerate(trained, start=1)}
        kinds = [f"{name} {_kind_of(parameter)}" for name, parameter in named.items()]
        numbers = zip(map(_crc, kinds), (places.get(id(p), 0) for p in named.values()), strict=True)
        found = group.differing([number for both in numbers for number in both])
        if found is not None:
            raise RankError(_other_parameter(kinds, *found))
        if self.replicas is not None:
            weights = [_crc(str(number)) for number in checksums(named.values())]
            found = self.replicas.differing(weights)
        if found is not None:
            alike, others = _named_by(found[1])
            raise RankError(
                f"{list(named)[found[0]]} has other weights on {others} than on {alike}, so these "
                "models would never be the same: load or initialise the same weights on every "
                "rank, or do it before the model is wrapped (DistributedDataParallel copies those "
                "of its first rank to all)"
            )

    def begin(self, parameters: Parameters) -> None:
        """Note that a window opens."""
        return

    def run_backward(self, totals: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        """Run the backward of an engine that `grows_own_graph`."""
        torch.autograd.backward(totals, seeds)

    @abstractmethod
    def backward(self, parameters: Parameters, *, reduces: bool, overlap: bool) -> Context:
        """Return the context of one backward; if that reduces, it has reduced on leaving."""

    @abstractmethod
    def reduce_now(self, parameters: Parameters) -> None:
        """Reduce gradients that no backward has reduced (a flush, a skipped last micro-batch)."""

    def filled_in(self) -> set[int]:
        """Return the parameters, by id, without a gradient on this rank at the last reduction."""
        return set()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the ranks, in float64, by one small collective."""
        return list(values) if self.group is None else self.group.sum(values)

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, as a new tensor if there are several."""
        return tensor if self.group is None else self.group.sum_tensor(tensor)

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest value over the ranks; it stays on the device."""
        return value if self.group is None else self.group.largest(value)

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over all gradients; every rank gets the same number."""
        if gradients and all(
            type(gradient) is Tensor
            and gradient.dtype is gradients[0].dtype
            and gradient.device == gradients[0].device
            for gradient in gradients
        ):  # the same as get_total_norm, without its grouping
            norms = torch.stack(torch._foreach_norm(list(gradients)))
            norm: Tensor = torch.linalg.vector_norm(norms)
            return norm
        return torch.nn.utils.get_total_norm(gradients)

    def holders(self, groups: Sequence[Sequence[nn.Parameter]]) -> Sequence[Sequence[Any]]:
        """Return the objects whose `.grad` holds the reduced gradients, by parameter group."""
        return groups

    def after_update(self) -> None:
        """Bring the buffers of all ranks into line after an update."""
        return

    def discard(self) -> None:
        """Drop the engine's own state of a window that is over."""
        return

    def restore(self) -> None:
        """Put the engine's own switches back as they were found."""
        return


class Single(Sync):
    """The model is in one process, whatever its devices."""

    takes_graphs = True
    hides_gradients = None

    def backward(self, parameters: Parameters, *, reduces: bool, overlap: bool) -> Context:
        return nullcontext()

    def reduce_now(self, parameters: Parameters) -> None:
        return


def reduces_in_backward_only(engine: str) -> WindowError:
    """Return the error of an engine that cannot reduce without a backward."""
    return WindowError(
        f"{engine} reduces its gradients inside a backward, and this window has none left: let "
        "every micro-batch make its backward (loss * 0 and units=0 for one that does not count), "
        "and let over() find the last one instead of calling flush()"
    )


def checksums(parameters: Iterable[nn.Parameter]) -> list[int]:
    """Return a number for each parameter that changes with its bits, on every device alike."""
    found = []
    for parameter in parameters:
        bits = getattr(parameter, "to_local", lambda one=parameter: one)().detach()
        try:
            bits = torch.view_as_real(bits) if bits.is_complex() else bits
            bits = bits.view(_BITS[bits.element_size()])
            found.append(bits.sum(dtype=torch.int64))
        except (RuntimeError, TypeError, NotImplementedError):  # a tensor of a kind of its own
            found.append(torch.zeros((), dtype=torch.int64))
    return [int(one) for one in found]  # only now does the host wait for a device


def _kind_of(parameter: nn.Parameter) -> str:
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 leaves nothing in it
    return f"{tuple(shape)} {str(parameter.dtype).removeprefix('torch.')}"


def _crc(text: str) -> int:
    return zlib.crc32(text.encode())


def _ranks_in_words(ranks: Sequence[int]) -> str:
    many = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {many}" if len(ranks) == 1 else f"ranks {many}"


def _named_by(numbers: Mapping[int, int]) -> tuple[str, str]:
    """Return the ranks with the number of the first one, and the others, in words."""
    first = numbers[next(iter(numbers))]
    alike = [rank for rank, number in numbers.items() if number == first]
    others = [rank for rank in numbers if rank not in alike]
    return _ranks_in_words(alike), _ranks_in_words(others)


def _other_parameter(kinds: Sequence[str], place: int, numbers: Mapping[int, int]) -> str:
    """Return the sentence on the first parameter that is not alike on all ranks.

    `numbers` are the ranks' checksums of its kind (at even places), or its place among the trained
    ones (0 if it is not trained).
    """
    alike, others = _named_by(numbers)
    kind = kinds[place // 2] if place // 2 < len(kinds) else "a parameter that is not here"
    if place % 2 == 0:
        what = f"{others} has another parameter in its place than {alike}"
    elif all(numbers.values()):
        what = f"the optimizer of {others} has it in another place than that of {alike}"
    else:
        here, there = _named_by({rank: int(number > 0) for rank, number in numbers.items()})
        trains, does_not = (here, there) if next(iter(numbers.values())) else (there, here)
        what = f"it is trained on {trains}, and frozen or in no optimizer on {does_not}"
    return (
        f"{kind}: {what}. Gradients of different parameters would be added up: build, freeze and "
        "order the parameters alike on every rank (sort the names of a set)"
    )
