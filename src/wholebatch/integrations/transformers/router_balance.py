"""The load-balancing loss that a mixture of experts adds to the Trainer's loss, over the window.

A model with `output_router_logits=True` adds `coefficient × balance` of the batch that it is given
to its loss. `balanced` takes that out again (the same tensor, so exactly) and puts the balance of
the whole window, over all ranks, in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from wholebatch.coupled import Coupled
from wholebatch.coupled.moe import (
    RecordedRouting,
    balance_of,
    moe_loss,
    recorded_routing,
    routing_sums,
)
from wholebatch.errors import UnsupportedError
from wholebatch.losses.loss import Loss
from wholebatch.window.forward_state import attributes_restored


def balanced(trainer: Any, as_loss: Callable[..., Loss]) -> Coupled | None:
    """Return the trainer's loss with the window's balance; None where no balance loss is on.

    `as_loss(model, inputs, change=)` returns the trainer's loss as a sum over units, after
    `change(mean)`.
    """
    balance = _balance_in_loss(trainer)
    if balance is None:
        return None

    def loss(given: Any, inputs: Any) -> tuple[Loss, Any, Tensor | None]:
        # A first pass must leave no metrics behind: the second one makes them again.
        again = nullcontext() if torch.is_grad_enabled() else attributes_restored(trainer)
        with again, recorded_routing(given) as seen:
            made = as_loss(given, inputs, change=lambda mean: balance.taken_out(mean, seen))
        return made, seen.router_logits, seen.attention_mask

    return moe_loss(loss, balance=balance.coefficient(), top_k=balance.top_k)


def refuse_balance(trainer: Any, why: str) -> None:
    """Refuse a balance loss where the Trainer itself makes the forwards and backwards."""
    if _balance_in_loss(trainer) is not None:
        raise UnsupportedError(
            "a mixture of experts whose loss has the balance of each batch in it, and micro-steps "
            f"by the Trainer itself ({why}): the balance of the whole window needs two passes, on "
            "a plain model or DDP; use those, or set router_aux_loss_coef=0 (audit=False: accept "
            "the balance of each batch)"
        )


def _balance_in_loss(trainer: Any) -> _Balance | None:
    """Return the balance term of the model's loss; None where there is none."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = model.config.get_text_config() if hasattr(model, "config") else None
    on = getattr(config, "output_router_logits", False) or getattr(
        trainer, "aux_loss_enabled", False
    )
    top_k = getattr(model, "num_experts_per_tok", getattr(config, "num_experts_per_tok", None))
    if not on or top_k is None or getattr(config, "is_encoder_decoder", False):
        return None
    balance = _Balance(trainer, model, config, top_k)
    return balance if balance.coefficient() else None


class _Balance:
    """The balance term of the model's own loss, checked once to be the one that is known."""

    def __init__(self, trainer: Any, model: Any, config: Any, top_k: int) -> None:
        self._trainer, self._model, self._config, self.top_k = trainer, model, config, top_k
        self._checked = False
        self._begun_with = self.coefficient()

    def coefficient(self) -> float:
        for owner in (self._trainer, self._model, self._config):
            for name in ("router_aux_loss_coef", "aux_loss_coef"):
                if isinstance(found := getattr(owner, name, None), int | float):
                    return float(found)
        return 0.0

    def taken_out(self, mean: Tensor, seen: RecordedRouting) -> Tensor:
        """Return the trainer's mean loss of a batch without the balance of that batch."""
        if seen.aux_loss is None or not seen.router_logits:
            raise UnsupportedError(
                f"{type(self._model).__name__} adds a balance loss of each batch to its loss, but "
                "does not return aux_loss and router_logits: pass exact(Trainer, "
                "loss=wb.moe_loss(...)), or turn it off (output_router_logits=False)"
            )
        if self.coefficient() != self._begun_with:
            raise UnsupportedError(
                f"router_aux_loss_coef has changed from {self._begun_with} to "
                f"{self.coefficient()}: the balance of a window has the coefficient that training "
                "began with"
            )
        if not self._checked and mean.requires_grad:
            self._check(mean, seen.aux_loss, seen)
            self._checked = True
        return mean - self._begun_with * seen.aux_loss.to(mean.device)

    def _check(self, mean: Tensor, own: Tensor, seen: RecordedRouting) -> None:
        """Refuse a balance loss of another form, or one that enters the loss in another way."""
        if not own.requires_grad:
            raise UnsupportedError(
                "the balance loss has no gradient: router logits recorded under reentrant "
                "checkpointing are cut off; pass gradient_checkpointing_kwargs="
                '{"use_reentrant": False}'
            )
        with torch.no_grad():
            sums = routing_sums(seen.router_logits, self.top_k, seen.attention_mask)
            found = float((balance_of(sums) - own).abs() / own.abs())
        (slope,) = torch.autograd.grad(mean, own, retain_graph=True, allow_unused=True)
        weight = 0.0 if slope is None else float(slope)
        if found > 1e-3 or abs(weight - self._begun_with) > 1e-3 * abs(self._begun_with):
            raise UnsupportedError(
                f"the balance loss of {type(self._model).__name__} is {float(own):g} with a "
                f"weight of {weight:g} in the loss; experts × Σ (share × mean probability) with "
                f"router_aux_loss_coef={self._begun_with:g} was expected: pass exact(Trainer, "
                "loss=wb.moe_loss(...))"
            )
