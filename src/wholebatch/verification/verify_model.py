"""`verify`: the undivided batch beside its accumulation, from the same start."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from wholebatch.core.close import ClipNorm
from wholebatch.core.options import BatchNorm, Samples, flattened
from wholebatch.core.splitting import Tokens
from wholebatch.errors import LossError, OptionError, UnsupportedError, WholebatchError
from wholebatch.verification.adam_accumulation_error import approximated
from wholebatch.verification.batch_reading import Reading
from wholebatch.verification.diagnose import Evidence, diagnose
from wholebatch.verification.float64 import free_memory, in_float64, uneven
from wholebatch.verification.held_noise import Draws
from wholebatch.verification.judge import gradients, updates
from wholebatch.verification.observed_window import Run
from wholebatch.verification.random_layers import SILENCES, dropouts
from wholebatch.verification.run_distance import Comparison, Vectors, distance
from wholebatch.verification.undivided_batch import Numbers, ranks
from wholebatch.verification.verdict import Cause, Verdict, said
from wholebatch.verification.window_runs import Bench, in_other_orders

__all__ = ["verify"]

AS_FAR_AS_FLOAT64_ALLOWS = 1.25
"""Beyond so many times the undivided batch's own distance from float64 a note says so."""


def verify(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    *,
    micro_batch: int | Tokens | Samples | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    precision: str = "full",
    clip_norm: ClipNorm = None,
    batchnorm: BatchNorm | str = "exact",
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
    options = flattened({**options, "micro_batch": micro_batch, "batchnorm": batchnorm})
    micro_batch, policy = options.pop("micro_batch"), options.pop("batchnorm")
    clip_value = options.pop("clip_value", None)
    for left_out in ("scheduler", "ema"):
        options.pop(left_out, None)
    precision = "full" if precision == "fp32" else precision
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
    reading = Reading(options.pop("batch_size", None), options.pop("static", ()))
    bench = Bench(
        model,
        optimizer,
        loss,
        numbers=Numbers(precision),
        clip_norm=clip_norm,
        clip_value=clip_value,
        batchnorm=policy,
        options=options,
    )
    try:
        return _Proof(bench, batch, micro_batch, reading, wanted_float64=float64).verdict(began)
    finally:
        bench.start.leave()


@dataclass
class _Proof:
    bench: Bench
    batch: Any
    micro_batch: Any
    reading: Reading
    wanted_float64: bool
    notes: list[str] = field(default_factory=list)
    draws: Draws = field(default_factory=Draws)
    held: Bench | None = None

    def verdict(self, began: float) -> Verdict:
        bench = self.bench
        of_samples = self.reading.size(self.batch)
        self._divide(of_samples)
        chance = self._silence()
        whole = self._largest_that_fits(of_samples)
        if bench.options.get("gradients") == "moments":
            return self._approximate(of_samples, chance, began)
        if bench.numbers.precision == "fp16":
            bench.find_loss_scale(self.batch, self.micro_batch, self.reading)
            whole = bench.whole(self.batch)
        again = bench.whole(self.batch)
        # In another order every sample would get other random numbers, and in float64 as well.
        others = [] if chance else in_other_orders(bench, self.batch, self.reading)
        ours = self._accumulated(bench)
        state = {name: buffer.detach().clone() for name, buffer in bench.model.named_buffers()}

        wide = None
        if self.wanted_float64 and not chance:
            wide, note = in_float64(bench, self.batch, self.micro_batch, self.reading)
            self.notes += [note] if note else []
        right = [again, *others]
        more = [] if wide is None or wide.reference is None else [wide.reference]
        gradient = gradients("gradient", bench, ours, whole, right, more=more)
        update, notes = updates(bench, ours, whole, right, gradient)
        self.notes += notes if gradient.same else []
        to_float64 = None
        same = gradient.same and update.same
        if wide is not None:
            same = same and wide.comparison.same
            if wide.reference is not None:
                to_float64 = _to_float64(bench, ours, [whole, *others], wide.reference)
                self.notes += _further_from_float64(bench, *to_float64)
        float64 = None if wide is None else wide.comparison
        evidence = replace(
            self._evidence(bench, whole, again, others, gradient, update),
            float64=float64,
            state=state,
        )
        causes: list[Cause] = []
        if not same:
            causes = self._beside(chance) if chance else diagnose(evidence)
        else:
            self.notes += evidence.what_moved_otherwise()
            if chance:
                self.notes.append(f"{self._drawn}: here those of the undivided batch, in its order")
        return Verdict(
            same=same,
            gradient=gradient,
            update=update,
            float64=float64,
            to_float64=to_float64,
            losses=(_number(whole.loss), _number(ours.loss)),
            causes=tuple(causes),
            **self._about(of_samples, began),
        )

    def _about(self, of_samples: int, began: float) -> dict[str, Any]:
        """What a verdict says of the proof itself."""
        return {
            "samples": self.reading.size(self.batch),
            "of_samples": of_samples,
            "micro_batches": len(self.reading.split(self.batch, self.micro_batch)),
            "precision": self.bench.numbers.precision,
            "device": str(self.bench.parameters[0].device),
            "ranks": ranks(),
            "notes": tuple(self.notes),
            "seconds": time.perf_counter() - began,
        }

    def _evidence(
        self,
        bench: Bench,
        whole: Run,
        again: Run,
        others: Sequence[Run],
        gradient: Comparison,
        update: Comparison,
    ) -> Evidence:
        return Evidence(
            bench=bench,
            batch=self.batch,
            micro_batch=self.micro_batch,
            reading=self.reading,
            whole=whole,
            again=again,
            permuted=others,
            gradient=gradient,
            update=update,
            float64=None,
            state={},
        )

    def _beside(self, chance: list[Cause]) -> list[Cause]:
        """The draws as the cause, and what is found beside them when they are held."""
        bench = self.held
        if bench is None:
            return chance
        with self.draws.watching():
            whole = bench.whole(self.batch)
        again = bench.whole(self.batch)
        others = in_other_orders(bench, self.batch, self.reading)
        ours = self._accumulated(bench)
        gradient = gradients("gradient", bench, ours, whole, [again, *others])
        update, _ = updates(bench, ours, whole, [again, *others], gradient)
        if not self.draws.steady:
            return chance
        held = "with every draw held, the same for each sample, the gradient is"
        if gradient.same and update.same:
            said_held = f"{held} that of the undivided batch ({said(gradient.distance)} off)"
            return [replace(one, evidence=f"{one.evidence}; {said_held}") for one in chance]
        said_held = f"{held} still {said(gradient.distance)} off: see the next cause"
        evidence = self._evidence(bench, whole, again, others, gradient, update)
        return [
            *(replace(one, evidence=f"{one.evidence}; {said_held}") for one in chance),
            *diagnose(evidence),
        ]

    def _accumulated(self, bench: Bench) -> Run:
        try:
            return bench.accumulated(self.batch, self.micro_batch, self.reading)
        except (WholebatchError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not _raised_in(self.bench.loss, error):
                raise
            raise LossError(
                f"the loss fails on a micro-batch, and not on the undivided batch: "
                f"{type(error).__name__}: {error}; a loss that needs several samples at once is "
                "wb.Coupled(encode, loss), and another micro_batch= may leave no short last one"
            ) from error

    def _approximate(self, of_samples: int, randomness: list[Cause], began: float) -> Verdict:
        """What was asked for is not the update of the undivided batch: say how far it is."""
        found = approximated(self.bench, self.batch, self.micro_batch, self.reading)
        return Verdict(
            same=False,
            gradient=found.first,
            update=found.update,
            float64=None,
            to_float64=None,
            losses=(_number(found.losses[0]), _number(found.losses[1])),
            causes=(found.cause, *randomness),
            approximate=True,
            **self._about(of_samples, began),
        )

    # ------------------------------------------------------------ what is run

    def _divide(self, samples: int) -> None:
        if samples < 2:
            raise OptionError("a batch of one sample: there is nothing to divide")
        if self.micro_batch is None or self.micro_batch == "auto":
            self.micro_batch = uneven(samples)
        if isinstance(self.micro_batch, int) and self.micro_batch >= samples:
            raise OptionError(
                f"micro_batch={self.micro_batch}: is the whole batch of {samples} samples, so "
                "nothing is divided and nothing proven; give fewer"
            )

    def _silence(self) -> list[Cause]:
        """Switch randomness off as gently as it goes; what remains is a cause of difference."""
        bench = self.bench
        few, _ = self.reading.first(self.batch, min(4, self.reading.size(self.batch)))
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
        self._hold(few)
        return [
            Cause(
                "randomness",
                (),
                f"{self._drawn} for the batch that it is given, so the micro-batches get others "
                "than the undivided batch",
                "draw them once for the whole batch and give them with it, a leaf with the samples "
                "first: each sample keeps its own however the batch is divided; or accept another "
                "draw of the same distribution, as with dropout",
            )
        ]

    @property
    def _drawn(self) -> str:
        places = f" ({self.draws})" if self.draws.places else ""
        return f"the loss or the model's forward draws random numbers{places}"

    def _hold(self, few: Any) -> None:
        """Try to hold what is drawn; where that holds everything, `held` is the bench with it."""
        bench = self.bench
        for silences in ((), SILENCES[:1]):
            held = bench.with_loss(self.draws.holding(bench.loss))
            held.silences.extend(silences)
            if not held.draws_random_numbers(few):
                self.held = held
                return

    def _largest_that_fits(self, samples: int) -> Run:
        """The undivided batch, or the largest part of it whose undivided update fits."""
        fits, fails, run = 0, samples + 1, None
        size = samples
        whole_batch, whole_reading = self.batch, self.reading
        while True:
            part, reading = whole_reading.first(whole_batch, size)
            try:
                run = self.bench.whole(part)
                fits, self.batch, self.reading = size, part, reading
            except torch.OutOfMemoryError:
                if ranks() > 1 or size == 1:
                    raise  # several ranks cannot agree on less from inside a failure
                fails = size
                self.bench.begin()
                free_memory()
            if run is None:
                size = math.ceil(size / 2)
                continue
            # Come within an eighth of the largest; the gradient does not get truer beyond.
            if fits == samples or fails - fits <= max(1, fits // 8):
                break
            size = (fits + fails) // 2
        if fits < samples:
            if isinstance(self.micro_batch, int) and self.micro_batch >= fits:
                self.micro_batch = uneven(fits)
            self.notes.append(
                f"the undivided batch of {samples} samples does not fit in memory: this is proven "
                f"on {fits}, the largest part that was found to fit"
            )
            run = self.bench.whole(self.batch)
        assert run is not None
        return run


def _raised_in(loss: Any, error: BaseException) -> bool:
    """Tell if an error came out of the loss function itself."""
    code = getattr(loss, "__code__", None)
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code is not code:
        frame = frame.tb_next
    return frame is not None


def _to_float64(
    bench: Bench, ours: Run, right: Sequence[Run], reference: Vectors
) -> tuple[float, float]:
    """How far the undivided batch (in its worst order) and ours are from float64."""
    whole = max(distance(run.gradients, reference, bench.devices) for run in right)
    return whole, distance(ours.gradients, reference, bench.devices)


def _further_from_float64(bench: Bench, whole: float, ours: float) -> list[str]:
    """16 bits: every micro-batch's gradient is rounded, and where they cancel that adds up."""
    if bench.numbers.precision == "full" or ours <= AS_FAR_AS_FLOAT64_ALLOWS * whole:
        return []
    return [
        f"in {bench.numbers.precision} accumulation is {ours / whole:.1f} times as far from "
        f"float64 ({said(ours)}) as the undivided batch ({said(whole)}): each micro-batch's "
        "gradient is rounded on its own; a larger micro-batch brings it down"
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
