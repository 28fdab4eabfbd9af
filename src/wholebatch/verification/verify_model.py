"""`verify`: compare accumulation with the undivided batch, from the same start."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.distributed.process_group import world_size
from wholebatch.errors import LossError, OptionError, UnsupportedError, WholebatchError
from wholebatch.loss_functions import check_functions, modules_of
from wholebatch.options import BatchNormPolicy, Close, Memory, Samples, flattened
from wholebatch.readable_sizes import percent
from wholebatch.verification.model_causes import Measurements, diagnose
from wholebatch.verification.model_runs import DividedBatch, ModelRuns, Numbers, uneven
from wholebatch.verification.observed_window import WindowRun
from wholebatch.verification.random_numbers import SILENCES, DrawnLines, dropouts
from wholebatch.verification.run_comparison import (
    Comparison,
    Vectors,
    compare_gradients,
    compare_updates,
    distance,
    listed,
)
from wholebatch.verification.verdicts import Cause, Verdict, cause
from wholebatch.whole_batch import MicroBatch, WholeBatch
from wholebatch.window.close_options import ClipNorm
from wholebatch.window.precision import PrecisionName

_log = logging.getLogger("wholebatch.verify")
_PARTS = 6
"""The parts of a proof that are logged as they begin."""


def moved_buffers(
    runs: ModelRuns, batch: DividedBatch, left: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yield a note on buffers that the window `left` otherwise than the undivided batch does."""
    if not left:
        return
    runs.whole(batch.whole)
    moved = [
        name
        for name, buffer in runs.model.named_buffers()
        if name in left and left[name].shape == buffer.shape and not _close(left[name], buffer)
    ]
    if moved:
        yield (
            f"the buffers {listed(moved)} end with other values than with the undivided batch: "
            "every forward changes them, and later updates may depend on them"
        )


def _close(ours: Tensor, other: Tensor) -> bool:
    left, right = ours.double().cpu(), other.detach().double().cpu()
    size = float(right.abs().max()) if right.numel() else 0.0
    eps = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
    return torch.allclose(left, right, rtol=0.0, atol=100 * eps * size)


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
    batchnorm: BatchNormPolicy = "exact",
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
        **options: Other options of `WholeBatch`, such as `units=` or `close=wb.Close(...)`.
            `scheduler=` and `ema=` are ignored: they change nothing before the update.

    Returns:
        A `wholebatch.verification.Verdict`, which is true if the update is the same: `same`,
        `causes`, `notes`, and the distances `gradient`, `update` and `float64`.
    """
    began = time.perf_counter()
    check_functions(loss, options.get("units"))
    modules_of(model)
    options = flattened({**options, "micro_batch": micro_batch, "batchnorm": batchnorm})
    known = inspect.signature(WholeBatch).parameters
    inside = {one.name for group in (Close, Memory, Samples) for one in fields(group)}
    if unknown := sorted(options.keys() - known.keys() - inside):
        raise OptionError(
            f"wb.verify(..., {unknown[0]}=...): no such option; it takes those of WholeBatch: "
            f"{', '.join(known)}"
        )
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
            "a DeepSpeed engine cannot run the undivided batch here; put one window of it into a "
            "function and use `wholebatch verify train.py:function`"
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
    """Runs a proof; `verdict` shows its steps from top to bottom."""

    runs: ModelRuns
    batch: DividedBatch
    began: float
    wants_float64: bool
    notes: list[str] = field(default_factory=list)
    _parts: int = 0
    drawn: str = ""
    """A sentence on random numbers that cannot be switched off; empty if there are none."""

    def verdict(self) -> Verdict:
        runs = self.runs
        self.of_samples = self.batch.samples
        self._check_division()
        chance = self._silence()
        self._tell("the undivided batch")
        whole = self._largest_that_fits()
        if runs.numbers.precision == "fp16":
            runs.find_loss_scale(self.batch)
            whole = runs.whole(self.batch.whole)
        self._tell("the undivided batch again")
        again = runs.whole(self.batch.whole)
        self._tell("its samples in other orders")
        # In another order every sample would get other random numbers, and in float64 as well.
        others = [] if chance else runs.in_other_orders(self.batch)
        self._tell("the micro-batches")
        ours = self._accumulated(runs)
        buffers = {name: buffer.detach().clone() for name, buffer in runs.model.named_buffers()}
        self._tell("all of it in float64")
        float64, reference = self._in_float64(chance)
        self._tell("the comparison")
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
                self.notes.append(f"{self.drawn}: here those of the undivided batch, in its order")
        elif chance:
            causes = chance
        else:
            evidence = Measurements(runs, self.batch, whole, again, others, gradient, float64)
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

    def _tell(self, part: str) -> None:
        """Log which part of the proof begins: some take a minute."""
        self._parts += 1
        _log.info("%d of %d: %s", self._parts, _PARTS, part)

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

    def _about(self, *runs: WindowRun) -> dict[str, Any]:
        """Return what a verdict says of the proof itself."""
        if runs[-1].is_undivided:
            self.notes.append("the batch was not split, so the units of the loss were not tested")
        return {
            "losses": tuple(math.nan if run.loss is None else run.loss for run in runs),
            "samples": self.batch.samples,
            "of_samples": self.of_samples,
            "micro_batches": runs[-1].micro_batches,
            "undivided": runs[-1].is_undivided,
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
                f"micro_batch={micro_batch}: is the whole batch of {samples} samples, so nothing "
                "would be split or proven; give fewer"
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
                "the loss fails on a micro-batch, but not on the undivided batch: "
                f"{type(error).__name__}: {error}; for a loss that needs several samples at once "
                "use wb.Coupled(encode, loss), or choose a micro_batch= that leaves no short last "
                "one"
            ) from error

    def _largest_that_fits(self) -> WindowRun:
        """Run the undivided batch, or the first half, quarter, ... of it that fits."""
        self.batch, run = _halved_until_it_fits(self.runs, self.batch)
        if self.batch.samples < self.of_samples:
            self.notes.append(
                f"the undivided batch of {self.of_samples} samples does not fit in memory: the "
                f"proof uses {self.batch.samples} of them"
            )
        return run

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
                    f"{where} is off in this proof: its masks depend on the split, which is not a "
                    "mistake"
                )
                return []
        runs.silences.clear()
        with DrawnLines() as lines:
            runs.draws_random_numbers(few)
        places = f" ({lines})" if lines.lines else ""
        self.drawn = f"the loss or the model's forward draws random numbers{places}"
        return [cause("randomness", drawn=self.drawn)]


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
        f"in {runs.numbers.precision} accumulation is {ours / whole:.1f} times as far from float64 "
        f"({percent(ours)}) as the undivided batch ({percent(whole)}): each micro-batch's gradient "
        "is rounded separately; a larger micro-batch makes this smaller"
    ]
