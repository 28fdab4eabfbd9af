"""`tune`: measure settings for one batch on this machine, and recommend the fastest.

One loop goes over the candidates. Settings without checkpointing come first, small micro-batches
before larger ones. A candidate is skipped if earlier measurements show that it cannot fit, or that
it cannot win. Running out of memory is a result, not an error.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from wholebatch.batch import batch_size_of
from wholebatch.distributed.process_group import largest_over_ranks, world_size
from wholebatch.errors import NonFiniteError, OptionError, WholebatchError, WindowError
from wholebatch.memory.activation_checkpointing import (
    is_checkpointed,
    repeated_blocks,
    with_checkpoints,
)
from wholebatch.memory.budget import Budget, parse_memory, sharing_processes
from wholebatch.options import flattened
from wholebatch.plain_files import finite
from wholebatch.readable_sizes import bytes_said
from wholebatch.tune.task import Task, measured_peak

PRECISIONS = ("full", "bf16", "fp16", "fp8")
EXECUTES = ("eager", "compile", "graph")

SAME_SPEED = 0.98
"""The share of the best speed above which the setting with less memory or fewer steps wins."""

SLOWER = 0.9
"""The share of the best speed below which a setting is slower, whatever the noise."""


@dataclass(frozen=True)
class Setting:
    """A micro-batch size, and how its micro-batches run."""

    micro_batch: int
    precision: str = "full"
    checkpointing: bool = False
    execute: str = "eager"

    @property
    def mode(self) -> tuple[str, bool, str]:
        """Everything but the micro-batch size."""
        return self.precision, self.checkpointing, self.execute

    def __str__(self) -> str:
        """Return the setting in words.

        >>> print(Setting(8, "bf16", checkpointing=True, execute="graph"))
        micro-batch 8, bf16, checkpointing, graph
        """
        words = [f"micro-batch {self.micro_batch}", self.precision]
        return ", ".join([*words, *(["checkpointing"] if self.checkpointing else []), self.execute])


@dataclass(frozen=True)
class Trial:
    """The result of a setting; `why` says why it is not "measured".

    `status` is "measured", "skipped", "failed", "too large" for the memory, or "not reached" in the
    time given.
    """

    setting: Setting
    steps: int
    status: str
    why: str = ""
    seconds: float | None = None
    """Seconds of a window, reading its batch included."""
    units_per_second: float = 0.0
    peak: int | None = None

    @property
    def is_measured(self) -> bool:
        """True if the setting ran and fits the memory."""
        return self.status == "measured"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with the fields of the setting beside the others."""
        data = asdict(self)
        return {**data.pop("setting"), **data}


@dataclass(frozen=True)
class Tuned:
    """The recommended setting, with everything that was tried."""

    best: Trial
    trials: tuple[Trial, ...]
    batch_size: int
    budget: int
    unit: str
    device: str
    seconds: float

    @property
    def fixed_cost(self) -> float | None:
        """Seconds that every micro-batch costs whatever its size; None if only one was measured."""
        alike = [t for t in self.trials if t.setting.mode == self.best.setting.mode]
        return fixed_cost((t.steps, t.seconds) for t in alike if t.seconds is not None)

    @property
    def settings(self) -> dict[str, Any]:
        """The recommendation as options of `wholebatch train`."""
        return {"batch_size": self.batch_size, **asdict(self.best.setting)}

    @property
    def advice(self) -> tuple[str, ...]:
        """The recommendation in sentences; the first one is the answer."""
        best, rate = self.best, self.best.units_per_second
        speed = f"{rate:,.0f} {self.unit}/s" if rate >= 100 else f"{rate:.3g} {self.unit}/s"
        if best.steps == 1:
            lines = [f"do not accumulate: the batch fits undivided ({best.setting}), {speed}"]
            divided = [t for t in self.trials if t.steps > 1 and t.is_measured]
            if divided:
                other = max(divided, key=lambda trial: trial.units_per_second)
                share = other.units_per_second / rate
                lines.append(f"divided it reaches {share:.0%} of that at best ({other.setting})")
        else:
            lines = [f"{best.steps} steps of {best.setting}, {speed}"]
            whole = [t for t in self.trials if t.steps == 1]
            lines += [f"undivided ({t.setting}): {_beside(t, best)}" for t in whole[:1]]
        found = Counter(trial.status for trial in self.trials)
        if found["not reached"]:
            tried = found["measured"] + found["failed"]
            of = f"{tried} of {tried + found['not reached']} settings"
            lines.append(
                f"only {of} {'was' if tried == 1 else 'were'} tried in this time: another may be "
                "faster"
            )
        cost = self.fixed_cost
        if cost is not None and best.seconds is not None:
            more = cost * best.steps / best.seconds
            lines.append(
                f"every micro-batch costs {1000 * cost:.2g} ms, whatever its size: twice as many "
                f"of half the size would take about {more:.0%} longer"
            )
        lines.append(f"peak memory {bytes_said(best.peak or 0)} of {bytes_said(self.budget)}")
        if best.setting.precision != "full":
            lines.append(f"{best.setting.precision} rounds more than full precision")
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `tune.json`."""
        names = ("settings", "advice", "fixed_cost", "batch_size", "budget", "unit", "device")
        data: dict[str, Any] = finite(
            {
                "kind": "wholebatch tune",
                **{name: getattr(self, name) for name in names},
                "seconds": self.seconds,
                "trials": [trial.to_dict() for trial in self.trials],
            }
        )
        return data


def tune(
    task: Task,
    *,
    memory: Budget = "free",
    micro_batches: Sequence[int] | None = None,
    precisions: Sequence[str] = ("full",),
    executes: Sequence[str] | None = None,
    checkpointing: Sequence[bool] = (False, True),
    seconds: float = 300.0,
    window_seconds: float = 1.0,
    unit: str = "units",
    watch: Callable[[Trial, int], None] = lambda trial, left: None,
) -> Tuned:
    """Find the fastest way to make updates from batches like those of the task, within `memory`.

    >>> import torch, wholebatch as wb
    >>> def build():
    ...     model = torch.nn.Linear(8, 2)
    ...     return model, torch.optim.AdamW(model.parameters())
    >>> def loss(model, micro):
    ...     return wb.cross_entropy(model(micro["x"]), micro["y"])
    >>> batch = {"x": torch.randn(32, 8), "y": torch.randint(0, 2, (32,))}
    >>> found = tune(Task(build, loss, lambda: batch), window_seconds=0.01)
    >>> found.best.setting.execute, 32 % found.best.setting.micro_batch
    ('eager', 0)

    Args:
        task: What to train. Reading its batches is part of the time.
        memory: The budget: "20GiB", a share of the device, or "free".
        micro_batches: Sizes to try. Default: the batch in 1, 2, 4, ... even parts.
        precisions: Those to try: "full", "bf16", "fp16", "fp8".
        executes: Those to try: "eager", "compile", "graph". Default: "eager", and on CUDA "graph".
        checkpointing: Try with gradient checkpointing of the model's repeated blocks, or without.
        seconds: Begin no new setting after this time.
        window_seconds: Time each setting for this long, at least three windows.
        unit: What the loss is a mean over, for the text.
        watch: A function that gets every result, and how many candidates are left.
    """
    began = time.perf_counter()
    batch = task.batches()
    options = flattened(task.options)
    layout = {name: options[name] for name in ("batch_size", "static") if name in options}
    samples = batch_size_of(batch, **layout)
    model, optimizer = task.build()
    device = next(model.parameters()).device
    if executes is None:
        executes = ("eager", "graph") if device.type == "cuda" else ("eager",)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = _least_budget(device, memory, weights)
    candidates = _candidates(model, samples, micro_batches, precisions, executes, checkpointing)
    del model, optimizer
    free_memory()
    # Plain settings first: checkpointing is only for sizes that do not fit without it.
    candidates.sort(key=lambda it: (it.checkpointing, it.execute != "eager", it.micro_batch))
    trials: dict[Setting, Trial] = {}
    for place, setting in enumerate(candidates):
        blank = Trial(setting, -(-samples // setting.micro_batch), "skipped")
        why = _reason_to_skip(setting, trials)
        need = _memory_by_smaller(setting, trials)
        need -= weights if blank.steps == 1 else 0  # there are no gradients beside its forward
        spent = largest_over_ranks(time.perf_counter() - began)
        if why is not None:
            trials[setting] = replace(blank, why=why)
        elif need > budget:
            why = f"would need about {bytes_said(need)} of {bytes_said(budget)}"
            trials[setting] = replace(blank, status="too large", why=why)
        elif spent > seconds and any(t.is_measured for t in trials.values()):
            why = f"not reached in {seconds:.0f} s"
            trials[setting] = replace(blank, status="not reached", why=why)
        else:
            trials[setting] = measure(task, blank, seconds=window_seconds, budget=budget)
            watch(trials[setting], len(candidates) - place - 1)
    return Tuned(
        best=_recommended(trials.values(), budget),
        trials=tuple(trials.values()),
        batch_size=samples,
        budget=budget,
        unit=unit,
        device=_device_name(device),
        seconds=time.perf_counter() - began,
    )


def sizes_of(samples: int) -> list[int]:
    """Return micro-batch sizes to try: the batch in 1, 2, 4, … even parts.

    >>> sizes_of(64), sizes_of(100)
    ([64, 32, 16, 8, 4, 2, 1], [100, 50, 25, 13, 7, 4, 2, 1])
    """
    sizes, steps = [], 1
    while steps < samples:
        sizes.append(-(-samples // steps))
        steps *= 2
    return list(dict.fromkeys([*sizes, 1]))


def fixed_cost(windows: Iterable[tuple[int, float]]) -> float | None:
    """Return the seconds per micro-step that do not depend on its size; None for one point.

    Windows of one batch take `rest + steps × cost` seconds: this is the slope of that line.

    >>> round(fixed_cost([(8, 1.8), (4, 1.4), (2, 1.2)]), 6)
    0.1
    """
    points = list(windows)
    if len({steps for steps, _ in points}) < 2:
        return None
    slope = statistics.linear_regression(*zip(*points, strict=True)).slope
    # A micro-step with its samples is an upper bound of what it costs without them.
    return min(max(0.0, slope), *(seconds / steps for steps, seconds in points))


def free_memory() -> None:
    """Free the models and caches of a measurement before the next one begins."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _candidates(
    model: nn.Module,
    samples: int,
    sizes: Sequence[int] | None,
    precisions: Sequence[str],
    executes: Sequence[str],
    checkpointing: Sequence[bool],
) -> list[Setting]:
    """Return every setting that this model can run in; refuse unknown names and sizes."""
    for name, given, allowed in (
        ("precisions", precisions, PRECISIONS),
        ("executes", executes, EXECUTES),
    ):
        unknown = [one for one in given if one not in allowed]
        if unknown or not given:
            raise OptionError(f"{name}={(*given,)}: must be one or more of {', '.join(allowed)}")
    sizes = sizes_of(samples) if sizes is None else sorted(set(sizes))
    if not sizes or not all(1 <= size <= samples for size in sizes):
        raise OptionError(f"micro_batches={sizes}: must be sizes from 1 to the batch of {samples}")
    module = getattr(model, "module", model)
    can = bool(repeated_blocks(module)) and not any(map(is_checkpointed, module.modules()))
    return [
        Setting(size, precision, again, execute)
        for again in checkpointing
        if can or not again
        for execute in executes
        for precision in precisions
        for size in sizes
    ]


def _memory_by_smaller(setting: Setting, trials: dict[Setting, Trial]) -> int:
    """Return the bytes that a setting needs at least, by two smaller ones of its kind; else 0.

    The peak is the largest of several lines over the micro-batch size, so a line through two points
    is never above it.
    """
    measured = [t for t in _up_to(setting, trials) if t.peak is not None][-2:]
    if len(measured) < 2:
        return 0
    (a, low), (b, high) = ((t.setting.micro_batch, t.peak or 0) for t in measured)
    return int(high + (high - low) / (b - a) * (setting.micro_batch - b))


def _reason_to_skip(setting: Setting, trials: dict[Setting, Trial]) -> str | None:
    """Return why this setting need not be measured, or None if it must be."""
    if setting.checkpointing:
        plain = replace(setting, checkpointing=False)
        if plain in trials and all(map(_fits, _up_to(plain, trials))):
            return "fits without checkpointing, which costs time"
    smaller = _up_to(setting, trials)
    if not all(map(_fits, smaller)):
        return "a smaller micro-batch has failed"
    rates = [t.units_per_second for t in smaller]
    if len(rates) > 2 and max(rates[-2:]) < SLOWER * max(rates):
        return "two smaller micro-batches in a row were slower than the best"
    if setting.execute == "eager":
        return None
    eager = [
        t
        for t in trials.values()
        if t.is_measured and t.setting.mode == (setting.precision, setting.checkpointing, "eager")
    ]
    if not eager:
        return None
    # Compiling takes long: only the best eager size and its neighbours are tried.
    best = max(eager, key=lambda trial: trial.units_per_second).setting.micro_batch
    if not best / 2 <= setting.micro_batch <= best * 2:
        return f"far from the fastest eager micro-batch, {best}"
    return None


def _up_to(setting: Setting, trials: dict[Setting, Trial]) -> list[Trial]:
    """Return what was tried in this mode with this micro-batch and smaller ones, in order."""
    return [
        trial
        for it, trial in trials.items()
        if it.mode == setting.mode
        and it.micro_batch <= setting.micro_batch
        and trial.status in ("measured", "failed", "too large")
    ]


def _fits(trial: Trial) -> bool:
    return trial.status not in ("failed", "too large")


def measure(task: Task, blank: Trial, *, seconds: float, budget: int) -> Trial:
    """Return the trial with its speed and peak; what goes wrong is its status."""
    try:
        return _timed(task, blank, seconds=seconds, budget=budget)
    except torch.OutOfMemoryError:
        return replace(blank, status="failed", why="ran out of memory")
    except NonFiniteError:  # no setting can mend that
        raise
    except (WholebatchError, RuntimeError) as error:
        why = str(error).strip().split("\n")[0][:200]
        return replace(blank, status="failed", why=why)
    finally:
        free_memory()


def _timed(task: Task, blank: Trial, *, seconds: float, budget: int) -> Trial:
    setting = blank.setting
    model, optimizer = task.build()
    if setting.checkpointing:
        with_checkpoints(getattr(model, "module", model))
    device = next(model.parameters()).device
    train = task.train(
        model,
        optimizer,
        micro_batch=setting.micro_batch,
        precision=setting.precision,
        execute=setting.execute,
        nonfinite="skip",
    )

    def window() -> tuple[float, float]:
        began = time.perf_counter()
        step = train.step(task.batches())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if not math.isfinite(step.loss):
            raise NonFiniteError(
                f"the loss of a batch is {step.loss:g}: nothing can be measured; fix the model, "
                "the loss function or the data"
            )
        return largest_over_ranks(time.perf_counter() - began), step.units

    last = window()[0]
    for _ in range(20):  # warm up until the time settles: graphs are compiled and recorded
        now = window()[0]
        if now > SLOWER * last and not train.compiling:
            break
        last = now
    windows = [window() for _ in range(3)]
    while sum(spent for spent, _ in windows) < seconds and len(windows) < 30:
        windows.append(window())
    peak = int(largest_over_ranks(measured_peak(window, model, optimizer)))
    if train.recoveries:  # the windows ran with smaller micro-batches than this one
        return replace(blank, status="failed", why="ran out of memory")
    # Other work can only slow a window down: the faster half shows what the setting can do.
    fast = sorted(windows)[: -(-len(windows) // 2)]
    rate = statistics.median(units / spent for spent, units in fast)
    found = replace(
        blank,
        status="measured",
        seconds=statistics.median(spent for spent, _ in fast),
        units_per_second=rate,
        peak=peak,
    )
    if peak > budget:
        why = f"needs {bytes_said(peak)}, more than {bytes_said(budget)}"
        return replace(found, status="failed", why=why)
    return found


def _recommended(trials: Iterable[Trial], budget: int) -> Trial:
    """Return the fastest; of those about as fast, the one with fewer steps or less memory.

    A setting that takes more than nine tenths of the budget has no room for an unusual batch.
    """
    tried = list(trials)
    measured = [trial for trial in tried if trial.is_measured]
    if not measured:
        reasons = list(dict.fromkeys(f"{t.setting}: {t.why}" for t in tried))
        raise WindowError("no setting could be measured; " + "; ".join(reasons[:3]))
    fastest = max(trial.units_per_second for trial in measured)
    same = [t for t in measured if t.units_per_second >= SAME_SPEED * fastest]
    roomy = [trial for trial in same if (trial.peak or 0) <= 0.9 * budget] or same
    return min(roomy, key=lambda trial: (trial.steps, trial.peak or 0))


def _beside(whole: Trial, best: Trial) -> str:
    """Return how the undivided batch does beside the recommended setting."""
    if not whole.is_measured:
        return whole.why
    slower = best.units_per_second / whole.units_per_second - 1
    memory = f", and takes {bytes_said(whole.peak)}" if whole.peak else ""
    return (f"{slower:.0%} slower" if slower > 0.005 else "no faster") + memory


def _least_budget(device: torch.device, memory: Budget, held: int) -> int:
    """Return the budget of the rank that has the least: all ranks try the same settings."""
    sharing = sharing_processes(device, world_size())
    free = parse_memory(memory, device=device, held=held, processes=sharing)
    return -int(largest_over_ranks(-float(free)))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'' if threads == 1 else 's'})"
