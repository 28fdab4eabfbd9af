"""Option objects that group options of `WholeBatch` and `Accumulator`.

Each has good defaults, and most have a short form: `memory="20GiB"`, `micro_batch=8`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import torch

from wholebatch.batch import Tokens
from wholebatch.batch.micro_batches import check_micro_batch
from wholebatch.batch.samples import Static, check_layout
from wholebatch.errors import OptionError
from wholebatch.window.close import OnGradient
from wholebatch.window.close_options import ClipNorm, CloseOptions, Policy
from wholebatch.window.model_and_optimizer import Ema

BatchNormPolicy: TypeAlias = Literal["exact", "freeze", "allow", "refuse"]
SyncMode: TypeAlias = Literal["auto", "hold", "every", "gathered", "none"]


@dataclass(frozen=True)
class Close:
    """Options for the end of a window: reduce over ranks, clip, check, step.

    `wb.WholeBatch(..., close=wb.Close(nonfinite="skip"))` skips windows with inf or nan.

    Args:
        clip_value: Clamp every number of the gradient. Clipping by norm is `clip_norm=` of
            `WholeBatch` and `Accumulator`.
        on_gradient: A function that gets (name, parameter) pairs whose `.grad` is the whole
            gradient, before clipping. It may change the gradients in place.
        nonfinite: "raise" an error on a gradient that is not finite, or "skip" and count its
            window.
        zero_units: The same for a window without units.
        scaler: Your own GradScaler.
        ema: An object with `update_parameters(model)`, called once per update.
        on_open: A function without arguments, called once per window before its first forward: it
            may write into the weights or set the rate. With `Accumulator` it needs `over`,
            `window` or `run`, since a plain loop calls the model itself.
        sync: "hold" reduces gradients once per window, "every" in each backward. "gathered" (FSDP2)
            also gathers the parameters once per window. "auto" is what the engine needs; for FSDP2
            in WholeBatch the first of "gathered", "hold" and "every" for which there is room.
            "none" trains a plain model separately on each rank.
    """

    clip_value: float | None = None
    on_gradient: OnGradient | None = None
    nonfinite: Policy = "raise"
    zero_units: Policy = "raise"
    scaler: torch.amp.GradScaler | None = None
    ema: Ema | None = None
    on_open: Callable[[], object] | None = None
    sync: SyncMode = "auto"


P = ParamSpec("P")
R = TypeVar("R")


def known_options(**elsewhere: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a constructor, or a function whose first argument is none of its options.

    An option that it does not have is answered with what was meant.

    `elsewhere` says of options of other entry points what to do instead.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        names = [*signature(function).parameters][1:]
        is_constructor = function.__name__ == "__init__"

        @wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            for name, value in options.items():
                if name in names:
                    continue
                close = get_close_matches(name, names, n=1)
                meant = f"did you mean {close[0]}=?" if close else f"the options are {names}"
                whose = type(args[0]).__name__ if is_constructor else function.__name__
                begin = f"{whose}({name}={repr(value)[:40]})"
                answer = elsewhere.get(name, f"no such option: {meant}")
                if "close" in names and name in Close.__dataclass_fields__:
                    answer = f"an option of the end of a window: close=wb.Close({name}=...)"
                raise OptionError(f"{begin}: {answer}")
            return function(*args, **options)

        return checked

    return decorated


Close.__init__ = known_options()(Close.__init__)  # type: ignore[method-assign]


def as_close(close: object) -> Close:
    """Return the option, or raise an OptionError that says what is allowed."""
    if close is None:
        return Close()
    if not isinstance(close, Close):
        raise OptionError(f"close={close!r}: must be wb.Close(...)")
    return close


def close_with_only(close: object, *names: str, where: str) -> Close:
    """Return the option, or raise an OptionError if other fields than these are given."""
    close = as_close(close)
    options = {each.name for each in fields(close) if getattr(close, each.name) != each.default}
    refused = options - set(names)
    if refused:
        raise OptionError(
            f"wb.Close({', '.join(f'{name}=' for name in sorted(refused))}) {where}: it takes "
            f"{' and '.join(f'{name}=' for name in names)} only"
        )
    return close


def close_options(close: Close, clip_norm: ClipNorm) -> CloseOptions:
    """Return the options that the close itself needs."""
    return CloseOptions(clip_norm, close.clip_value, close.nonfinite, close.zero_units)


@dataclass(frozen=True)
class Memory:
    """Memory options: the budget on the device, and the place of the optimizer's state.

    Args:
        budget: A size ("20GiB" or a number of bytes), a fraction of the device, or "free".
        optimizer_state: Where the optimizer's state is between steps: "device", or "host" for
            pinned host memory.
    """

    budget: int | float | str | None = None
    optimizer_state: Literal["device", "host"] = "device"


def as_memory(memory: Memory | int | float | str | None) -> Memory:
    """Return the option; a budget alone is the short form."""
    return memory if isinstance(memory, Memory) else Memory(memory)


def without_budget(memory: Memory | None) -> Memory:
    """Return the option for an entry point that does not run the forward pass."""
    if memory is None:
        return Memory()
    if not isinstance(memory, Memory) or memory.budget is not None:
        raise OptionError(
            f"memory={memory!r}: Accumulator does not run the forward pass, so it cannot keep a "
            "budget; give wb.Memory(optimizer_state=...), or use WholeBatch"
        )
    return memory


@dataclass(frozen=True)
class Samples:
    """A micro-batch size, and how a batch is read; made by `samples`."""

    micro_batch: int | Tokens | Literal["auto"] = "auto"
    batch_size: int | Callable[[Any], int] | None = None
    static: Static = ()

    @staticmethod
    def of(micro_batch: Any) -> Samples:
        """Return the option; a number, "auto" or `wb.tokens(...)` alone is the short form."""
        if isinstance(micro_batch, Samples):
            return micro_batch
        return Samples(check_micro_batch(micro_batch))


def samples(
    micro_batch: int | Tokens | Literal["auto"] = "auto",
    *,
    batch_size: int | Callable[[Any], int] | None = None,
    static: str | Sequence[str] = (),
) -> Samples:
    """Return a value for `micro_batch=` that also says how to read a batch.

    It is needed only for batches whose samples are not obvious.

    >>> samples(8, static="class_weights").micro_batch
    8

    Args:
        micro_batch: Samples per micro-batch, `wb.tokens(...)` or "auto".
        batch_size: The number of samples of a batch, or a function that returns it.
        static: Names of leaves that are passed on whole instead of split.
    """
    check_layout(batch_size, static)
    return Samples(check_micro_batch(micro_batch), batch_size, static)
