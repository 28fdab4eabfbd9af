"""The losses of a mixture of experts over the whole batch: load balance, and router z-loss.

The load-balancing loss of E experts is a product of two means over all tokens,

    balance = E · Σ_e f_e · P_e,   f_e = tokens sent to e / tokens,   P_e = mean probability of e,

so no sum of losses of micro-batches gives it. But the tokens sent to e, and the sums of e's
probabilities, do add up. `moe_loss` hands those sums to the two passes of `Coupled`: the gradient
is that of the whole batch, over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wholebatch.errors import LossError, OptionError
from wholebatch.losses.causal_lm import causal_lm
from wholebatch.losses.coupled import Coupled
from wholebatch.losses.loss import Loss, Term, Terms, as_loss, terms_of

Routers: TypeAlias = Sequence[Tensor]
"""For each layer, the router's logits (tokens, experts)."""
Sums: TypeAlias = dict[str, Tensor]


def moe_loss(
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    balance: float | None = None,
    z: float = 0.0,
    top_k: int | None = None,
    keep: int = 1,
) -> Coupled:
    """Return a loss of the whole batch: `loss`, `balance` × load balance and `z` × router z-loss.

    With a Hugging Face model in training with `output_router_logits=True`, `loss(model, micro)` is
    any loss without its balance term; logits and mask are read from the model's output, and
    `balance` and `top_k` from the model. For another model, `loss` returns `(loss, routers)` or
    `(loss, routers, mask)`: `routers` holds the logits (tokens, experts) of each layer; `mask` is 0
    for tokens that do not count. The means are over the tokens of all layers, as in Transformers.

    Args:
        loss: The loss of the model without its balance term. Default: `wb.causal_lm`.
        balance: Weight of the load-balancing loss. Default: the model's own.
        z: Weight of the router z-loss, the mean of logsumexp(logits)².
        top_k: Experts per token. Default: the model's own.
        keep: As for `wb.Coupled`: graphs of the first pass that need no second one.
    """
    if top_k is not None and top_k < 1:
        raise OptionError(f"top_k={top_k}: must be a positive number of experts, or None")
    mixture = _Mixture(loss or causal_lm, balance, z, top_k)
    return Coupled(mixture.encode, mixture.whole, keep=keep, addends=mixture.addends)


@dataclass
class _Mixture:
    loss: Callable[[Any, Any], Any]
    balance: float | None
    z: float
    top_k: int | None
    _weights: dict[str, float] = field(default_factory=dict)
    """Of each term, as the last micro-batch had it."""

    def _parts(self, model: Any, micro: Any) -> tuple[Mapping[str, Term], Sums]:
        """Return the terms of the loss itself, and the sums over this micro-batch's tokens."""
        with recorded_routing(model) as routing:
            result = self.loss(model, micro)
        if isinstance(result, tuple):
            result, routers, mask = (*result, None)[:3]
        else:
            routers, mask = routing.get("logits"), routing.get("mask")
        if not routers:
            raise LossError(
                "wb.moe_loss found no router logits: a Hugging Face model needs "
                "config.output_router_logits=True; for another model, let loss(model, micro) "
                "return (loss, router logits of each layer)"
            )
        top_k = self.top_k or int(_setting(model, None, "top_k", ("num_experts_per_tok",)))
        by_name = terms_of(as_loss(result))
        self._weights = {name: term.weight for name, term in by_name.items()}
        self._weights["balance"] = _setting(model, self.balance, "balance", _COEFFICIENTS)
        return by_name, routing_sums(routers, top_k, mask, z=self.z != 0.0)

    def addends(self, model: Any, micro: Any) -> Terms:
        """Return what must add up over micro-batches, as terms, for the test of the loss."""
        by_name, sums = self._parts(model, micro)
        rows = sums["probability"]
        weights = torch.arange(rows.numel(), device=rows.device).cos().view_as(rows).to(rows.dtype)
        terms = {name: (term.total, term.units, term.weight) for name, term in by_name.items()}
        terms["router"] = ((rows * weights).sum(), sums["tokens"].sum(), 1.0)
        return Loss.terms(terms)

    def encode(self, model: Any, micro: Any) -> dict[str, Any]:
        """Return the sums of a micro-batch, each as one row."""
        by_name, sums = self._parts(model, micro)
        rows = sums["probability"]
        return {
            "terms": {
                name: (term.total[None], torch.as_tensor(term.units, device=rows.device)[None])
                for name, term in by_name.items()
            },
            **{name: value[None] for name, value in sums.items()},
        }

    def whole(self, all: dict[str, Any]) -> Terms:
        """Return the loss of the whole batch from the sums of all micro-batches and ranks."""
        sums = {name: all[name].sum(0) for name in ("probability", "assigned", "tokens")}
        terms: dict[str, tuple[Any, ...]] = {
            name: (total.sum(), units.detach().sum(), self._weights[name])
            for name, (total, units) in all["terms"].items()
        }
        terms["balance"] = (balance_of(sums), 1, self._weights["balance"])
        if self.z:
            layers = len(sums["probability"])
            terms["z"] = (all["z"].sum(), sums["tokens"] * layers, self.z)
        return Loss.terms(terms)


def routing_sums(routers: Routers, top_k: int, mask: Tensor | None, *, z: bool = False) -> Sums:
    """Return the sums over tokens by layer and expert, in float32 or better.

    "probability" and "assigned" (tokens sent to each expert) are (layers, experts), "tokens" is
    how many tokens count.
    """
    logits = torch.stack([router.to(routers[0].device) for router in routers])
    probability = logits.softmax(-1)
    chosen = probability.topk(top_k, dim=-1).indices
    layers, tokens, experts = probability.shape
    kept = torch.ones(tokens, dtype=torch.bool, device=probability.device)
    if mask is not None:
        if mask.numel() != tokens:
            raise LossError(
                f"a mask of {mask.numel()} tokens for router logits of {tokens}: must have one "
                "value for each token that the router sees"
            )
        kept = mask.reshape(-1).to(kept.device) != 0
    wide = probability.dtype if probability.dtype is torch.float64 else torch.float32
    sent = kept.to(torch.int64)[None, :, None].expand_as(chosen).flatten(1)
    nobody = sent.new_zeros(layers, experts)
    sums = {
        "probability": (probability.to(wide) * kept[:, None]).sum(1),
        "assigned": nobody.scatter_add(1, chosen.flatten(1), sent),
        "tokens": kept.sum(),
    }
    if z:
        sums["z"] = (logits.to(wide).logsumexp(-1).square() * kept).sum()
    return sums


def balance_of(sums: Mapping[str, Tensor]) -> Tensor:
    """Return the load-balancing loss of these sums, over the tokens of all layers."""
    layers = len(sums["probability"])
    probability = sums["probability"].sum(0)
    assigned = sums["assigned"].sum(0).to(probability.dtype)
    tokens = sums["tokens"].to(probability.dtype).clamp(min=1) * layers
    return (assigned / tokens * (probability / tokens)).sum() * probability.shape[-1]


@contextmanager
def recorded_routing(model: Any) -> Iterator[dict[str, Any]]:
    """Record the router logits and the mask of a Hugging Face model's last forward within."""
    routing: dict[str, Any] = {}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if (logits := getattr(output, "router_logits", None)) is not None:
            second = args[1] if len(args) > 1 else None
            routing.update(logits=tuple(logits), mask=kwargs.get("attention_mask", second))

    inner = getattr(model, "module", model)
    modules = {
        id(module): module for module in (inner, getattr(inner, "base_model", None))
    }.values()
    with ExitStack() as hooks:
        for module in modules:
            if isinstance(module, nn.Module):
                hooks.enter_context(module.register_forward_hook(record, with_kwargs=True))
        yield routing


_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


def _setting(model: Any, option_value: float | None, option: str, names: Sequence[str]) -> float:
    """Return the option as given, or what the model or its configuration has by these names."""
    if option_value is not None:
        return option_value
    inner = getattr(model, "module", model)
    config = getattr(inner, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    for place in (inner, text):
        for name in names:
            if isinstance(value := getattr(place, name, None), int | float):
                return value
    raise OptionError(
        f"wb.moe_loss({option}=None): {type(inner).__name__} has no {' or '.join(names)}; pass "
        f"{option}="
    )
