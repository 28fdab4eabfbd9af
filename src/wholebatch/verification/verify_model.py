"""`verify`: compare accumulation with the undivided batch, from the same start."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.distributed.process_group import world_size
from wholebatch.errors import OptionError, UnsupportedError
from wholebatch.loss_functions import check_functions, modules_of
from wholebatch.options import BatchNormPolicy, Samples, as_close
from wholebatch.readable_sizes import percent
from wholebatch.verification.distances import TIMES_THE_FLOOR, Comparison, Vectors, norm_of, ratio
from wholebatch.verification.divided_batch import DividedBatch
from wholebatch.verification.findings import listed
from wholebatch.verification.model_causes import ModelEvidence, causes
from wholebatch.verification.model_runs import ModelRuns, WindowRun
from wholebatch.verification.random_numbers import silenced
from wholebatch.verification.verdicts import Verdict
from wholebatch.whole_batch import MicroBatch, WholeBatch
from wholebatch.window.close_options import ClipNorm
from wholebatch.window.forward_state import is_same
from wholebatch.window.precision import PrecisionName

_log = logging.getLogger("wholebatch.verify")
_FLOAT64_UNIT = torch.finfo(torch.float64).eps / 2


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
    known = inspect.signature(WholeBatch).parameters
    if unknown := sorted(options.keys() - known.keys()):
        raise OptionError(
            f"wb.verify(..., {unknown[0]}=...): no such option; it takes those of WholeBatch: "
            f"{', '.join(known)}"
        )
    options.pop("scheduler", None)
    close = replace(as_close(options.pop("close", None)), ema=None)
    samples = Samples() if micro_batch is None else Samples.of(micro_batch)
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
    static = (samples.static,) if isinstance(samples.static, str) else tuple(samples.static)
    divided = DividedBatch(batch, samples.micro_batch, samples.batch_size, static)
    runs = ModelRuns(
        model,
        optimizer,
        loss,
        precision="full" if precision == "fp32" else precision,
        clip_norm=clip_norm,
        close=close,
        batchnorm=batchnorm,
        options=options,
    )
    try:
        verdict = _prove(runs, divided.really_divided(), wants_float64=float64)
        return replace(verdict, seconds=time.perf_counter() - began)
    finally:
        runs.start.leave()
        runs.policy.detach()


def _prove(runs: ModelRuns, batch: DividedBatch, *, wants_float64: bool) -> Verdict:
    """Run the undivided batch and its micro-batches, compare them, and explain a difference."""
    notes: list[str] = []
    of_samples = batch.samples
    note, drawn = silenced(runs, batch.first(min(4, of_samples)).whole)
    notes += filter(None, [note])
    _tell(1, "the undivided batch")
    batch, whole = _largest_that_fits(runs, batch)
    if batch.samples < of_samples:
        notes.append(
            f"the undivided batch of {of_samples} samples does not fit in memory: the proof uses "
            f"{batch.samples} of them"
        )
    if runs.precision == "fp16":
        runs.find_loss_scale(batch)
        whole = runs.whole(batch.whole)
    _tell(2, "the undivided batch again")
    again = runs.whole(batch.whole)
    _tell(3, "its samples in other orders")
    # In another order every sample would get other random numbers, and in float64 as well.
    reordered = [] if drawn else [runs.whole(other) for other in batch.in_other_orders()]
    _tell(4, "the micro-batches")
    ours = runs.accumulated(batch)
    left = {name: buffer.detach().clone() for name, buffer in runs.model.named_buffers()}
    _tell(5, "all of it in float64")
    float64, reference = None, None
    if wants_float64 and not drawn:
        float64, reference, note = _in_float64(runs, batch)
        notes += filter(None, [note])
    _tell(6, "the comparison")
    scale, right = runs.scale, [again, *reordered]
    gradients = [run.gradients for run in right] + ([] if reference is None else [reference])
    gradient = scale.compare("gradient", ours.gradients, whole.gradients, gradients)
    update, note = _compared_updates(runs, ours, whole, right, gradient)
    notes += filter(None, [note])
    findings = []
    same = gradient.same and update.same and (float64 is None or float64.same)
    if same:
        notes += _moved_buffers(runs, batch, left)
        notes += [f"{drawn}: here those of the undivided batch, in its order"] if drawn else []
    else:
        offs = [scale.distance(run.gradients, whole.gradients) for run in right]
        findings = causes(
            ModelEvidence(runs, batch, gradient, float64, drawn, offs[0], max(offs[1:], default=0))
        )
    if ours.is_undivided:
        notes.append("the batch was not split, so the units of the loss were not tested")
    return Verdict(
        same=same,
        gradient=gradient,
        update=update,
        float64=float64,
        losses=tuple(math.nan if run.loss is None else run.loss for run in (whole, ours)),
        samples=batch.samples,
        of_samples=of_samples,
        micro_batches=ours.micro_batches,
        undivided=ours.is_undivided,
        precision=runs.precision,
        device=str(runs.parameters[0].device),
        ranks=world_size(),
        causes=tuple(findings),
        notes=tuple(notes),
    )


def _tell(number: int, part: str) -> None:
    """Log which part of the proof begins: some take a minute."""
    _log.info("%d of 6: %s", number, part)


def _largest_that_fits(runs: ModelRuns, batch: DividedBatch) -> tuple[DividedBatch, WindowRun]:
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


def _in_float64(
    runs: ModelRuns, batch: DividedBatch
) -> tuple[Comparison | None, Vectors | None, str]:
    """Run all in float64, on as many samples as fit.

    Return the comparison, the gradient of the undivided batch if all samples fit, and a note.
    """
    if runs.precision == "full" and runs.scale.unit <= _FLOAT64_UNIT:
        return None, None, ""
    if runs.is_sharded or world_size() > 1:
        return None, None, "not run in float64: a model on several ranks is not copied"
    try:
        runs, batch = runs.in_float64(), batch.in_float64()
        part, whole = _largest_that_fits(runs, batch)
        others = [runs.whole(other).gradients for other in part.in_other_orders()]
        ours = runs.accumulated(part).gradients
        compared = runs.scale.compare("gradient in float64", ours, whole.gradients, others)
        if part.samples == batch.samples:
            return compared, whole.gradients, ""
        note = f"in float64 on {part.samples} of {batch.samples} samples: more do not fit"
        return compared, None, note
    except torch.OutOfMemoryError:
        why = "there is not enough memory"
    except Exception as error:  # what a module or loss says to being copied, or to float64
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        torch.cuda.empty_cache()
    return None, None, f"not run in float64: {why}"


def _compared_updates(
    runs: ModelRuns,
    ours: WindowRun,
    whole: WindowRun,
    others: Sequence[WindowRun],
    gradient: Comparison,
) -> tuple[Comparison, str]:
    """Compare what the optimizer did, in all; a note tells where the rounding is its own."""
    # An update is added to the parameter: what the sum rounds away cannot be seen. One rounding
    # is half the distance from 1 to the next number.
    resolution = [
        math.hypot(
            torch.finfo(p.dtype).eps / 2 * norm_of(runs.start.before(p)),
            gradient.floor * norm_of(change),
        )
        for p, change in zip(runs.parameters, whole.update, strict=True)
    ]
    also_right = [run.update for run in others]
    compared = runs.scale.compare(
        "update", ours.update, whole.update, also_right, resolution=resolution
    )
    compared = replace(compared, lines=())
    if compared.same or not gradient.same:
        return compared, ""
    # Adam divides by the gradient's own size: of numbers that are nothing but rounding it makes an
    # arbitrary update, for the undivided batch too. If the optimizer makes this very update of the
    # gradient that it saw, nothing else is in it.
    own = runs.scale.distance(ours.update, runs.replayed(ours).update)
    rounded = ratio(math.hypot(*resolution), math.hypot(*map(norm_of, whole.update)))
    if own > TIMES_THE_FLOOR * (compared.floor + (rounded if math.isfinite(rounded) else 0.0)):
        return compared, ""
    note = (
        f"the update is {percent(compared.distance)} off because the optimizer divides by numbers "
        "of the size of rounding; from the gradient it got, it made the right update"
    )
    return replace(compared, tolerance=max(compared.tolerance, compared.distance)), note


def _moved_buffers(runs: ModelRuns, batch: DividedBatch, left: dict[str, Tensor]) -> Iterator[str]:
    """Yield a note on buffers that the window `left` otherwise than the undivided batch does."""
    runs.whole(batch.whole)
    moved = []
    for name, buffer in runs.model.named_buffers():
        eps = torch.finfo(buffer.dtype).eps if buffer.is_floating_point() else 0.0
        if name not in left or not is_same(left[name], buffer, 100 * eps):
            moved.append(name)
    if moved:
        yield (
            f"the buffers {listed(moved)} end with other values than with the undivided batch: "
            "every forward changes them, and later updates may depend on them"
        )
