"""What Adam accumulation (`gradients="moments"`) cannot be had with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wholebatch.core.close import CloseOptions
from wholebatch.core.precision import SIXTEEN_BIT
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.offload.adam_state import check_adam

if TYPE_CHECKING:
    from wholebatch.core.model_and_optimizer import Target

__all__ = ["check_moments"]


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
    for group_of in target.groups():
        for parameter in group_of:
            if parameter.dtype in SIXTEEN_BIT:
                raise UnsupportedError(
                    f"{option} with 16-bit parameters ({target.name_of(parameter)}): their moments "
                    "are 16-bit too, and lose what is added in small parts; keep the parameters in "
                    'float32 and use precision="bf16"'
                )
