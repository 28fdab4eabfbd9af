"""`tune`: measure settings for one batch on this machine, and recommend the fastest.

One loop goes over the candidates: the undivided batch first, then ever smaller micro-batches.
Checkpointing is tried only where a size does not fit without it. A candidate is skipped if earlier
measurements show that it cannot win. Running out of memory is a result, not an error.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.batch import batch_size_of, split, to_device
from wholebatch.coupled.normalisation_layers import needs_whole_batch
from wholebatch.distributed.process_group import largest_over_ranks, world_size
from wholebatch.errors import (
    NonFiniteError,
    OptionError,
    UnsupportedError,
    WholebatchError,
    WindowError,
)
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.memory.activation_checkpointing import (
    is_checkpointed,
    repeated_blocks,
    with_checkpoints,
)
from wholebatch.memory.budget import Budget, device_name, parse_memory, sharing_processes
from wholebatch.memory.choose_micro_batch import resize_batch
from wholebatch.memory.predict import predict_peak
from wholebatch.options import as_close
from wholebatch.plain_files import finite
from wholebatch.readable_sizes import bytes_said
from wholebatch.tune.task import Task, measured_peak
from wholebatch.window import precision as precision_names

PRECISIONS = ("full", "bf16", "fp16")
EXECUTES = ("eager", "compile", "graph")

KIND = "wholebatch tune"
"""The kind of file that `to_dict` makes."""

_NO_TIME = "for lack of time"

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
    """The result of a setting; `why` says why it cannot be used, and is empty if it can."""

    setting: Setting
    steps: int
    why: str = ""
    seconds: float | None = None
    """Seconds of a window, reading its batch included."""
    units_per_second: float = 0.0
    peak: int | None = None
    reductions: int = 0
    """All-reduces of the gradients for each update: 1 on ranks, 0 in one process."""

    @property
    def is_measured(self) -> bool:
        """True if the setting ran and fits the memory, and is no loop for comparison."""
        return not self.why and self.reductions <= 1

    def __str__(self) -> str:
        """Return the setting in words, with the reductions of a loop for comparison."""
        in_each = ", all-reduced in every micro-batch" if self.reductions > 1 else ""
        return f"{self.setting}{in_each}"


@dataclass(frozen=True)
class Tuned:
    """The recommended setting, with everything that was tried."""

    best: Trial
    trials: tuple[Trial, ...]
    left_out: Mapping[str, tuple[Setting, ...]]
    """The settings that were not tried, by the reason."""
    batch_size: int
    budget: int
    unit: str
    device: str
    seconds: float
    ranks: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        """The recommendation as options of `wholebatch train`."""
        return {"batch_size": self.batch_size, **asdict(self.best.setting)}

    @property
    def compares(self) -> bool:
        """True if several settings were measured, so that one can be recommended."""
        return sum(trial.is_measured for trial in self.trials) > 1

    @property
    def label(self) -> str:
        """Return what the best setting is: recommended, or the fastest of those measured."""
        if not self.compares:
            return "the only one measured"
        return "fastest so far" if _NO_TIME in self.left_out else "recommended"

    @property
    def advice(self) -> tuple[str, ...]:
        """The recommendation in sentences; the first one is the answer."""
        best, rate = self.best, self.best.units_per_second
        speed = f"{rate:,.0f} {self.unit}/s" if rate >= 100 else f"{rate:.3g} {self.unit}/s"
        if not self.compares:
            lines = [f"only {best.setting} was measured: {speed}; nothing to compare it with"]
        elif best.steps == 1:
            lines = [f"do not accumulate: the batch fits undivided ({best.setting}), {speed}"]
            divided = [t for t in self.trials if t.steps > 1 and t.is_measured]
            if divided:
                other = max(divided, key=lambda trial: trial.units_per_second)
                share = other.units_per_second / rate
                lines.append(f"divided it reaches {share:.0%} of that at best ({other.setting})")
        else:
            lines = [f"{best.steps} steps of {best.setting}, {speed}"]
            for whole in [t for t in self.trials if t.steps == 1][:1]:
                share = whole.units_per_second / rate
                beside = (
                    whole.why or f"{share:.0%} of that, and takes {bytes_said(whole.peak or 0)}"
                )
                lines.append(f"undivided ({whole.setting}): {beside}")
        lines.append(f"peak memory {bytes_said(best.peak or 0)} of {bytes_said(self.budget)}")
        for why, settings in self.left_out.items():
            more = f" and {len(settings) - 3} more" if len(settings) > 3 else ""
            lines.append(f"not measured, {why}: {'; '.join(map(str, settings[:3]))}{more}")
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        trials = [{**asdict(trial.setting), **asdict(trial)} for trial in self.trials]
        own = {name: value for name, value in vars(self).items() if name != "best"}
        own["left_out"] = {why: [*map(str, them)] for why, them in self.left_out.items()}
        about = {"settings": self.settings, "advice": self.advice, "trials": trials}
        data: dict[str, Any] = finite({"kind": KIND, **own, **about})
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
    watch: Callable[[Trial], None] = lambda trial: None,
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
        precisions: Those to try: "full", "bf16", "fp16".
        executes: Those to try: "eager", "compile", "graph". Default: "eager", and on CUDA "graph".
        checkpointing: Try with gradient checkpointing of the model's repeated blocks, or without.
        seconds: The time for all of it: no setting begins that would likely not end in it.
        window_seconds: Time each setting for this long, at least three windows.
        unit: What the loss is a mean over, for the text.
        watch: A function that gets every result.
    """
    began, ranks = time.perf_counter(), world_size()
    batch = task.batches()
    how = task.samples
    samples = batch_size_of(batch, batch_size=how.batch_size, static=how.static)
    model, optimizer = task.build()
    device = next(model.parameters()).device
    if executes is None:
        executes = ("eager", "graph") if device.type == "cuda" else ("eager",)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = _least_budget(device, memory, weights)
    candidates = _candidates(model, samples, micro_batches, precisions, executes, checkpointing)
    trials: dict[Setting, Trial] = {}
    left_out: dict[str, tuple[Setting, ...]] = {}
    divided = tuple(setting for setting in candidates if setting.micro_batch < samples)
    if divided and task.options.get("batchnorm", "exact") == "exact" and needs_whole_batch(model):
        left_out["since BatchNorm needs the undivided batch"] = divided
        candidates = [*dict.fromkeys(replace(it, micro_batch=samples) for it in candidates)]
    del model, optimizer
    free_memory()
    longest = 0.0
    for setting in candidates:
        start = time.perf_counter()
        # All ranks decide by the slowest.
        is_late = largest_over_ranks(start - began + longest) > seconds
        why = _reason_to_skip(setting, trials, are_asked=micro_batches is not None)
        if why is None and is_late and any(t.is_measured for t in trials.values()):
            why = _NO_TIME
        if why is not None:
            left_out[why] = (*left_out.get(why, ()), setting)
            continue
        blank = Trial(setting, -(-samples // setting.micro_batch), reductions=int(ranks > 1))
        trials[setting] = measure(task, blank, seconds=window_seconds, budget=budget)
        longest = max(longest, time.perf_counter() - start)
        watch(trials[setting])
    best = _recommended(trials.values(), budget)
    tried = list(trials.values())
    eager = (t for t in tried if t.is_measured and t.setting.execute == "eager")
    smallest = min(eager, key=lambda trial: trial.setting.micro_batch, default=best)
    if ranks > 1 and smallest.steps > 1:
        tried.append(_reducing_in_each(task, smallest, seconds=window_seconds))
        watch(tried[-1])
    return Tuned(
        best=best,
        trials=tuple(tried),
        left_out=left_out,
        batch_size=samples,
        budget=budget,
        unit=unit,
        device=device_name(device)
        + (f" ({torch.get_num_threads()} threads)" if device.type == "cpu" else ""),
        seconds=time.perf_counter() - began,
        ranks=ranks,
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
    for name, values, allowed in (
        ("precisions", precisions, PRECISIONS),
        ("executes", executes, EXECUTES),
    ):
        unknown = [value for value in values if value not in allowed]
        if unknown or not values:
            raise OptionError(f"{name}={(*values,)}: must be one or more of {', '.join(allowed)}")
    sizes = sizes_of(samples) if sizes is None else sorted(set(sizes), reverse=True)
    if not sizes or not all(1 <= size <= samples for size in sizes):
        raise OptionError(f"micro_batches={sizes}: must be sizes from 1 to the batch of {samples}")
    module = getattr(model, "module", model)
    can = bool(repeated_blocks(module)) and not any(map(is_checkpointed, module.modules()))
    return [
        Setting(size, precision, again, execute)
        for again in sorted(checkpointing)
        if can or not again
        for execute in sorted(executes, key=lambda name: name != "eager")
        for size in sizes
        for precision in precisions
    ]


def _reason_to_skip(
    setting: Setting, trials: dict[Setting, Trial], *, are_asked: bool
) -> str | None:
    """Return why this setting need not be measured, or None if it must be.

    Sizes that were asked for are all measured, however slow.
    """
    measured = [trial for trial in trials.values() if trial.is_measured]
    if setting.checkpointing and any(
        t.setting.micro_batch >= setting.micro_batch and not t.setting.checkpointing
        for t in measured
    ):
        return "since these sizes fit without checkpointing, which costs time"
    if are_asked:
        return None
    rates = [t.units_per_second for t in measured if t.setting.mode == setting.mode]
    if len(rates) > 2 and max(rates[-2:]) < SLOWER * max(rates):
        return "since two larger micro-batches in a row were slower than the best"
    mode = (setting.precision, setting.checkpointing, "eager")
    eager = [trial for trial in measured if trial.setting.mode == mode]
    if setting.execute != "eager" and eager:
        # Compiling takes long: only the best eager size and its neighbours are tried.
        best = max(eager, key=lambda trial: trial.units_per_second).setting.micro_batch
        if not best / 2 <= setting.micro_batch <= best * 2:
            return f"since they are far from the fastest eager micro-batch, {best}"
    return None


def measure(task: Task, blank: Trial, *, seconds: float, budget: int) -> Trial:
    """Return the trial with its speed and peak; what goes wrong is its status."""
    try:
        return _timed(task, blank, seconds=seconds, budget=budget)
    except torch.OutOfMemoryError:
        return replace(blank, why="ran out of memory")
    except NonFiniteError:  # no setting can mend that
        raise
    except (WholebatchError, RuntimeError) as error:
        why = str(error).strip().split("\n")[0][:200]
        return replace(blank, why=why)
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
        close=replace(as_close(task.options.get("close")), nonfinite="skip"),
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

    if device.type == "cpu":  # no allocator refuses: what would pass the budget does not begin
        micro = resize_batch(task.batches(), setting.micro_batch, static=task.samples.static)
        how: dict[str, Any] = {"optimizer": optimizer, "precision": setting.precision}
        with suppress(UnsupportedError):
            peak = predict_peak(getattr(model, "module", model), task.loss, micro, **how).peak
            if largest_over_ranks(peak) > budget:
                return replace(blank, why=f"needs {bytes_said(peak)} (predicted)")
    last = window()[0]
    if train.recoveries:
        return replace(blank, why=f"needs more than {bytes_said(budget)}")
    for _ in range(20):  # warm up until the time settles: graphs are compiled and recorded
        now = window()[0]
        if now > SLOWER * last and not train.compiling:
            break
        last = now
    took, rate = _speed(window, seconds)
    batch = task.batches()  # read outside, as train does: the data are not the window's memory
    peak = measured_peak(lambda: train.step(batch), model, optimizer)
    peak = int(largest_over_ranks(peak))
    if train.recoveries:  # the windows ran with smaller micro-batches than this one
        return replace(blank, why="ran out of memory")
    best = replace(blank, seconds=took, units_per_second=rate, peak=peak)
    if peak > budget:
        why = f"needs {bytes_said(peak)}, more than {bytes_said(budget)}"
        return replace(best, why=why)
    return best


def _speed(window: Callable[[], tuple[float, float]], seconds: float) -> tuple[float, float]:
    """Return the seconds of a window and its units per second; `window()` returns both parts.

    Other work can only slow a window down: the faster half shows what the setting can do.
    """
    windows = [window() for _ in range(3)]
    while sum(spent for spent, _ in windows) < seconds and len(windows) < 30:
        windows.append(window())
    fast = sorted(windows)[: -(-len(windows) // 2)]
    rate = statistics.median(units / spent for spent, units in fast)
    return statistics.median(spent for spent, _ in fast), rate


class _LossOf(nn.Module):
    """A model whose output is its loss, so that DDP reduces in the backward of each."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, micro: Any) -> Tensor:
        terms = terms_of(as_loss(self.loss(self.model, micro))).values()
        return torch.stack([term.total for term in terms]).sum()


def _reducing_in_each(task: Task, known: Trial, *, seconds: float) -> Trial:
    """Return the same micro-batches in a plain loop in which DDP reduces after every one."""
    setting = replace(known.setting, execute="eager")
    blank = replace(known, setting=setting, why="", peak=None, reductions=known.steps)
    model, optimizer = task.build()
    if setting.checkpointing:
        with_checkpoints(getattr(model, "module", model))
    device = next(model.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    reducing = DistributedDataParallel(
        _LossOf(getattr(model, "module", model), task.loss), device_ids=ids
    )
    casts = precision_names.choose(setting.precision, device.type, keeps=False)

    def window() -> tuple[float, float]:
        began = time.perf_counter()
        for micro in split(task.batches(), setting.micro_batch):
            with casts.forward():
                total = reducing(to_device(micro, device))
            total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return largest_over_ranks(time.perf_counter() - began), 0.0

    window()
    took, _ = _speed(window, seconds)
    free_memory()
    rate = known.units_per_second * (known.seconds or 0.0) / took
    return replace(blank, seconds=took, units_per_second=rate)


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


def _least_budget(device: torch.device, memory: Budget, held: int) -> int:
    """Return the budget of the rank that has the least: all ranks try the same settings."""
    sharing = sharing_processes(device, world_size())
    free = parse_memory(memory, device=device, held=held, processes=sharing)
    return -int(largest_over_ranks(-float(free)))
