"""`verify`: the undivided batch beside its accumulation, from the same start."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.core.close import ClipNorm
from wholebatch.core.options import BatchNorm, BatchNormPolicy, flattened
from wholebatch.core.precision import PrecisionName
from wholebatch.core.whole_batch import MicroBatch
from wholebatch.distributed.process_group import world_size
from wholebatch.errors import LossError, OptionError, UnsupportedError, WholebatchError
from wholebatch.verification.diagnose import Evidence, diagnose, moved_buffers
from wholebatch.verification.model_runs import DividedBatch, ModelRuns, uneven
from wholebatch.verification.observed_window import StartingState, WindowRun
from wholebatch.verification.random_numbers import SILENCES, Draws, dropouts
from wholebatch.verification.run_comparison import (
    Comparison,
    Vectors,
    compare,
    compare_gradients,
    compare_updates,
    distance,
    listed,
    norm_of,
    percent,
)
from wholebatch.verification.undivided_batch import Numbers
from wholebatch.verification.verdicts import Cause, Verdict, cause

_BEFORE = 3
"""Updates of the undivided batch before the one that is compared: the first of all, from moments
that are zero, has nothing to round."""


@contextmanager
def _after_some_updates(runs: ModelRuns, batch: DividedBatch) -> Iterator[None]:
    """Let every run within it begin a few updates of the undivided batch later."""
    start = runs.start
    try:
        for _ in range(_BEFORE):
            runs.whole(batch.whole)
            runs.start = StartingState(runs.model, runs.optimizer)
            runs.start.random = start.random
        yield
    finally:
        runs.start = start


def _moments(runs: ModelRuns, name: str) -> list[Tensor]:
    return [
        runs.optimizer.state[p][name].detach().cpu().clone()
        if name in runs.optimizer.state.get(p, {})
        else torch.zeros(p.shape, dtype=p.dtype)
        for p in runs.parameters
    ]


def _compared(what: str, runs: ModelRuns, ours: Vectors, right: Vectors) -> Comparison:
    return compare(
        what,
        runs.names,
        ours,
        right,
        also_right=(),
        # A moment or an update is a sum of many roundings.
        resolution=[8 * runs.unit * norm_of(one) for one in right],
        unit=runs.unit,
        devices=runs.devices,
        judged_by_line=False,
    )


_FLOAT64_UNIT = torch.finfo(torch.float64).eps / 2
AS_FAR_AS_FLOAT64_ALLOWS = 1.25
"""Beyond so many times the undivided batch's own distance from float64 a note says so."""


def verify(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    micro_batch: MicroBatch | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    precision: PrecisionName = "full",
    clip_norm: ClipNorm = None,
    batchnorm: BatchNorm | BatchNormPolicy = "exact",
    float64: bool = True,
    **options: Any,
) -> Verdict:
    """Return a verdict: does `WholeBatch` make the update of the undivided batch here?

    >>> import torch, wholebatch as wb
    >>> model = torch.nn.Linear(3, 2)
    >>> def loss(model, micro):
    ...     return wb.cross_entropy(model(micro["x"]), micro["y"])
    >>> batch = {"x": torch.randn(10, 3), "y": torch.randint(0, 2, (10,))}
    >>> verdict = wb.verify(model, loss, batch, micro_batch=4)
    >>> verdict.same, verdict.micro_batches
    (True, 3)

    Plain torch runs the undivided batch, `WholeBatch` the accumulated window, both from the same
    weights, optimizer state and random numbers. Gradients and updates are compared, per parameter
    and in total, with the measured rounding error of the undivided batch. Model, optimizer and
    random generators are left as found. `print(verdict)` names the causes of a difference.

    If the undivided batch does not fit in memory, the largest part that fits is used, and the
    verdict says so.

    Args:
        model: The model.
        loss: The loss function, as for `WholeBatch`.
        batch: One batch of real data.
        micro_batch: As for `WholeBatch`. None divides the batch in about four uneven parts.
        optimizer: Your optimizer. Default: SGD.
        precision: As for `WholeBatch`.
        clip_norm: As for `WholeBatch`.
        batchnorm: As for `WholeBatch`.
        float64: Compare again on a copy of the model in float64.
        **options: Other options of `WholeBatch`, such as `memory=wb.Memory(gradients="host")`.
            `scheduler=` and `ema=` are ignored: they change nothing before the update.

    Returns:
        A Verdict, which is true if the update is the same.
    """
    began = time.perf_counter()
    options = flattened({**options, "micro_batch": micro_batch, "batchnorm": batchnorm})
    for left_out in ("scheduler", "ema"):
        options.pop(left_out, None)
    if optimizer is None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise UnsupportedError("every parameter of the model is frozen: nothing to verify")
        optimizer = torch.optim.SGD(trained, lr=0.1)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"optimizer={type(optimizer).__name__}: must be one torch.optim.Optimizer; verify the "
            "parameters of several one after the other"
        )
    if type(model).__module__.startswith("deepspeed"):
        raise UnsupportedError(
            "a DeepSpeed engine: its parameters are not its own to run undivided; put one window "
            "of it into a function and use `wholebatch verify --loop`"
        )
    divided = DividedBatch(
        batch,
        options.pop("micro_batch"),
        options.pop("batch_size", None),
        options.pop("static", ()),
    )
    runs = ModelRuns(
        model,
        optimizer,
        loss,
        numbers=Numbers("full" if precision == "fp32" else precision),
        clip_norm=clip_norm,
        clip_value=options.pop("clip_value", None),
        batchnorm=options.pop("batchnorm"),
        options=options,
    )
    try:
        return _Proof(runs, divided, began, wants_float64=float64).verdict()
    finally:
        runs.start.leave()


@dataclass
class _Proof:
    """Runs a proof: `verdict` tells its story, from top to bottom."""

    runs: ModelRuns
    batch: DividedBatch
    began: float
    wants_float64: bool
    notes: list[str] = field(default_factory=list)
    draws: Draws = field(default_factory=Draws)
    held: ModelRuns | None = None
    """The runs with every random draw held still, where that is possible."""

    def verdict(self) -> Verdict:
        runs = self.runs
        self.of_samples = self.batch.samples
        self._check_division()
        chance = self._silence()
        whole = self._largest_that_fits()
        if runs.options.get("gradients") == "moments":
            return self._approximate(chance)
        if runs.numbers.precision == "fp16":
            runs.find_loss_scale(self.batch)
            whole = runs.whole(self.batch.whole)
        again = runs.whole(self.batch.whole)
        # In another order every sample would get other random numbers, and in float64 as well.
        others = [] if chance else runs.in_other_orders(self.batch)
        ours = self._accumulated(runs)
        buffers = {name: buffer.detach().clone() for name, buffer in runs.model.named_buffers()}
        float64, reference = self._in_float64(chance)
        right = [again, *others]
        more = [] if reference is None else [reference]
        gradient = compare_gradients("gradient", runs, ours, whole, right, more=more)
        update, notes = compare_updates(runs, ours, whole, right, gradient)
        self.notes += notes if gradient.same else []
        to_float64 = None
        if reference is not None:
            # The undivided batch in its worst order, and ours.
            *right_off, off = (
                distance(run.gradients, reference, runs.devices) for run in (whole, *others, ours)
            )
            to_float64 = (max(right_off), off)
            self.notes += _further_from_float64(runs, *to_float64)
        same = gradient.same and update.same and (float64 is None or float64.same)
        causes: list[Cause] = []
        if same:
            self.notes += moved_buffers(runs, self.batch, buffers)
            if chance:
                self.notes.append(f"{self._drawn}: here those of the undivided batch, in its order")
        elif chance:
            causes = self._beside(chance)
        else:
            evidence = Evidence(runs, self.batch, whole, again, others, gradient, float64)
            causes = diagnose(evidence)
        return Verdict(
            same=same,
            gradient=gradient,
            update=update,
            float64=float64,
            to_float64=to_float64,
            causes=tuple(causes),
            **self._about(whole, ours),
        )

    def _in_float64(self, chance: list[Cause]) -> tuple[Comparison | None, Vectors | None]:
        """Run all in float64, on as many samples as fit.

        Return the comparison, and the gradient of the undivided batch if all samples fit.
        """
        runs, batch = self.runs, self.batch
        is_float64 = runs.numbers.precision == "full" and runs.unit <= _FLOAT64_UNIT
        if chance or not self.wants_float64 or is_float64:
            return None, None
        if runs.is_sharded or world_size() > 1:
            self.notes.append("not run in float64: a model on several ranks is not copied")
            return None, None
        try:
            wide, batch = runs.in_float64(), batch.in_float64()
            part, whole = _halved_until_it_fits(wide, batch)
            others, ours = wide.in_other_orders(part), wide.accumulated(part)
            comparison = compare_gradients("gradient in float64", wide, ours, whole, others)
            if part.samples == batch.samples:
                return comparison, whole.gradients
            self.notes.append(
                f"in float64 on {part.samples} of {batch.samples} samples: more do not fit"
            )
            return comparison, None
        except torch.OutOfMemoryError:
            why = "there is not enough memory"
        except Exception as error:  # what a module or loss says to being copied, or to float64
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        finally:
            torch.cuda.empty_cache()
        self.notes.append(f"not run in float64: {why}")
        return None, None

    def _approximate(self, chance: list[Cause]) -> Verdict:
        """Return how far the approximation that was asked for is from the undivided batch.

        The undivided batch and its Adam accumulation are compared in moments and update.
        """
        runs = self.runs
        with _after_some_updates(runs, self.batch):
            whole = runs.whole(self.batch.whole)
            right_first, right_second = (_moments(runs, name) for name in ("exp_avg", "exp_avg_sq"))
            ours = runs.accumulated(self.batch)
            our_first, our_second = (_moments(runs, name) for name in ("exp_avg", "exp_avg_sq"))
        first = _compared("first moment", runs, our_first, right_first)
        update = _compared("update", runs, ours.update, whole.update)
        second = distance(our_second, right_second, runs.devices)
        exact = "exact" if first.same else f"{percent(first.distance)} off"
        measured = {"second": percent(second), "update": percent(update.distance), "first": exact}
        asked = cause("moments", number=_BEFORE + 1, **measured)
        return Verdict(
            same=False,
            gradient=first,
            update=update,
            float64=None,
            to_float64=None,
            causes=(asked, *chance),
            approximate=True,
            **self._about(whole, ours),
        )

    def _about(self, *runs: WindowRun) -> dict[str, Any]:
        """Return what a verdict says of the proof itself."""
        return {
            "losses": tuple(math.nan if run.loss is None else run.loss for run in runs),
            "samples": self.batch.samples,
            "of_samples": self.of_samples,
            "micro_batches": len(self.batch.micro_batches()),
            "precision": self.runs.numbers.precision,
            "device": str(self.runs.parameters[0].device),
            "ranks": world_size(),
            "notes": tuple(self.notes),
            "seconds": time.perf_counter() - self.began,
        }

    def _check_division(self) -> None:
        samples, micro_batch = self.of_samples, self.batch.micro_batch
        if samples < 2:
            raise OptionError("a batch of one sample: there is nothing to divide")
        if micro_batch is None or micro_batch == "auto":
            self.batch = replace(self.batch, micro_batch=uneven(samples))
        elif isinstance(micro_batch, int) and micro_batch >= samples:
            raise OptionError(
                f"micro_batch={micro_batch}: is the whole batch of {samples} samples, so "
                "nothing is divided and nothing proven; give fewer"
            )

    def _accumulated(self, runs: ModelRuns) -> WindowRun:
        try:
            return runs.accumulated(self.batch)
        except (WholebatchError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not _raised_in(self.runs.loss, error):
                raise
            raise LossError(
                f"the loss fails on a micro-batch, and not on the undivided batch: "
                f"{type(error).__name__}: {error}; a loss that needs several samples at once is "
                "wb.Coupled(encode, loss), and another micro_batch= may leave no short last one"
            ) from error

    def _largest_that_fits(self) -> WindowRun:
        """Run the undivided batch, or the largest part of it whose undivided update fits."""
        whole, samples = self.batch, self.of_samples
        self.batch, run = _halved_until_it_fits(self.runs, whole)
        fits = self.batch.samples
        if fits == samples:
            return run
        # Come within an eighth of the largest; the gradient does not get truer beyond.
        fails = min(samples, 2 * fits)
        while fails - fits > max(1, fits // 8):
            part = whole.first((fits + fails) // 2)
            try:
                self.runs.whole(part.whole)
                fits, self.batch = part.samples, part
            except torch.OutOfMemoryError:
                fails = part.samples
                self.runs.begin()
                torch.cuda.empty_cache()
        self.notes.append(
            f"the undivided batch of {samples} samples does not fit in memory: this is proven "
            f"on {fits}, the largest part that was found to fit"
        )
        return self.runs.whole(self.batch.whole)

    # ------------------------------------------------------------ random numbers

    def _silence(self) -> list[Cause]:
        """Switch randomness off as gently as it goes; what remains is a cause of difference."""
        runs = self.runs
        few = self.batch.first(min(4, self.of_samples)).whole
        if not runs.draws_random_numbers(few):
            return []
        names = dropouts(runs.model)
        for silence in SILENCES:
            runs.silences.append(silence)
            if not runs.draws_random_numbers(few):
                where = f"dropout in {listed(names)}" if names else "functional dropout"
                self.notes.append(
                    f"{where} is off in this proof: it draws other masks for the whole "
                    "batch than for its micro-batches, and rightly so"
                )
                return []
        runs.silences.clear()
        self._hold(few)
        return [cause("randomness", drawn=self._drawn)]

    @property
    def _drawn(self) -> str:
        places = f" ({self.draws})" if self.draws.places else ""
        return f"the loss or the model's forward draws random numbers{places}"

    def _hold(self, few: Any) -> None:
        """Try to hold what is drawn; if that holds everything, `held` are the runs with it."""
        for silences in ((), SILENCES[:1]):
            held = self.runs.with_loss(self.draws.holding(self.runs.loss))
            held.silences.extend(silences)
            if not held.draws_random_numbers(few):
                self.held = held
                return

    def _beside(self, chance: list[Cause]) -> list[Cause]:
        """Return the draws as the cause, and what is found beside them when they are held."""
        runs = self.held
        if runs is None:
            return chance
        with self.draws.watching():
            whole = runs.whole(self.batch.whole)
        again = runs.whole(self.batch.whole)
        others = runs.in_other_orders(self.batch)
        ours = self._accumulated(runs)
        gradient = compare_gradients("gradient", runs, ours, whole, [again, *others])
        update, _ = compare_updates(runs, ours, whole, [again, *others], gradient)
        if not self.draws.steady:
            return chance
        off, more = percent(gradient.distance), []
        if gradient.same and update.same:
            found = f"that of the undivided batch ({off} off)"
        else:
            found = f"still {off} off: see the next cause"
            more = diagnose(Evidence(runs, self.batch, whole, again, others, gradient))
        held = f"with every draw held, the same for each sample, the gradient is {found}"
        return [*(replace(one, evidence=f"{one.evidence}; {held}") for one in chance), *more]


def _raised_in(loss: Any, error: BaseException) -> bool:
    """Tell if an error came out of the loss function itself."""
    code = getattr(loss, "__code__", None)
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code is not code:
        frame = frame.tb_next
    return frame is not None


def _halved_until_it_fits(runs: ModelRuns, batch: DividedBatch) -> tuple[DividedBatch, WindowRun]:
    """Run the undivided batch, or half of its samples as often as they do not fit."""
    size = batch.samples
    while True:
        part = batch.first(size)
        try:
            return part, runs.whole(part.whole)
        except torch.OutOfMemoryError:
            if world_size() > 1 or size <= 2:
                raise  # several ranks cannot agree on less from inside a failure
        size = math.ceil(size / 2)
        runs.begin()
        torch.cuda.empty_cache()


def _further_from_float64(runs: ModelRuns, whole: float, ours: float) -> list[str]:
    """Return a note if accumulation is further off: in 16 bits the roundings may add up."""
    if runs.numbers.precision == "full" or ours <= AS_FAR_AS_FLOAT64_ALLOWS * whole:
        return []
    return [
        f"in {runs.numbers.precision} accumulation is {ours / whole:.1f} times as far from "
        f"float64 ({percent(ours)}) as the undivided batch ({percent(whole)}): each micro-batch's "
        "gradient is rounded on its own; a larger micro-batch brings it down"
    ]
