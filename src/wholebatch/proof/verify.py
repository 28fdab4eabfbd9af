"""`verify`: the undivided batch beside its accumulation, from the same start."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.close import ClipNorm
from wholebatch.errors import OptionError, UnsupportedError, WholebatchError
from wholebatch.proof.bench import Bench, permuted, wide_batch
from wholebatch.proof.chance import SILENCES, dropouts
from wholebatch.proof.compare import Comparison, Vectors, compare, distance, roundoff
from wholebatch.proof.diagnose import Evidence, diagnose
from wholebatch.proof.observe import Run
from wholebatch.proof.reference import Numbers, ranks, sharded
from wholebatch.proof.verdict import Cause, Verdict, said
from wholebatch.splitting import Tokens, batch_size_of, drop_samples, split

__all__ = ["verify"]

AS_FAR_AS_FLOAT64_ALLOWS = 1.25
"""In 16 bits accumulation may be so many times as far from float64 as the undivided batch is."""


def verify(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    micro_batch: int | Tokens | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    clip_norm: ClipNorm = None,
    clip_value: float | None = None,
    batchnorm: str = "exact",
    float64: bool = True,
    **options: Any,
) -> Verdict:
    """Whether `WholeBatch` makes the update of the undivided batch, on this model and batch.

    >>> import torch, wholebatch as wb
    >>> model = torch.nn.Linear(3, 2)
    >>> def loss(model, micro):
    ...     return wb.cross_entropy(model(micro["x"]), micro["y"])
    >>> batch = {"x": torch.randn(10, 3), "y": torch.randint(0, 2, (10,))}
    >>> verdict = wb.verify(model, loss, batch, micro_batch=4)
    >>> verdict.same, verdict.micro_batches
    (True, 3)

    The undivided batch is run by plain torch, the accumulated window by `WholeBatch` with the
    same options (`**options`: any that it has); both from the same weights, optimizer state and
    random numbers. What the optimizer saw and what it did are compared, for each parameter and in
    all, against the measured rounding of the undivided batch itself. Model, optimizer and random
    generators are afterwards as they were. `print(verdict)` tells the causes when it differs.

    `micro_batch=None` divides by about four, unevenly. `float64=False` leaves out the runs on a
    copy of the model in float64. `scheduler=` and `ema=` move nothing before the update and are
    left out. Where the undivided batch does not fit in memory, the largest part that does is
    taken, and the verdict says so.
    """
    began = time.perf_counter()
    for left_out in ("scheduler", "ema"):
        options.pop(left_out, None)
    precision = "full" if precision == "fp32" else precision
    if optimizer is None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise UnsupportedError("every parameter of the model is frozen: nothing to verify")
        optimizer = torch.optim.SGD(trained, lr=0.1)
    static = tuple(options.get("static", ()))
    bench = Bench(
        model,
        optimizer,
        loss,
        numbers=Numbers(precision),
        clip_norm=clip_norm,
        clip_value=clip_value,
        batchnorm=batchnorm,
        options=options,
    )
    try:
        return _Proof(bench, batch, micro_batch, static, wanted_float64=float64).verdict(began)
    finally:
        bench.start.leave()


@dataclass
class _Proof:
    bench: Bench
    batch: Any
    micro_batch: Any
    static: tuple[str, ...]
    wanted_float64: bool
    notes: list[str] = field(default_factory=list)

    def verdict(self, began: float) -> Verdict:
        bench = self.bench
        of_samples = batch_size_of(self.batch, static=self.static)
        self._divide(of_samples)
        randomness = self._silence()
        whole = self._largest_that_fits(of_samples)
        samples = batch_size_of(self.batch, static=self.static)
        if bench.numbers.precision == "fp16":
            bench.find_loss_scale(self.batch, self.micro_batch)
            whole = bench.whole(self.batch)
        again = bench.whole(self.batch)
        others = [bench.whole(self._permuted(self.batch, order)) for order in _orders(samples)]
        ours = bench.accumulated(self.batch, self.micro_batch)
        state = {name: buffer.detach().clone() for name, buffer in bench.model.named_buffers()}

        wide = self._in_float64(ours) if self.wanted_float64 else None
        gradient = self._gradient(ours, whole, [again, *others], wide)
        update = self._update(ours, whole, [again, *others], gradient)
        to_float64 = None
        same = gradient.same and update.same and not randomness
        if wide is not None:
            same = same and wide.comparison.same
            if wide.reference is not None:
                to_float64 = self._to_float64(ours, [whole, *others], wide.reference)
                if bench.numbers.precision != "full":
                    limit = AS_FAR_AS_FLOAT64_ALLOWS * to_float64[0]
                    same = same and (to_float64[1] <= limit or gradient.distance <= gradient.floor)
        evidence = Evidence(
            bench=bench,
            batch=self.batch,
            micro_batch=self.micro_batch,
            static=self.static,
            whole=whole,
            again=again,
            permuted=others,
            gradient=gradient,
            update=update,
            float64=None if wide is None else wide.comparison,
            state=state,
        )
        causes: list[Cause] = [*randomness]
        if not same:
            causes += diagnose(evidence)
        else:
            self.notes += evidence.what_moved_otherwise()
        return Verdict(
            same=same,
            gradient=gradient,
            update=update,
            float64=None if wide is None else wide.comparison,
            to_float64=to_float64,
            losses=(_number(whole.loss), _number(ours.loss)),
            samples=samples,
            of_samples=of_samples,
            micro_batches=len(split(self.batch, self.micro_batch, static=self.static)),
            precision=bench.numbers.precision,
            device=str(bench.parameters[0].device),
            ranks=ranks(),
            causes=tuple(causes),
            notes=tuple(self.notes),
            seconds=time.perf_counter() - began,
        )

    # ------------------------------------------------------------ what is run

    def _divide(self, samples: int) -> None:
        if samples < 2:
            raise OptionError("a batch of one sample: there is nothing to divide")
        if self.micro_batch is None or self.micro_batch == "auto":
            self.micro_batch = _uneven(samples)
        if isinstance(self.micro_batch, int) and self.micro_batch >= samples:
            raise OptionError(
                f"micro_batch={self.micro_batch}: is the whole batch of {samples} samples, so "
                "nothing is divided and nothing proven; give fewer"
            )

    def _silence(self) -> list[Cause]:
        """Switch randomness off as gently as it goes; what remains is a cause of difference."""
        bench = self.bench
        few = drop_samples(
            self.batch, min(4, batch_size_of(self.batch, static=self.static)), static=self.static
        )
        if not bench.draws_random_numbers(few):
            return []
        names = dropouts(bench.model)
        for silence in SILENCES:
            bench.silences.append(silence)
            if not bench.draws_random_numbers(few):
                where = f"dropout in {', '.join(names[:4])}" if names else "functional dropout"
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                self.notes.append(
                    f"{where}{more} is off in this proof: it draws other masks for the whole "
                    "batch than for its micro-batches, and rightly so"
                )
                return []
        bench.silences.clear()
        return [
            Cause(
                "randomness",
                (),
                "the forward draws random numbers that no module's mode switches off, so two runs "
                "on differently divided batches cannot agree",
                "make them a function of the sample (augment in the dataset), or verify without",
            )
        ]

    def _largest_that_fits(self, samples: int) -> Run:
        """The undivided batch, or the largest part of it whose undivided update fits."""
        fits, fails, run = 0, samples + 1, None
        size = samples
        whole_batch = self.batch
        while True:
            part = drop_samples(whole_batch, size, static=self.static)
            try:
                run = self.bench.whole(part)
                fits, self.batch = size, part
            except torch.OutOfMemoryError:
                if ranks() > 1 or size == 1:
                    raise  # several ranks cannot agree on less from inside a failure
                fails = size
                self.bench.begin()
                _free()
            if run is None:
                size = math.ceil(size / 2)
                continue
            # Come within an eighth of the largest; the gradient does not get truer beyond.
            if fits == samples or fails - fits <= max(1, fits // 8):
                break
            size = (fits + fails) // 2
        if fits < samples:
            if isinstance(self.micro_batch, int) and self.micro_batch >= fits:
                self.micro_batch = _uneven(fits)
            self.notes.append(
                f"the undivided batch of {samples} samples does not fit in memory: this is proven "
                f"on {fits}, the largest part that was found to fit"
            )
            run = self.bench.whole(self.batch)
        assert run is not None
        return run

    def _permuted(self, batch: Any, order: Sequence[int]) -> Any:
        return permuted(batch, order, static=self.static)

    def _in_float64(self, ours: Run) -> _Wide | None:
        """All again in float64, on as many samples as fit."""
        bench = self.bench
        why = None
        if sharded(bench.model) or ranks() > 1:
            why = "a model on several ranks is not copied"
        elif bench.numbers.precision == "full" and bench.numbers.unit(bench.model) <= roundoff(
            torch.float64
        ):
            return None  # it is float64 already
        if why is None:
            try:
                return self._float64_runs()
            except torch.OutOfMemoryError:
                why = "there is not enough memory"
            except WholebatchError:
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            finally:
                _free()
        self.notes.append(f"not run in float64: {why}")
        return None

    def _float64_runs(self) -> _Wide:
        wide = self.bench.in_float64()
        wide.silences = self.bench.silences
        batch, micro_batch = wide_batch(self.batch), self.micro_batch
        samples = size = batch_size_of(batch, static=self.static)
        while True:
            try:
                part = drop_samples(batch, size, static=self.static)
                whole = wide.whole(part)
                break
            except torch.OutOfMemoryError:
                if size <= 2:
                    raise
                size = math.ceil(size / 2)
                wide.begin()
                _free()
        if size < samples and isinstance(micro_batch, int) and micro_batch >= size:
            micro_batch = _uneven(size)
        ours = wide.accumulated(part, micro_batch)
        others = [wide.whole(self._permuted(part, order)) for order in _orders(size)]
        comparison = _gradients("gradient in float64", wide, ours, whole, others, ())
        if size < samples:
            self.notes.append(f"in float64 on {size} of {samples} samples: more do not fit")
        return _Wide(comparison, whole.gradients if size == samples else None)

    # -------------------------------------------------------- what is compared

    def _gradient(
        self, ours: Run, whole: Run, others: Sequence[Run], wide: _Wide | None
    ) -> Comparison:
        reference = () if wide is None or wide.reference is None else (wide.reference,)
        return _gradients("gradient", self.bench, ours, whole, others, reference)

    def _update(
        self, ours: Run, whole: Run, others: Sequence[Run], gradient: Comparison
    ) -> Comparison:
        bench = self.bench
        # An update is added to the parameter: what the sum rounds away cannot be seen.
        resolution = [
            math.hypot(
                roundoff(p.dtype) * _norm(bench.start.before(p)), gradient.floor * _norm(moved)
            )
            for p, moved in zip(bench.parameters, whole.update, strict=True)
        ]
        found = compare(
            "update",
            bench.names,
            ours.update,
            whole.update,
            also_right=[run.update for run in others],
            resolution=resolution,
            unit=bench.numbers.unit(bench.model),
            devices=bench.devices,
            judged_by_line=False,
        )
        if found.same or not gradient.same:
            return found
        # Adam divides by the gradient's own size: where that is rounding, so is the update. If the
        # optimizer makes this very update of the gradient that it saw, nothing else is in it.
        replayed = bench.replayed(ours)
        own = distance(ours.update, replayed.update, bench.devices)
        size = math.hypot(*map(_norm, whole.update))
        explained = 10 * (math.hypot(*resolution) / size if size else 0.0) + 10 * found.floor
        if own <= explained:
            self.notes.append(
                f"the update is {said(found.distance)} off because the optimizer divides by "
                "gradients that are rounding themselves; of the gradient it saw, it made the right "
                "update"
            )
            return replace(found, tolerance=max(found.tolerance, found.distance))
        return found

    def _to_float64(
        self, ours: Run, right: Sequence[Run], reference: Vectors
    ) -> tuple[float, float]:
        devices = self.bench.devices
        whole = max(distance(run.gradients, reference, devices) for run in right)
        return whole, distance(ours.gradients, reference, devices)


@dataclass(frozen=True)
class _Wide:
    comparison: Comparison
    reference: Vectors | None  # the float64 gradient of the same batch


def _gradients(
    what: str,
    bench: Bench,
    ours: Run,
    whole: Run,
    others: Sequence[Run],
    more: Sequence[Vectors],
) -> Comparison:
    unit = bench.numbers.unit(bench.model)
    resolution = [
        0.0 if gradient is None else unit * _norm(gradient) for gradient in whole.gradients
    ]
    return compare(
        what,
        bench.names,
        ours.gradients,
        whole.gradients,
        also_right=[*(run.gradients for run in others), *more],
        resolution=resolution,
        unit=unit,
        devices=bench.devices,
    )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _orders(samples: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(samples, generator=generator).tolist()
    return [list(reversed(range(samples))), shuffled]


def _uneven(samples: int) -> int:
    """About four micro-batches, of which the last is smaller."""
    size = math.ceil(samples / 4)
    return size if samples % size or size == 1 else max(1, size - 1)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
