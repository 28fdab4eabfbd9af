"""Adam accumulation: the gradients of a window add up in Adam's first moment itself.

This is the one store whose update is only approximately that of the undivided batch. For gradients
gₖ, divided by the units of the whole window (docs/gradients.md derives the formulas):

    s = β₁ / (1 − β₁) m + g₁        s ← s + gₖ        m ← (1 − β₁) s
    G = s − β₁ / (1 − β₁) m_old     v ← β₂ v_old + (1 − β₂) G²

The old moments are kept in half the bits, in the memory of v (`packed_moments`). Over R ranks s is
summed once per window: each rank begins with 1/R of the old m.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wholebatch.distributed import Sync
from wholebatch.distributed.ddp import in_buckets
from wholebatch.errors import OptionError, StateError, UnsupportedError, WindowError
from wholebatch.offload.packed_moments import keys_of, pack, unpack
from wholebatch.offload.parameter_buckets import BUCKET_BYTES, as_real, bucket_bytes, sum_over_ranks
from wholebatch.window.close import Closed, CloseOptions, DeferredHooks, read_scalars
from wholebatch.window.gradient_store import Store
from wholebatch.window.precision import SIXTEEN_BIT

if TYPE_CHECKING:
    from wholebatch.window.model_and_optimizer import Target
    from wholebatch.window.window import OpenWindow


_SMALL = 2**15
"""Parameters of up to this many elements wait for others, so that kernels take many at once."""
_WAITING_BYTES = 2**20
"""The bytes of gradients that may wait."""


class MomentsStore(Store):
    """Gradients in `.grad`, which is Adam's first moment: they need no memory of their own."""

    option = 'gradients="moments"'
    in_grad = False  # the window's last backward would make a copy of all to reduce them
    only_eager = (
        'with gradients="moments" the first of a window goes into the moments by a hook that only '
        "eager code calls"
    )
    counts_first = True
    counts_changes = False  # moments are changed by backwards
    after_failure = (
        "the parameters are as before this window, and the optimizer's moments too, but rounded to "
        "half their bits"
    )

    def __init__(self, target: Target, options: CloseOptions, sync: Sync) -> None:
        super().__init__(target, options, sync)
        self._groups: dict[int, _Group] = {}  # by the parameter's id
        self._most = 0
        self._waiting: dict[int, nn.Parameter] = {}  # small ones with a first gradient
        self._waiting_bytes = 0
        self._may_wait = 0
        self._opened: dict[int, nn.Parameter] = {}  # their moments hold gradients
        self._keys: dict[int, Tensor] = {}  # to unpack their old moments
        self._in_place: list[nn.Parameter] = []  # their `.grad` is the first moment
        self._counts = True

    # Open window

    def begin(self, window: OpenWindow) -> None:
        super().begin(window)
        parameters = window.inputs
        self._counts = window.known is None or any(window.known.values())
        self._most = bucket_bytes(parameters, BUCKET_BYTES["moments"])
        self._may_wait = bucket_bytes(parameters, _WAITING_BYTES)
        self._groups = _groups_of(self.target.optimizers)
        for parameter in parameters:
            if parameter._backward_hooks:
                raise UnsupportedError(
                    f"{self.target.name_of(parameter)} has a gradient hook: with "
                    'gradients="moments" there is never a whole gradient for it to see; remove it'
                )
        self.hook(self._made)

    @torch.no_grad()
    def _made(self, parameter: Tensor) -> None:
        """Add the first gradient of a window into the moment, which becomes `.grad`."""
        gradient = parameter.grad
        if gradient is None:  # a function of the graph returned none
            return
        if gradient.is_sparse:
            raise UnsupportedError(
                'a sparse gradient with gradients="moments"; use sparse=False, or '
                'gradients="device"'
            )
        assert isinstance(parameter, nn.Parameter)
        if not self._counts:  # the window has no units: gradients are zeros, and there is no update
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
        """Add first gradients into the moments, and let later ones add themselves."""
        self._open(parameters)
        gradients = [as_real(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_add_([self._moments(p)[0] for p in parameters], gradients)
        del gradients
        for parameter in parameters:
            parameter.grad = self._group_of(parameter).state(parameter)["exp_avg"]
            self._in_place.append(parameter)
            self._hooked.pop(id(parameter)).remove()  # later backwards add by themselves

    def _open(self, parameters: Sequence[nn.Parameter]) -> None:
        """Pack and decay the moments of parameters that this window has not touched yet."""
        for some in self._alike([p for p in parameters if id(p) not in self._opened]):
            group = self._group_of(some[0])
            states = [adam_state_of(group.optimizer, group.options, p) for p in some]
            firsts, seconds = ([as_real(s[n]) for s in states] for n in ("exp_avg", "exp_avg_sq"))
            keys = keys_of(firsts, seconds, [state["step"] for state in states])
            pack(firsts, seconds, keys)
            self._keys.update((id(p), key.row) for p, key in zip(some, keys, strict=True))
            self._opened.update((id(parameter), parameter) for parameter in some)
            torch._foreach_mul_(firsts, group.decay / self.sync.ranks)

    def _alike(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield large parameters one by one, and small ones of one group together."""
        small: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            if _is_small(parameter):
                small.setdefault(id(self._group_of(parameter)), []).append(parameter)
            else:
                yield [parameter]
        for some in small.values():
            yield from in_buckets(some, self._may_wait)

    def _group_of(self, parameter: nn.Parameter) -> _Group:
        return self._groups[id(parameter)]

    def _moments(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        state = self._group_of(parameter).state(parameter)
        return as_real(state["exp_avg"]), as_real(state["exp_avg_sq"])

    def _old(self, some: Sequence[nn.Parameter]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield pieces of the sums in the first moments, the old first, and the old second."""
        moments = [self._moments(parameter) for parameter in some]
        keys = [self._keys[id(parameter)] for parameter in some]
        return unpack([m for m, _ in moments], [v for _, v in moments], keys)

    # Close

    def reduce_now(self) -> None:
        for parameter in self.parameters:
            if id(parameter) in self._hooked:  # a gradient that no backward has made
                self._made(parameter)
        self.backward_made()
        for parameter in self._in_place:
            if parameter.grad is not self._group_of(parameter).state(parameter)["exp_avg"]:
                raise WindowError(
                    f"the gradient of {self.target.name_of(parameter)} was taken away in the "
                    'middle of the window: with gradients="moments" it is the optimizer\'s '
                    "exp_avg while a window is open; call zero_grad() and load_state_dict() "
                    "between windows"
                )

    def absent(self) -> set[int]:
        return {id(p) for p in self.parameters} - self._opened.keys()

    @torch.no_grad()
    def close(self, window: OpenWindow, normalise: float, hooks: DeferredHooks) -> Closed:
        assert normalise == 1.0  # the units were known before the first backward
        if self.sync.ranks > 1:
            some = [p for p in self.parameters if id(p) not in self.dropped]
            self._open(some)  # another rank has a gradient
            for bucket in in_buckets(some, self._most):
                moments = [self._moments(parameter)[0] for parameter in bucket]
                sums = sum_over_ranks(self.sync, [moment.reshape(-1) for moment in moments])
                for moment, summed in zip(moments, sums, strict=True):
                    moment.copy_(summed.view_as(moment))
        norms = torch._foreach_norm([self._moments(p)[0] for p in self._opened.values()])
        finite = all(map(math.isfinite, read_scalars(norms)))
        # The whole gradient never exists, so there is no norm to report.
        return Closed(norm=math.nan, clip=1.0, finite=finite)

    @torch.no_grad()
    def step(self, remaining: float) -> None:
        for parameter in self._in_place:
            parameter.grad = None
        for optimizer in self.target.optimizers:
            mine = [p for p in self._opened.values() if self._group_of(p).optimizer is optimizer]
            for some in self._alike(mine):
                self._make_moments(some)
            steps = [optimizer.state[parameter]["step"] for parameter in mine]
            if steps:
                torch._foreach_add_(steps, 1.0)
            counts = dict(zip(map(id, mine), read_scalars(steps), strict=True))
            for bucket in in_buckets(mine, self._most):
                self._step(optimizer, bucket, counts)
            optimizer.step()  # finds no gradient: only its hooks run, and schedulers see a step
        self._opened, self._keys = {}, {}

    def _make_moments(self, some: Sequence[nn.Parameter]) -> None:
        """Make both moments from the sums in the first."""
        group = self._group_of(some[0])
        beta2 = group.options["betas"][1]
        for first, old, second in self._old(some):
            gradient = torch.add(first, old, alpha=-group.decay, out=old)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
            first.mul_(group.share)
        for parameter in some:
            del self._opened[id(parameter)], self._keys[id(parameter)]

    def _step(
        self, optimizer: torch.optim.Optimizer, some: list[nn.Parameter], counts: dict[int, float]
    ) -> None:
        """Step these parameters with their new moments; `counts` are their numbers of updates."""
        by_group: dict[int, list[nn.Parameter]] = {}
        for parameter in some:
            by_group.setdefault(id(self._group_of(parameter)), []).append(parameter)
        for parameters in by_group.values():
            options = self._group_of(parameters[0]).options
            beta1, beta2 = map(float, options["betas"])
            lr, decay = float(options["lr"]), options["weight_decay"]
            steps = [counts[id(parameter)] for parameter in parameters]
            states = [optimizer.state[parameter] for parameter in parameters]
            targets = [as_real(parameter.data) for parameter in parameters]
            if decay:
                torch._foreach_mul_(targets, 1.0 - lr * decay)
            # Multiply above and below by the bias correction of v instead: one pass less.
            roots = [math.sqrt(1.0 - beta2**step) for step in steps]
            below = torch._foreach_sqrt([as_real(state["exp_avg_sq"]) for state in states])
            torch._foreach_add_(below, [options["eps"] * root for root in roots])
            torch._foreach_addcdiv_(
                targets,
                [as_real(state["exp_avg"]) for state in states],
                below,
                [-lr * r / (1.0 - beta1**step) for r, step in zip(roots, steps, strict=True)],
            )

    # State

    def saved(self) -> dict[str, Any]:
        """Return the keys of the old moments, which are themselves in the optimizer's state."""
        keys = [self._keys.get(id(parameter)) for parameter in self.parameters]
        saved = [None if key is None else key.cpu() for key in keys]
        return {"moments": saved}

    def check(self, saved: Any) -> None:
        if not isinstance(saved, dict) or "moments" not in saved:
            raise StateError(
                "the saved window holds gradients, and gradients='moments' keeps none: resume with "
                "the same gradients="
            )

    def load(self, saved: Any) -> None:
        for parameter, key in zip(self.parameters, saved["moments"], strict=True):
            if key is not None:
                self._opened[id(parameter)] = parameter
                self._keys[id(parameter)] = key.to(parameter.device)

    @torch.no_grad()
    def discard(self) -> None:
        for some in self._alike([*self._opened.values()]):  # the window made no update
            for first, old, _ in self._old(some):
                first.copy_(old)
        self._opened, self._keys = {}, {}
        self._in_place = []
        self._waiting, self._waiting_bytes = {}, 0
        super().discard()


def _is_small(parameter: Tensor) -> bool:
    return 0 < parameter.numel() <= _SMALL


def check_moments(target: Target, options: CloseOptions, *, counts_units: bool) -> None:
    """Refuse options that need a whole gradient, with the reason."""
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
        check_adam(optimizer, option, "be added into")
        name = type(optimizer).__name__
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
    for parameter in target.trained():
        if parameter.dtype in SIXTEEN_BIT:
            raise UnsupportedError(
                f"{option} with 16-bit parameters ({target.name_of(parameter)}): their moments are "
                "16-bit too, and lose what is added in small parts; keep the parameters in float32 "
                'and use precision="bf16"'
            )


def check_adam(optimizer: torch.optim.Optimizer, option: str, what: str) -> None:
    """Refuse an optimizer whose moments are not Adam's; `what` gradients would do to them."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UnsupportedError(
            f"{option} with {type(optimizer).__name__}: gradients can {what} the moments of "
            'torch\'s Adam and AdamW only; use one of these, or gradients="host"'
        )


# Adam's state


@dataclass(frozen=True, slots=True)
class _Group:
    """A parameter group of Adam, and the factors of its first moments in a window."""

    optimizer: torch.optim.Optimizer
    options: dict[str, Any]
    decay: float
    """The factor of the old moment in a sum of gradients: β₁ / (1 − β₁)."""
    share: float
    """The factor of the sum in the new moment: 1 − β₁."""

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the parameter's state, which exists already."""
        state: dict[str, Any] = self.optimizer.state[parameter]
        return state


def _groups_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, _Group]:
    """Return the groups by the ids of their parameters."""
    groups: dict[int, _Group] = {}
    for optimizer in optimizers:
        for options in optimizer.param_groups:
            beta1 = float(options["betas"][0])
            if not 0.0 <= beta1 < 1.0:
                raise UnsupportedError(
                    f"betas={options['betas']}: gradients can be added up in Adam's first moment "
                    "if the first of its betas is at least 0 and below 1"
                )
            sign = -1.0 if options["maximize"] else 1.0
            decay, share = sign * beta1 / (1.0 - beta1), sign * (1.0 - beta1)
            group = _Group(optimizer, options, decay, share)
            groups.update((id(parameter), group) for parameter in options["params"])
    return groups


def adam_state_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> dict[str, Any]:
    """Return the parameter's state; if there is none, make it as Adam's own first step would."""
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        fused = group.get("fused")
        wide = torch.get_default_dtype() is torch.float64 and not fused
        made = {
            "step": torch.zeros(
                (),
                dtype=torch.float64 if wide else torch.float32,
                device=parameter.device if fused else torch.device("cpu"),
            )
        }
        names = ["exp_avg", "exp_avg_sq"]
        for name in names + (["max_exp_avg_sq"] if group["amsgrad"] else []):
            made[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            made[name].requires_grad_(False)
        state.update(made)  # all or nothing: memory may run out on the way
    return state
