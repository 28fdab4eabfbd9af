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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wholebatch.core.close import Closed, CloseOptions, DeferredHooks, read_scalars
from wholebatch.core.gradient_store import Store
from wholebatch.distributed import Sync
from wholebatch.errors import StateError, UnsupportedError, WindowError
from wholebatch.offload.adam_state import Owner, owners_of, state_of
from wholebatch.offload.host_sums import bucket_bytes
from wholebatch.offload.moment_keys import Ready, real
from wholebatch.offload.packed_moments import pack, pack_together, unpack, unpack_together

if TYPE_CHECKING:
    from wholebatch.core.model_and_optimizer import Target

__all__ = ["MomentsStore"]

_BUCKET_BYTES = 64 * 2**20
"""Moments that are reduced, or stepped with, together."""
_SMALL = 2**15
"""Elements up to which gradients wait for others: kernels then take many at once."""
_WAITING_BYTES = 2**20
"""How much may wait."""


class MomentsStore(Store):
    """Gradients in `.grad`, which is Adam's first moment: no other memory is used."""

    option = 'gradients="moments"'
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
        self._owners: dict[int, Owner] = {}
        self._most = _BUCKET_BYTES
        self._waiting: dict[int, nn.Parameter] = {}  # small ones, whose first gradient is made
        self._waiting_bytes = 0
        self._may_wait = _WAITING_BYTES
        self._opened: dict[int, nn.Parameter] = {}  # whose moments hold gradients
        self._keys: dict[int, Tensor] = {}  # what brings their old moments back
        self._ready = Ready()  # keys of those that may be opened yet
        self._in_place: list[nn.Parameter] = []  # whose `.grad` is the first moment
        self._nowhere: set[int] = set()
        self._counts = True

    # ----------------------------------------------------------------- window

    def begin(
        self, parameters: list[nn.Parameter], known: Mapping[str, float] | None = None
    ) -> None:
        super().begin(parameters, known)
        self._counts = known is None or any(known.values())
        self._most = bucket_bytes(parameters, _BUCKET_BYTES)
        self._may_wait = bucket_bytes(parameters, _WAITING_BYTES)
        self._owners = owners_of(self.target.optimizers)
        for parameter in parameters:
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise UnsupportedError(
                    f"{self.target.name_of(parameter)} has a gradient hook: with "
                    'gradients="moments" there is never a whole gradient for it to see; remove it'
                )
        self.hook(self._made)

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
        if not _is_small(parameter):
            self._put_in_place([parameter])
        elif id(parameter) not in self._waiting:
            self._waiting[id(parameter)] = parameter
            self._waiting_bytes += parameter.numel() * parameter.element_size()
            if self._waiting_bytes > self._may_wait:
                self.backward_made()

    def backward_made(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        if waiting:
            self._put_in_place([*waiting.values()])

    @torch.no_grad()
    def _put_in_place(self, parameters: Sequence[nn.Parameter]) -> None:
        """Their first gradients go into the moments; those that come later add themselves."""
        self._open(parameters)
        gradients = [real(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_add_([self._moments(p)[0] for p in parameters], gradients)
        del gradients
        for parameter in parameters:
            parameter.grad = self._owner_of(parameter).state(parameter)["exp_avg"]
            self._in_place.append(parameter)
            self.look_away(parameter)

    def _open(self, parameters: Sequence[nn.Parameter]) -> None:
        """Pack and decay the moments of those that this window has not touched yet."""
        for some in self._alike([p for p in parameters if id(p) not in self._opened]):
            owner = self._owner_of(some[0])
            states = [state_of(owner.optimizer, owner.group, parameter) for parameter in some]
            firsts, seconds = ([real(s[n]) for s in states] for n in ("exp_avg", "exp_avg_sq"))
            keys = [
                self._ready.key(id(parameter), state, self._unopened)
                for parameter, state in zip(some, states, strict=True)
            ]
            if len(some) == 1:
                pack(firsts[0], seconds[0], keys[0])
            else:
                pack_together(firsts, seconds, keys)
            self._keys.update((id(p), key.row) for p, key in zip(some, keys, strict=True))
            self._opened.update((id(parameter), parameter) for parameter in some)
            torch._foreach_mul_(firsts, owner.decay / self.sync.ranks)

    def _unopened(self) -> dict[int, dict[str, Any]]:
        """The state of all that may be opened yet."""
        states = [(id(p), self._owner_of(p).optimizer.state.get(p)) for p in self.parameters]
        return {number: s for number, s in states if s and number not in self._opened}

    def _alike(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Large ones one by one, and small ones of one parameter group together."""
        small: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            if _is_small(parameter):
                small.setdefault(id(self._owner_of(parameter)), []).append(parameter)
            else:
                yield [parameter]
        for some in small.values():
            yield from _in_buckets(some, self._may_wait)

    def _owner_of(self, parameter: nn.Parameter) -> Owner:
        return self._owners[id(parameter)]

    def _moments(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        state = self._owner_of(parameter).state(parameter)
        return real(state["exp_avg"]), real(state["exp_avg_sq"])

    def _old(self, some: Sequence[nn.Parameter]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The sums that are in the first moments, the old ones, and the old second; by pieces."""
        moments = [self._moments(parameter) for parameter in some]
        keys = [self._keys[id(parameter)] for parameter in some]
        if len(some) == 1:
            return unpack(*moments[0], keys[0])
        return unpack_together([m for m, _ in moments], [v for _, v in moments], keys)

    # ------------------------------------------------------------------ close

    def reduce_now(self) -> None:
        for parameter in self.parameters:
            if id(parameter) in self._hooked:  # not every gradient is made by a backward's hooks
                self._made(parameter)
        self.backward_made()
        for parameter in self._in_place:
            if parameter.grad is not self._owner_of(parameter).state(parameter)["exp_avg"]:
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
            self._open(some)  # another rank has a gradient
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
            for some in self._alike(mine):
                self._make_moments(some)
            steps = [optimizer.state[parameter]["step"] for parameter in mine]
            if steps:
                torch._foreach_add_(steps, 1.0)
            counts = dict(zip(map(id, mine), read_scalars(steps), strict=True))
            for bucket in _in_buckets(mine, self._most):
                self._step(optimizer, bucket, counts)
            optimizer.step()  # finds no gradient: only its hooks run, and schedulers see a step
        self._opened, self._keys = {}, {}

    def _make_moments(self, some: Sequence[nn.Parameter]) -> None:
        """Both moments, from the whole gradient that is in the first."""
        owner = self._owner_of(some[0])
        beta2 = owner.group["betas"][1]
        for first, old, second in self._old(some):
            gradient = torch.add(first, old, alpha=-owner.decay, out=old)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
            first.mul_(owner.share)
        for parameter in some:
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
            targets = [real(parameter.data) for parameter in parameters]
            if decay:
                torch._foreach_mul_(targets, 1.0 - lr * decay)
            # What corrects v is multiplied above and below instead: one pass less.
            roots = [math.sqrt(1.0 - beta2**step) for step in steps]
            below = torch._foreach_sqrt([real(state["exp_avg_sq"]) for state in states])
            torch._foreach_add_(below, [group["eps"] * root for root in roots])
            torch._foreach_addcdiv_(
                targets,
                [real(state["exp_avg"]) for state in states],
                below,
                [-lr * r / (1.0 - beta1**step) for r, step in zip(roots, steps, strict=True)],
            )

    # ------------------------------------------------------------------ state

    def saved(self) -> dict[str, Any]:
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
        for some in self._alike([*self._opened.values()]):  # of a window that made no update
            for first, old, _ in self._old(some):
                first.copy_(old)
        self._opened, self._keys, self._nowhere = {}, {}, set()
        self._ready.clear()
        self._in_place = []
        self._waiting, self._waiting_bytes = {}, 0
        super().discard()


def _is_small(parameter: Tensor) -> bool:
    return 0 < parameter.numel() <= _SMALL


def _in_buckets(parameters: Sequence[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype and device together, up to a size."""
    buckets: list[list[nn.Parameter]] = []
    filled, last = 0, None
    for parameter in parameters:
        size, kind = (
            parameter.numel() * parameter.element_size(),
            (parameter.dtype, parameter.device),
        )
        if kind != last or filled + size > most:
            buckets.append([])
            filled, last = 0, kind
        buckets[-1].append(parameter)
        filled += size
    return buckets
