"""Adam accumulation: the gradients of a window add up in Adam's first moment itself.

With gₖ the gradient of micro-batch k, already divided by the units of the whole window, an update
of Adam from the undivided batch is

    m ← β₁ m + (1 − β₁) Σ gₖ        v ← β₂ v + (1 − β₂) (Σ gₖ)²

The first sum can be made in the memory of m, one term after the other: it is exact. When the first
gradient of a window comes, m is divided by what gradients are to be multiplied with,

    s = β₁ / (1 − β₁) m + g₁        s ← s + gₖ        m ← (1 − β₁) s

and s is the parameter's `.grad` from then on: all that come later add themselves, as in the plain
window, by autograd or within the matrix product that makes them. A parameter without a gradient is
never touched.

The square of a sum cannot be made term by term, and Adam accumulation as it was proposed (arXiv
2305.19982) puts Σ gₖ² in its place. Here the old moments are kept too, in half the bits, in the
memory of v (`packed`), so that the close finds the whole gradient again, and v from it:

    G = s − β₁ / (1 − β₁) m_old        v ← β₂ v_old + (1 − β₂) G²

v then differs from that of the undivided batch by the rounding of m_old and v_old alone, whatever
the gradients are. This is the one store whose update is not that of the undivided batch.

Decay, bias correction and weight decay are made once per update. Over R ranks s is added up once
per window: each rank begins with 1/R of the old m, so that the sum has all of it. v is made of the
same numbers on every rank, and does not travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wholebatch.close import Closed, CloseOptions, read_scalars
from wholebatch.errors import OptionError, StateError, UnsupportedError, WindowError
from wholebatch.gradients.adam import state_of
from wholebatch.gradients.packed import pack, unpack
from wholebatch.gradients.store import Store
from wholebatch.gradients.sums import bucket_bytes
from wholebatch.hooks import DeferredHooks
from wholebatch.sync import Sync

if TYPE_CHECKING:
    from wholebatch.target import Target

__all__ = ["MomentsStore", "check_moments"]

_BUCKET_BYTES = 64 * 2**20
"""Moments that are reduced, or stepped with, together."""


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose a parameter is, and what its first moment is multiplied with in this window."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    beta1: float
    sign: float

    @property
    def decay(self) -> float:
        """What the old moment counts in the sum of gradients: β₁ / (1 − β₁)."""
        return self.sign * self.beta1 / (1.0 - self.beta1)

    @property
    def share(self) -> float:
        """What the sum counts in the new moment."""
        return self.sign * (1.0 - self.beta1)


class MomentsStore(Store):
    """Gradients in `.grad`, which is Adam's first moment: no other memory is used."""

    in_grad = False  # the window's last backward would make a copy of all to reduce them
    only_eager = (
        'with gradients="moments" the first of a window goes into the moments by a hook that only '
        "eager code calls"
    )
    counts_first = True
    approximate = (
        "Adam's second moment is made of old moments that were kept in half their bits while the "
        "gradients were added up"
    )
    counts_changes = False  # moments are changed by backwards
    after_failure = (
        "the parameters are as before this window, and the optimizer's moments too, but rounded to "
        "half their bits"
    )

    def __init__(self, target: Target, options: CloseOptions, sync: Sync) -> None:
        super().__init__(target, options, sync)
        self._owners: dict[int, _Owner] = {}
        self._most = _BUCKET_BYTES
        self._opened: dict[int, nn.Parameter] = {}  # whose moments hold gradients
        self._keys: dict[int, Tensor] = {}  # what brings their old moments back
        self._in_place: list[nn.Parameter] = []  # whose `.grad` is the first moment
        self._hooked: dict[int, Any] = {}  # the hooks of all others
        self._nowhere: set[int] = set()
        self._counts = True

    # ----------------------------------------------------------------- window

    def begin(
        self, parameters: list[nn.Parameter], known: Mapping[str, float] | None = None
    ) -> None:
        super().begin(parameters, known)
        self._counts = known is None or any(known.values())
        self._most = bucket_bytes(parameters, _BUCKET_BYTES)
        self._owners = {}
        for optimizer in self.target.optimizers:
            for group in optimizer.param_groups:
                owner = _owner(optimizer, group)
                self._owners.update((id(parameter), owner) for parameter in group["params"])
        for parameter in parameters:
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise UnsupportedError(
                    f"{self.target.name_of(parameter)} has a gradient hook: with "
                    'gradients="moments" there is never a whole gradient for it to see; remove it'
                )
        self.hook(self._made)
        self._hooked = dict(zip(map(id, parameters), self._handles, strict=True))

    @torch.no_grad()
    def _made(self, parameter: Tensor) -> None:
        """The first gradient of a window goes into the moment, which takes its place."""
        gradient = parameter.grad
        if gradient is None:  # a function of the graph had none to give
            return
        if gradient.is_sparse:
            raise UnsupportedError(
                'a sparse gradient with gradients="moments"; use sparse=False, or '
                'gradients="device"'
            )
        assert isinstance(parameter, nn.Parameter)
        if not self._counts:  # no units in all of the window: these are zeros, and no update
            parameter.grad = None
            return
        loaded = id(parameter) in self._opened  # what is there is of this window already
        decay = 1.0 if loaded else self._open(parameter)
        first = self._moments(parameter)[0]
        torch.add(_real(gradient), first, alpha=decay, out=first)
        parameter.grad = self._state(parameter)["exp_avg"]
        self._in_place.append(parameter)
        self._hooked.pop(id(parameter)).remove()  # the next ones add themselves

    def _open(self, parameter: nn.Parameter) -> float:
        """Pack the moments of a parameter; what the first one is to be multiplied with."""
        owner = self._owner_of(parameter)
        state = state_of(owner.optimizer, owner.group, parameter)
        first, second = _real(state["exp_avg"]), _real(state["exp_avg_sq"])
        self._keys[id(parameter)] = pack(first, second, state["step"])
        self._opened[id(parameter)] = parameter
        return owner.decay / self.sync.ranks

    def _owner_of(self, parameter: nn.Parameter) -> _Owner:
        return self._owners[id(parameter)]

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self._owner_of(parameter).optimizer.state[parameter]
        return state

    def _moments(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        state = self._state(parameter)
        return _real(state["exp_avg"]), _real(state["exp_avg_sq"])

    def _old(self, parameter: nn.Parameter) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The sum that is in the first moment, the old one, and the old second; by pieces."""
        return unpack(*self._moments(parameter), self._keys[id(parameter)])

    # ------------------------------------------------------------------ close

    def reduce_now(self) -> None:
        for parameter in self.parameters:
            if id(parameter) in self._hooked:  # not every gradient is made by a backward's hooks
                self._made(parameter)
        for parameter in self._in_place:
            if parameter.grad is not self._state(parameter)["exp_avg"]:
                raise WindowError(
                    f"the gradient of {self.target.name_of(parameter)} was taken away in the "
                    'middle of the window: with gradients="moments" it is the optimizer\'s '
                    "exp_avg while a window is open; call zero_grad() and load_state_dict() "
                    "between windows"
                )

    def absent(self) -> set[int]:
        return {id(p) for p in self.parameters} - self._opened.keys()

    def drop(self, parameter: nn.Parameter) -> None:
        self._nowhere.add(id(parameter))

    @torch.no_grad()
    def close(
        self, groups: Sequence[Sequence[nn.Parameter]], normalise: float, hooks: DeferredHooks
    ) -> Closed:
        assert normalise == 1.0  # the units were known before the first backward
        if self.sync.ranks > 1:
            some = [p for p in self.parameters if id(p) not in self._nowhere]
            for parameter in some:
                if id(parameter) not in self._opened:  # another rank has a gradient
                    decay = self._open(parameter)
                    self._moments(parameter)[0].mul_(decay)
            for bucket in _in_buckets(some, self._most):
                self._reduce([self._moments(parameter)[0] for parameter in bucket])
        norms = torch._foreach_norm([self._moments(p)[0] for p in self._opened.values()])
        finite = all(map(math.isfinite, read_scalars(norms)))
        # The whole gradient was never there, so it has no norm to report.
        return Closed(norm=math.nan, clip=1.0, finite=finite)

    def _reduce(self, moments: list[Tensor]) -> None:
        flat = self.sync.sum_tensor(torch.cat([moment.reshape(-1) for moment in moments]))
        sizes = [moment.numel() for moment in moments]
        for moment, piece in zip(moments, flat.split(sizes), strict=True):
            moment.copy_(piece.view_as(moment))

    @torch.no_grad()
    def step(self, remaining: float) -> None:
        for parameter in self._in_place:
            parameter.grad = None
        for optimizer in self.target.optimizers:
            mine = [p for p in self._opened.values() if self._owner_of(p).optimizer is optimizer]
            for parameter in mine:
                self._make_moments(parameter)
            steps = [optimizer.state[parameter]["step"] for parameter in mine]
            if steps:
                torch._foreach_add_(steps, 1.0)
            counts = dict(zip(map(id, mine), read_scalars(steps), strict=True))
            for bucket in _in_buckets(mine, self._most):
                self._step(optimizer, bucket, counts)
            optimizer.step()  # finds no gradient: only its hooks run, and schedulers see a step
        self._opened, self._keys = {}, {}

    def _make_moments(self, parameter: nn.Parameter) -> None:
        """Both moments, from the whole gradient that is in the first."""
        owner = self._owner_of(parameter)
        beta2 = owner.group["betas"][1]
        for first, old, second in self._old(parameter):
            gradient = torch.add(first, old, alpha=-owner.decay, out=old)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
            first.mul_(owner.share)
        del self._opened[id(parameter)], self._keys[id(parameter)]

    def _step(
        self, optimizer: torch.optim.Optimizer, some: list[nn.Parameter], counts: dict[int, float]
    ) -> None:
        by_group: dict[int, list[nn.Parameter]] = {}
        for parameter in some:
            by_group.setdefault(id(self._owner_of(parameter).group), []).append(parameter)
        for parameters in by_group.values():
            owner = self._owner_of(parameters[0])
            group, beta1, beta2 = owner.group, owner.beta1, owner.group["betas"][1]
            lr, decay = float(group["lr"]), group["weight_decay"]
            steps = [counts[id(parameter)] for parameter in parameters]
            states = [optimizer.state[parameter] for parameter in parameters]
            targets = [_real(parameter.data) for parameter in parameters]
            if decay:
                torch._foreach_mul_(targets, 1.0 - lr * decay)
            below = torch._foreach_sqrt([_real(state["exp_avg_sq"]) for state in states])
            torch._foreach_div_(below, [math.sqrt(1.0 - beta2**step) for step in steps])
            torch._foreach_add_(below, group["eps"])
            torch._foreach_addcdiv_(
                targets,
                [_real(state["exp_avg"]) for state in states],
                below,
                [-lr / (1.0 - beta1**step) for step in steps],
            )

    # ------------------------------------------------------------------ state

    def saved(self) -> dict[str, list[Tensor | None]]:
        """What brings the old moments back; they themselves are in the optimizer's state."""
        keys = [self._keys.get(id(parameter)) for parameter in self.parameters]
        saved = [None if key is None else key.cpu() for key in keys]
        return {"moments": saved, "sums": True}

    def check(self, saved: Any) -> None:
        if not isinstance(saved, dict) or "moments" not in saved:
            raise StateError(
                "the saved window holds gradients, and gradients='moments' keeps none: resume with "
                "the same gradients="
            )
        if not saved.get("sums"):
            raise StateError(
                "the saved window is of an earlier version, which had other numbers in the "
                "optimizer's moments: finish it there, or resume from a checkpoint between windows"
            )

    def load(self, saved: Any) -> None:
        for parameter, key in zip(self.parameters, saved["moments"], strict=True):
            if key is not None:
                self._opened[id(parameter)] = parameter
                self._keys[id(parameter)] = key.to(parameter.device)

    @torch.no_grad()
    def discard(self) -> None:
        for parameter in self._opened.values():  # of a window that has made no update
            for first, old, _ in self._old(parameter):
                first.copy_(old)
        self._opened, self._keys, self._nowhere = {}, {}, set()
        self._in_place, self._hooked = [], {}
        super().discard()


def check_moments(target: Target, options: CloseOptions, *, counts_units: bool) -> None:
    """Refuse what cannot be had without a whole gradient, with the reason."""
    option = 'gradients="moments"'
    if options.clip_norm is not None or options.clip_value is not None:
        raise OptionError(
            f"{option} with clip_norm= or clip_value=: clipping needs the whole gradient, which is "
            'never there; leave it out, or use gradients="host"'
        )
    if not counts_units:
        raise OptionError(
            f"{option} without units=: what has gone into a moment cannot be divided again when "
            "the total is known at last; count it before, with units=, a function of the "
            "micro-batch"
        )
    if target.scale is not None:
        raise OptionError(
            f"{option} with a loss scale: what has gone into a moment cannot be divided by it at "
            'the close; use precision="bf16" or full precision'
        )
    for optimizer in target.optimizers:
        name = type(optimizer).__name__
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            raise UnsupportedError(
                f"{option} with {name}: gradients can be added into the moments of torch's Adam "
                'and AdamW only; use one of these, or gradients="host"'
            )
        for group in optimizer.param_groups:
            decoupled = group.get("decoupled_weight_decay", name == "AdamW")
            if group["weight_decay"] and not decoupled:
                raise UnsupportedError(
                    f"{option} with {name}(weight_decay={group['weight_decay']}): a decay that "
                    "is part of the gradient would be squared with it; use AdamW"
                )
            for flag in ("amsgrad", "capturable", "differentiable"):
                if group.get(flag):
                    raise UnsupportedError(f"{option} with {name}({flag}=True): leave it out")
    for group_of in target.groups():
        for parameter in group_of:
            if parameter.dtype in (torch.bfloat16, torch.float16):
                raise UnsupportedError(
                    f"{option} with 16-bit parameters ({target.name_of(parameter)}): their moments "
                    "are 16-bit too, and lose what is added in small parts; keep the parameters in "
                    'float32 and use precision="bf16"'
                )


def _owner(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> _Owner:
    beta1 = float(group["betas"][0])
    if not 0.0 <= beta1 < 1.0:
        raise UnsupportedError(
            f'gradients="moments" with betas={group["betas"]}: no gradient would reach the first '
            "moment; the first of the betas must be at least 0 and below 1"
        )
    return _Owner(optimizer, group, beta1, -1.0 if group["maximize"] else 1.0)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _in_buckets(parameters: Sequence[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype and device together, up to a size."""
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        last = buckets[-1][-1] if buckets else None
        fits = last is not None and filled + size <= most
        if (
            fits
            and last is not None
            and (last.dtype, last.device)
            == (
                parameter.dtype,
                parameter.device,
            )
        ):
            buckets[-1].append(parameter)
            filled += size
        else:
            buckets.append([parameter])
            filled = size
    return buckets
