"""Random numbers that follow their samples: `randn_like`, `rand_like`, `randint_like`.

Diffusion and flow matching draw noise and timesteps in the loss. torch draws them for the batch
that it is given, so every way to split a batch gets other numbers. Within a window of `WholeBatch`,
these functions give each sample its own: they depend on the window's seed, the sample's number in
the global batch, the call and the position within the sample, and on nothing else. Elsewhere they
are torch's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from wholebatch.coupled.per_sample_dropout import PerSample, mixed, sample_bits
from wholebatch.errors import OptionError, UnsupportedError

_BITS = 52  # (2^52 - 1 + 1/2) / 2^52 is still below 1 in float64
_here = threading.local()


def randn_like(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return standard normal noise in the shape of `x`, whose first dimension is the samples.

    >>> randn_like(torch.zeros(4, 3)).shape
    torch.Size([4, 3])

    Args:
        x: A tensor whose first dimension is the samples.
        dtype: The dtype of the result. Default: that of `x`.
    """
    uniform = _uniform(x)
    if uniform is None:
        return torch.randn_like(x, dtype=dtype)
    normal: Tensor = torch.special.ndtri(uniform)
    return normal.to(dtype or x.dtype)


def rand_like(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers uniform in [0, 1) in the shape of `x`, whose first dimension is the samples.

    A mask that drops a tenth is `rand_like(x) < 0.1`.

    Args:
        x: A tensor whose first dimension is the samples.
        dtype: The dtype of the result. Default: that of `x`.
    """
    uniform = _uniform(x)
    if uniform is None:
        return torch.rand_like(x, dtype=dtype)
    made = uniform.to(dtype or x.dtype)
    # Rounding to fewer digits must not reach 1.
    return made.clamp_(max=1 - torch.finfo(made.dtype).eps / 2)


def randint_like(
    x: Tensor, low: int, high: int | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return integers from `low` (0 if left out) up to below `high`, in the shape of `x`.

    >>> randint_like(torch.zeros(4), 1000, dtype=torch.long).shape
    torch.Size([4])

    Args:
        x: A tensor whose first dimension is the samples.
        low: The smallest integer; `high`, if that is left out.
        high: One above the largest integer.
        dtype: The dtype of the result. Default: that of `x`.
    """
    low, high = (0, low) if high is None else (low, high)
    if not low < high:
        raise OptionError(f"randint_like(low={low}, high={high}): low must be below high")
    uniform = _uniform(x)
    if uniform is None:
        return torch.randint_like(x, low, high, dtype=dtype)
    return (uniform * (high - low)).floor().add(low).to(dtype or x.dtype)


def _uniform(x: Tensor) -> Tensor | None:
    """Return numbers in (0, 1) for the samples of this micro-batch; None outside of a window."""
    micro: _Micro | None = getattr(_here, "micro", None)
    if micro is None:
        return None
    micro.window.used = True
    numbers = micro.numbers()
    if numbers is None:
        return None
    if _is_traced(x):
        raise UnsupportedError("wb.randn_like and the like number their samples in Python")
    if torch._C._current_graph_task_id() != -1:
        raise UnsupportedError(
            "wb.randn_like or the like within a checkpointed block, which draws again in the "
            "backward: draw before the block, and give the numbers to it"
        )
    if x.dim() == 0 or not len(numbers) or len(x) % len(numbers):
        raise UnsupportedError(
            f"a draw in the shape {tuple(x.shape)} in a micro-batch of {len(numbers)} samples: "
            "random numbers that follow their samples need the samples as the first dimension"
        )
    bits = sample_bits(torch.tensor(numbers), micro.next_call(), x.shape, x.device)
    return ((bits >> 12).bitwise_and_(2**_BITS - 1).double() + 0.5) * 2.0**-_BITS


def _is_traced(x: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return True
    return get_proxy_mode() is not None


@dataclass
class _Micro:
    """The samples of a micro-batch, and how many draws they have made."""

    window: WindowDraws
    numbers: Callable[[], Sequence[int] | None]
    calls: int = 0

    def next_call(self) -> int:
        self.calls += 1
        return mixed(self.window.seed + self.calls)


class WindowDraws:
    """The seed of a window, and which samples are in which of its micro-batches.

    Nothing is drawn and no rank is asked before a loss is known to use this (`used`, which stays).
    The first window that does so takes the seed that it would have drawn when it began.
    """

    def __init__(self) -> None:
        self.used = False
        self._seed: int | None = None
        self._start: Tensor | None = None
        self._owes = False
        self._ranks = 1

    @property
    def seed(self) -> int:
        """The seed of the window; it is the same on all ranks."""
        if self._seed is None:
            if self._ranks > 1 or self._start is None:
                raise UnsupportedError(
                    "wb.randn_like or the like on several ranks, where no look has shown before "
                    'that the loss draws: pass dropout="per-sample", so that all ranks agree on '
                    "a seed"
                )
            generator = torch.Generator()
            generator.set_state(self._start)
            self._seed = PerSample.draw_seed(generator)
            self._owes = True  # the global generator has not moved
        return self._seed

    def state(self) -> tuple[bool, int | None]:
        """Return what an open window is to go on with."""
        return self.used, self._seed if self._ranks > 1 or not self.used else self.seed

    def begin_window(
        self, seed: int | None, ranks: int = 1, *, start: Tensor | None = None
    ) -> None:
        """Begin a window with this seed, or with one that is taken when it is asked for."""
        self._seed, self._ranks, self._owes = seed, ranks, False
        self._start = torch.get_rng_state() if start is None and seed is None else start

    def end_window(self) -> None:
        """Move the global generator on, if the seed was taken without a draw from it."""
        if self._owes:
            PerSample.draw_seed()
            self._owes = False

    def enter(self, numbers: Callable[[], Sequence[int] | None]) -> None:
        """Begin a micro-batch of these samples on this thread."""
        _here.micro = _Micro(self, numbers)

    def leave(self) -> None:
        """End the micro-batch: draws are torch's own again."""
        _here.micro = None

    @contextmanager
    def micro(self, numbers: Callable[[], Sequence[int] | None]) -> Iterator[None]:
        """Give draws within the numbers of these samples; torch's own, and noted, without any."""
        before = getattr(_here, "micro", None)
        self.enter(numbers)
        try:
            yield
        finally:
            _here.micro = before


@contextmanager
def undivided(numbers: Callable[[], Sequence[int]], start: Tensor) -> Iterator[None]:
    """Draw as a window would that began with the random state `start`, for these samples."""
    draws = WindowDraws()
    draws.begin_window(None, start=start)
    with draws.micro(numbers):
        yield
