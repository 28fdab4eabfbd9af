"""Random numbers that follow their samples: dropout, `randn_like`, `rand_like`, `randint_like`.

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
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch.errors import OptionError, UnsupportedError, WindowError
from wholebatch.window.forward_state import capture_python_random, same_random

_aten = torch.ops.aten
_MASK_BITS = 24
_CHANCES = ("dropout_p", "dropout", "p")
_Shapes = dict[int, tuple[int, tuple[int, ...]]]
"""By dropout call: the number of samples of a micro-batch, and the shape of the input."""


@final
class PerSample:
    """Dropout that does not depend on how a batch is split, one window at a time.

    Every mask depends only on a seed, the dropout call, the sample and the position within the
    sample. So the update is the same for any micro-batch size, in any order of the samples, and
    with or without trimmed padding. The masks are not those that PyTorch would draw.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self._shapes: _Shapes = {}

    @staticmethod
    def draw_seed(generator: torch.Generator | None = None) -> int:
        """Draw a seed for a window, by default from the global generator; a float64 holds it."""
        empty = torch.empty((), dtype=torch.int64, device="cpu")
        return int(empty.random_(2**53, generator=generator).item())

    def begin_window(self, seed: int | None = None) -> None:
        """Begin a window, whose micro-batches share the seed; draw one if none is given."""
        self.seed = self.draw_seed() if seed is None else seed
        self._shapes = {}

    @contextmanager
    def micro(self, samples: Sequence[int] | Tensor) -> Iterator[None]:
        """Use per-sample masks in the forward and backward of a micro-batch.

        `samples` are the indices of its samples in the whole batch. Inputs of dropout must have the
        samples as their first dimension, or samples × heads as in PyTorch's attention.
        """
        if self.seed is None:
            raise WindowError("PerSample.micro before begin_window: the window has no seed yet")
        # The identity of a dropout call is drawn from the global generator. A checkpointed block
        # restores the generator's state, so it gets the same masks when it is recomputed.
        before = torch.get_rng_state()
        host = capture_python_random()
        torch.default_generator.manual_seed(self.seed)
        try:
            with _Masks(torch.as_tensor(samples, dtype=torch.int64), self._shapes):
                yield
            now = capture_python_random()
            for name, state in host.items():
                if not same_random(state, now[name]):
                    raise UnsupportedError(
                        f'dropout="per-sample": the forward draws random numbers by {name}, once '
                        'per micro-batch, and they cannot follow the samples; use dropout="fresh"'
                    )
        finally:
            torch.set_rng_state(before)


def check_dropout(choice: str, model: nn.Module) -> PerSample | None:
    """Return the `PerSample` that `dropout=` asks for, or None; refuse unsupported layers."""
    if choice not in ("fresh", "per-sample"):
        raise OptionError(f'dropout={choice!r}: must be "fresh" or "per-sample"')
    if choice == "fresh":
        return None
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            why = "drops between its layers with time as the first dimension"
        elif (
            isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
            and not module.self_attn.batch_first
            and any(isinstance(part, nn.Dropout) and part.p for part in module.modules())
        ):
            why = "is built with batch_first=False, so time is its first dimension"
        else:
            continue
        raise UnsupportedError(
            f'dropout="per-sample": {name or "the model"} ({type(module).__name__}) {why}, and '
            'masks that follow their samples need the samples there; use dropout="fresh"'
        )
    return PerSample()


class _Masks(TorchDispatchMode):
    """A dispatch mode that replaces dropout masks and refuses other random operations."""

    def __init__(self, samples: Tensor, shapes: _Shapes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples = samples
        self._shapes = shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        if func is _aten.bernoulli_.float:
            chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return args[0].copy_(self._keep(args[0], chance))
        fused = fused_dropout(func, args, kwargs)
        if fused == 0.0:
            return func(*args, **kwargs)
        if fused is not None:
            raise UnsupportedError(
                f"{func}: the masks of fused attention cannot be made per sample; use "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or no dropout in attention"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedError(
                f'{func}: dropout="per-sample" knows dropout only, and this draws other random '
                'numbers in the forward; use dropout="fresh"'
            )
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
        if train is False:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        keep = self._keep(x, 1.0 - p)
        return x * keep * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), keep

    def _keep(self, x: Tensor, chance: float) -> Tensor:
        """Return the mask of kept values: a hash of the seed and call, sample and position."""
        count = len(self._samples)
        if x.dim() == 0 or not count or x.shape[0] % count:
            raise UnsupportedError(
                f"dropout on a tensor of shape {tuple(x.shape)} in a micro-batch of {count} "
                'samples: dropout="per-sample" needs the samples as its first dimension'
            )
        call = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        self._check(call, count, tuple(x.shape))
        bits = sample_bits(self._samples, call, x.shape, x.device)
        keep: Tensor = bits.bitwise_and_(2**_MASK_BITS - 1) < round(chance * 2**_MASK_BITS)
        return keep

    def _check(self, call: int, count: int, shape: tuple[int, ...]) -> None:
        """Refuse samples in dimension 1; this shows in micro-batches of different sizes."""
        other, before = self._shapes.setdefault(call, (count, shape))
        if other == count or len(shape) < 2 or len(before) < 2 or shape[0] != before[0]:
            return
        if shape[1] * other == before[1] * count:
            raise UnsupportedError(
                f"dropout on a tensor of shape {before} in a micro-batch of {other} samples and"
                f" {shape} in one of {count}: the samples are its second dimension, and "
                'dropout="per-sample" needs them as its first'
            )


def sample_bits(samples: Tensor, call: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return 64 random bits for each place: a hash of the call, the sample and the position.

    The first dimension of `shape` is the samples, or a multiple of them.
    """
    bits = _mix(samples.to(device, non_blocking=True) + call)
    # Hash one coordinate after the other, so that longer padding does not change the rest.
    for size in (shape[0] // len(samples), *shape[1:]):
        bits = _mix(bits[..., None] + torch.arange(1, size + 1, device=device) * _GOLDEN)
    return bits.view(shape)


def mixed(number: int) -> int:
    """Return SplitMix64's hash of a number, as a signed 64-bit integer."""
    return int(_mix(torch.tensor(signed(number * 0x9E3779B97F4A7C15 % 2**64))).item())


def signed(value: int) -> int:
    """Return a number that is given as 64 bits without a sign."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = signed(0x9E3779B97F4A7C15)


def _mix(z: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer in place; a mask makes the shifts logical."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z.bitwise_xor_((z >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(signed(factor))
    return z.bitwise_xor_((z >> 31).bitwise_and_(2**33 - 1))


def fused_dropout(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """Return the dropout of a kernel that draws its masks by itself; None for other operations."""
    if not ("attention" in func._schema.name or "rnn" in func._schema.name):
        return None
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in _CHANCES and str(argument.type) == "float":
            default = argument.default_value if argument.has_default_value() else 0.0
            value = args[place] if place < len(args) else kwargs.get(argument.name, default)
            return float(value or 0.0)
    return None


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
    micro.calls += 1
    call = mixed(micro.window.seed + micro.calls)
    bits = sample_bits(torch.tensor(numbers), call, x.shape, x.device)
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
                    "wb.randn_like and others on several ranks, in a loss not seen to draw numbers "
                    'before: pass dropout="per-sample", so that all ranks agree on a seed'
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
