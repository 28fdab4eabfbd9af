"""`tune`: measure the modes to run one batch in here, and recommend one.

A window's time falls as its micro-batches grow, until the device is full. Then it stays, or rises a
little if caches overflow. So the search follows a mode downwards until two sizes in a row are
clearly slower than its best. Every other mode is tried at the best size, at sizes that only it can
hold, and at neighbours. It is abandoned if it is clearly slower there.

The ladder (`climb`) measures precision, checkpointing, accumulation and offload, alone and one on
top of another: peak, time, how much of the machine each uses and what bounds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from wholebatch.batch import batch_size_of
from wholebatch.coupled import batchnorms
from wholebatch.distributed.process_group import largest_over_ranks, world_size
from wholebatch.errors import OptionError, WindowError
from wholebatch.memory.budget import Budget, parse_memory, sharing_processes
from wholebatch.options import Memory, flattened
from wholebatch.plain_files import finite, write_json
from wholebatch.readable_sizes import bytes_said
from wholebatch.tune.bottleneck import Bottleneck, accumulation, fixed_cost, name_bottleneck
from wholebatch.tune.machine_speed import (
    RanksModel,
    copy_bandwidth,
    reduce_bandwidth,
    share_of_arithmetic,
)
from wholebatch.tune.setting_measurements import (
    CLEARLY,
    Limits,
    SettingMeasurements,
    memory_of,
    rate_of,
)
from wholebatch.tune.settings import Predicted, RunMode, Setting, Trial, modes_of, sizes_of
from wholebatch.tune.window_timing import Make, Workload

SAME = 0.99
"""The fraction of the best speed above which a setting counts as equally fast."""

COMFORTABLE = 0.9
"""The fraction of the budget up to which saving memory by accumulation is of no use."""


class SearchObserver(Protocol):
    """An observer of the search."""

    def begin(self, setting: Setting, *, of: int) -> None:
        """Called before a setting is measured; at most `of` are left, this one included."""

    def end(self, trial: Trial) -> None:
        """Called with the result."""


@dataclass
class Search(SettingMeasurements):
    """All trials of one tuning, in the order they were made."""

    sizes: Sequence[int] = field(kw_only=True)
    modes: Sequence[RunMode] = field(kw_only=True)
    watch: SearchObserver | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._began = self.now()
        for mode in self.modes:  # Predict before measuring: predictions hold a model.
            for size in self.sizes:
                self.predicted.of(Setting(size, mode))
        self.predicted.let_go()

    # ------------------------------------------------------------------ search

    def run(self) -> None:
        """Measure the settings that can be best, and prune the rest with a reason."""
        for mode in self.modes:
            self._prune(mode)
            if mode == self.modes[0] or self.best is None:
                self._downwards(mode)
            else:
                self._beside(mode, self.best)
        self.again()

    def run_all(self) -> None:
        """Measure everything that fits, as a check of the search."""
        for mode in self.modes:
            self._prune(mode)
            for size in self.sizes:
                self._measure(Setting(size, mode), stops=False)
        self.again()

    def recommended(self) -> Trial | None:
        """Return the trial with the fewest steps among the fastest that leave memory free.

        If none leaves a tenth of the budget free, return the one with the least memory.
        """
        best = self.best
        if best is None:
            return None
        same = [
            trial
            for trial in self.trials.values()
            if trial.is_measured
            and (rate_of(trial) >= SAME * rate_of(best) or trial.setting in self.tied)
        ]
        roomy = [trial for trial in same if memory_of(trial) <= COMFORTABLE * self.budget]
        fewest = min((trial.steps for trial in roomy), default=0)
        same = [trial for trial in roomy if trial.steps == fewest] or same
        least = min(memory_of(trial) for trial in same)
        lean = [trial for trial in same if memory_of(trial) <= 1.02 * least]
        return min(lean, key=lambda trial: (trial.steps, -rate_of(trial)))

    def measured(self, setting: Setting) -> Trial:
        """Return the trial of a setting; if it is new, measure it, but keep it out of `trials`."""
        known = self.trials.get(setting)
        if known is not None and known.is_measured:
            return known
        why = self._too_large(setting)
        if why is not None:
            return self.blank(setting, status="pruned", why=why)
        return self.measure(setting, stops=False)

    def _downwards(self, mode: RunMode) -> None:
        slower = 0
        fastest = 0.0
        for size in self.sizes:
            setting = Setting(size, mode)
            if setting in self.trials:
                continue
            if slower >= 2:
                self._leave(setting, "two larger ones in a row were slower than the best")
                continue
            trial = self._measure(setting)
            if trial.status in ("measured", "stopped"):  # A setting that was given up has no rate.
                slower = slower + 1 if rate_of(trial) < CLEARLY * fastest else 0
                fastest = max(fastest, rate_of(trial))

    def _beside(self, mode: RunMode, best: Trial) -> None:
        """Try the best size so far, sizes that only this mode can hold, then neighbours."""
        sizes = list(self.sizes)
        at = sizes.index(best.setting.micro_batch)
        if mode.checkpointing:
            # Checkpointing computes more. It can only win with a size that does not fit without it.
            plain = mode._replace(checkpointing=False)
            for size in self.sizes:
                if self._holds(Setting(size, plain)):
                    self._leave(Setting(size, mode), "fits without checkpointing, which costs time")
        open_sizes = [size for size in self.sizes if Setting(size, mode) not in self.trials]
        order = sorted(open_sizes, key=lambda size: abs(sizes.index(size) - at))
        fastest, slower = 0.0, 0
        for size in order:
            setting = Setting(size, mode)
            if slower >= 1 and fastest < CLEARLY * rate_of(self.best):
                self._leave(setting, "this way is slower at the best size")
                continue
            if slower >= 2:
                self._leave(setting, "further from this way's best size, and slower there")
                continue
            trial = self._measure(setting)
            if trial.status in ("measured", "stopped"):
                is_best = rate_of(trial) >= fastest
                worse = rate_of(trial) < CLEARLY * max(fastest, rate_of(self.best))
                slower = slower + 1 if worse or not is_best else 0
                fastest = max(fastest, rate_of(trial))

    def _holds(self, setting: Setting) -> bool:
        """True if the setting fits, as far as is known."""
        trial = self.trials.get(setting)
        return self.predicted.fits(setting) and (trial is None or trial.status != "failed")

    def _too_large(self, setting: Setting) -> str | None:
        need = self.predicted.need(setting)
        if need is None or need <= self.budget:
            return None
        return f"predicted to need {bytes_said(need)} of {bytes_said(self.budget)}"

    def _prune(self, mode: RunMode) -> None:
        for size in self.sizes:
            why = self._too_large(Setting(size, mode))
            if why is not None and Setting(size, mode) not in self.trials:
                self._leave(Setting(size, mode), why)

    def _leave(self, setting: Setting, why: str) -> None:
        self.trials[setting] = self.blank(setting, status="pruned", why=why)

    # ----------------------------------------------------------------- measure

    def _measure(self, setting: Setting, *, stops: bool = True) -> Trial:
        if setting in self.trials:
            return self.trials[setting]
        out_of_time = self.since(self._began) > self.limits.total
        if out_of_time and self.best is not None:
            self._leave(setting, f"not reached in {self.limits.total:.0f} s")
            return self.trials[setting]
        left = sum(Setting(s, w) not in self.trials for w in self.modes for s in self.sizes)
        if self.watch is not None:
            self.watch.begin(setting, of=left)
        trial = self.measure(setting, stops=stops)
        self.trials[setting] = trial
        if self.watch is not None:
            self.watch.end(trial)
        return trial


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: with all steps before it, and without them."""

    what: str
    together: Trial
    alone: Trial | None
    bottleneck: Bottleneck | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for `tune.json`."""
        bound = self.bottleneck
        return {
            "what": self.what,
            "together": self.together.to_dict(),
            "alone": None if self.alone is None else self.alone.to_dict(),
            "bottleneck": None if bound is None else bound.kind,
            "utilisation": None if bound is None else bound.utilisation,
            "remedy": None if bound is None else bound.remedy,
        }


def climb(
    samples: int,
    micro_batch: int,
    *,
    base: RunMode,
    precision: str | None,
    can_checkpoint: bool,
    offload: str | None,
    measure: Callable[[Setting], Trial],
    bound: Callable[[Trial], Bottleneck],
) -> tuple[Rung, ...]:
    """Measure the steps that apply here.

    `micro_batch` is that of the accumulation step, `offload` the place of the gradients in the last
    one. None leaves a step out.
    """
    changes: list[tuple[str, dict[str, Any], int]] = [("as it is", {}, samples)]
    if precision is not None:
        changes.append((f"{precision} precision", {"precision": precision}, samples))
    if can_checkpoint:
        changes.append(("gradient checkpointing", {"checkpointing": True}, samples))
    steps = -(-samples // micro_batch)
    changes.append((f"accumulation, {micro_batch} × {steps}", {}, micro_batch))
    if offload is not None:
        changes.append((f"gradients: {offload}", {"gradients": offload}, samples))
    rungs: list[Rung] = []
    mode, size = base, samples
    for what, change, own_size in changes:
        before = mode, size
        mode, size = mode._replace(**change), min(size, own_size)
        together = measure(Setting(size, mode))
        if together.status == "stopped":  # Far too slow here: the next steps do without it.
            mode, size = before
        alone = None
        if len(rungs) > 1:  # The first step is alone.
            alone = measure(Setting(own_size, base._replace(**change)))
        found = bound(together) if together.split else None
        rungs.append(Rung(what, together, alone, found))
    return tuple(rungs)


_RANKS = (2, 4, 8, 16, 32, 64)


def tune(
    make: Make,
    *,
    loss: Callable[[Any, Any], Any],
    batch: Any | None = None,
    batches: Callable[[], Any] | None = None,
    memory: Budget | Memory = "free",
    micro_batches: Sequence[int] | None = None,
    precisions: Sequence[str] = ("full",),
    executes: Sequence[str] | None = None,
    checkpointing: Sequence[bool] = (False, True),
    syncs: Sequence[str] = ("auto",),
    unit: str = "units",
    limits: Limits | None = None,
    exhaustive: bool = False,
    ladder: bool = False,
    bandwidth: float | None = None,
    ranks: Sequence[int] = _RANKS,
    watch: SearchObserver | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Tuned:
    """Find the fastest way to make updates from batches like this one, within `memory`.

    `make()` returns a new model with its optimizer, on its device; it is called for every setting.
    Give `batch`, one whole batch, or `batches()`, which returns the next one and is then part of
    the time. `tune` measures micro-batch sizes, `precisions`, `executes` (on CUDA eager code and
    captured graphs, else eager code alone), `checkpointing` and `syncs`. It prunes by predicted
    memory and by earlier measurements; `exhaustive=True` measures everything that fits, and
    `ladder=True` also what each way to save memory gives alone and on top of the others. Other
    options go to `WholeBatch`: `units=`, `clip_norm=`, `batchnorm=`, `close=wb.Close(…)`, …;
    `memory=wb.Memory("20GiB", gradients="host")` and `micro_batch=wb.samples(static=…)` too. With
    `bandwidth` (bytes per second of one rank's link) the result includes a model of the time over
    `ranks`. `clock` times the windows: on a shared CPU, `time.process_time` counts this process
    alone, which is right for one thread.

    >>> import torch, wholebatch as wb
    >>> def make():
    ...     model = torch.nn.Linear(8, 2)
    ...     return model, torch.optim.AdamW(model.parameters())
    >>> def loss(model, micro):
    ...     return wb.cross_entropy(model(micro["x"]), micro["y"])
    >>> batch = {"x": torch.randn(32, 8), "y": torch.randint(0, 2, (32,))}
    >>> found = tune(make, loss=loss, batch=batch, limits=Limits(seconds=0.01))
    >>> found.best.setting.mode.said(), 32 % found.best.setting.micro_batch
    ('full, eager', 0)
    """
    began = time.perf_counter()
    if (batch is None) == (batches is None):
        raise OptionError(
            "tune(batch=, batches=): give one of them, a batch or a source of batches"
        )
    fetch: Callable[[], Any] = batches if batches is not None else lambda: batch
    options = flattened({**options, "memory": memory})
    if options.pop("micro_batch", "auto") != "auto":
        raise OptionError("tune(micro_batch=): is what is searched; micro_batches= gives the sizes")
    budget_given: Budget = options.pop("memory", "free")
    if "sync" in options:
        syncs = (options.pop("sync"),)
    model, optimizer = make()
    facts = _ModelFacts.of(model)
    inner = getattr(model, "module", model)
    if executes is None:
        executes = ("eager", "graph") if facts.device.type == "cuda" else ("eager",)
    modes = modes_of(inner, precisions, executes, syncs, checkpointing)
    first = fetch()
    layout = {name: options[name] for name in ("batch_size", "static") if name in options}
    samples = batch_size_of(first, **layout)
    sizes = _sizes(micro_batches, samples)
    budget = facts.budget(budget_given)
    static = layout.get("static", ())
    predicted = Predicted(inner, optimizer, loss, first, samples, budget, static=static)
    if batchnorms(inner) and options.get("batchnorm", "exact") == "exact":
        predicted.why_not = "BatchNorm runs the batch undivided"
    if "batch_size" in layout:
        predicted.why_not = "a batch that does not show its samples cannot be resized"
    del model, optimizer, inner
    workload = Workload(make, loss, fetch, options, clock)
    limits = limits or Limits()
    search = Search(
        workload, samples, predicted, budget, limits, sizes=sizes, modes=modes, watch=watch
    )
    search.run_all() if exhaustive else search.run()
    found = _result(search, facts, first, unit=unit, bandwidth=bandwidth, ranks=ranks, began=began)
    return found if not ladder else replace(found, ladder=_ladder(search, facts, first, found))


@dataclass(frozen=True)
class _ModelFacts:
    """The size and place of a model, known after it is gone."""

    device: torch.device
    dtype: torch.dtype
    held_bytes: int
    trained: int
    gradient_bytes: int

    @staticmethod
    def of(model: nn.Module) -> _ModelFacts:
        first = next(model.parameters())
        trained = [p for p in model.parameters() if p.requires_grad]
        return _ModelFacts(
            first.device,
            first.dtype,
            sum(p.numel() * p.element_size() for p in model.parameters()),
            sum(p.numel() for p in trained),
            sum(p.nbytes for p in trained),
        )

    def budget(self, memory: Budget) -> int:
        """Return the budget of the rank that has the least: all ranks try the same settings."""
        sharing = sharing_processes(self.device, world_size())
        free = parse_memory(memory, device=self.device, held=self.held_bytes, processes=sharing)
        return -int(largest_over_ranks(-float(free)))


def _result(
    search: Search,
    facts: _ModelFacts,
    batch: Any,
    *,
    unit: str,
    bandwidth: float | None,
    ranks: Sequence[int],
    began: float,
) -> Tuned:
    """Return the recommendation with its evidence."""
    best, trials = _recommendation(search)
    mode, device = best.setting.mode, facts.device
    alike = [trial for trial in trials if trial.setting.mode == mode]
    copies = copy_bandwidth(device)
    # A micro-step reads the parameters in forward and backward, and writes their gradients.
    moving = 3 * facts.gradient_bytes / copies
    fixed = fixed_cost([trial for trial in alike if trial.seconds], moving=moving)
    used = share_of_arithmetic(search.workload, best, batch, device=device, dtype=facts.dtype)
    fewer = [trial for trial in alike if trial.steps > best.steps]
    smaller = max(fewer, key=lambda trial: trial.setting.micro_batch, default=None)
    measured = reduce_bandwidth(device, facts.trained)
    link = bandwidth or measured
    model_of_ranks = None
    if link is not None:
        over = _over_ranks(best, facts.gradient_bytes, link, measured=bandwidth is None)
        model_of_ranks = over.to_dict(ranks)
    size = best.setting.micro_batch
    return Tuned(
        best=best,
        trials=trials,
        settings={
            "batch_size": search.samples,
            "micro_batch": size,
            "precision": mode.precision,
            "checkpointing": mode.checkpointing,
            "execute": mode.execute,
        },
        advice=_advice(best, trials, budget=search.budget, unit=unit),
        bottleneck=name_bottleneck(best, fixed=fixed, used=used, bandwidth=copies),
        accumulation=accumulation(best, fixed=fixed, smaller=smaller),
        batch_size=search.samples,
        unit=unit,
        device=_device_said(device),
        budget=search.budget,
        seconds=time.perf_counter() - began,
        memory={
            "points": search.predicted.points(mode),
            "budget": search.budget,
            "precision": mode.precision,
            "micro_batch": size,
        },
        ranks=model_of_ranks,
    )


def _ladder(search: Search, facts: _ModelFacts, batch: Any, found: Tuned) -> tuple[Rung, ...]:
    """Measure the ladder, in the precision after the first and in the recommended micro-batches."""
    modes = search.modes
    base = modes[0]._replace(execute="eager")
    divided = found.best.setting.micro_batch
    precisions = [mode.precision for mode in modes if mode.precision != base.precision]
    copies = copy_bandwidth(facts.device)
    has_units = search.workload.options.get("units") is not None

    def bound(trial: Trial) -> Bottleneck:
        used = share_of_arithmetic(
            search.workload, trial, batch, device=facts.device, dtype=facts.dtype
        )
        return name_bottleneck(trial.in_proportion(), fixed=None, used=used, bandwidth=copies)

    return climb(
        search.samples,
        divided if divided < search.samples else max(1, search.samples // 4),
        base=base,
        precision=precisions[0] if precisions else None,
        can_checkpoint=any(mode.checkpointing for mode in modes),
        # On a CPU the host is the device. Releasing gradients saves there, if units are counted.
        offload="release" if has_units and facts.device.type == "cpu" else "host",
        measure=search.measured,
        bound=bound,
    )


def _sizes(given: Sequence[int] | None, samples: int) -> list[int]:
    if given is None:
        return sizes_of(samples)
    for size in given:
        if not 1 <= size <= samples:
            raise OptionError(f"micro_batches: {size} must be from 1 to the batch of {samples}")
    if not given:
        raise OptionError("micro_batches: must name at least one size")
    return sorted(set(given), reverse=True)


def _recommendation(search: Search) -> tuple[Trial, tuple[Trial, ...]]:
    """Return the recommended trial, and all trials with their splits in proportion."""
    best = search.recommended()
    if best is None:
        raise WindowError(_nothing(search.trials.values()))
    search.trials[best.setting] = replace(best, recommended=True)
    trials = tuple(trial.in_proportion() for trial in search.trials.values())
    return next(trial for trial in trials if trial.recommended), trials


def _nothing(trials: Iterable[Trial]) -> str:
    # The smallest first: it shows how much more memory is needed.
    ordered = sorted(trials, key=lambda trial: trial.predicted or 0)
    reasons: dict[str, str] = {}
    for trial in ordered:
        reasons.setdefault(trial.why, f"{trial.setting.said()}: {trial.why}")
    return "no setting could be measured; " + "; ".join([*reasons.values()][:3])


def _over_ranks(best: Trial, gradient_bytes: int, link: float, *, measured: bool) -> RanksModel:
    assert best.seconds is not None
    backward = best.split.get("backward", 0.0) + 2 / 3 * best.split.get("micro-step", 0.0)
    alone = best.seconds - best.split.get("communication", 0.0)
    # A window's units are those of all ranks that measured it; the model counts those of one.
    units = (best.units_per_second or 0.0) * best.seconds / world_size()
    return RanksModel(alone, backward / best.steps, units, gradient_bytes, link, measured)


def _device_said(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'' if threads == 1 else 's'})"


@dataclass(frozen=True)
class Tuned:
    """The recommendation and its evidence; `settings` are options of `wholebatch train`."""

    best: Trial
    trials: tuple[Trial, ...]
    settings: Mapping[str, Any]
    advice: tuple[str, ...]
    bottleneck: Bottleneck
    accumulation: tuple[str, ...]
    batch_size: int
    unit: str
    device: str
    budget: int
    seconds: float
    memory: Mapping[str, Any]
    ranks: Mapping[str, Any] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    ladder: tuple[Rung, ...] = ()

    @property
    def accumulates(self) -> bool:
        """True if the batch should be divided, False if it is best left whole."""
        return self.best.steps > 1

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `tune.json`, which `train --from` and `wholebatch report` read."""
        names = ["settings", "advice", "accumulation", "batch_size", "unit", "device", "budget"]
        names += ["seconds", "memory", "ranks"]
        data: dict[str, Any] = finite(
            {
                "kind": "wholebatch tune",
                **self.about,
                **{name: getattr(self, name) for name in names},
                "bottleneck": {**asdict(self.bottleneck), "remedy": self.bottleneck.remedy},
                "ladder": [rung.to_dict() for rung in self.ladder],
                "trials": [trial.to_dict() for trial in self.trials],
            }
        )
        return data

    def write(self, path: Path) -> None:
        """Write `to_dict` as JSON."""
        write_json(path, self.to_dict())


def _advice(best: Trial, trials: Sequence[Trial], *, budget: int, unit: str) -> tuple[str, ...]:
    """Return the recommendation in sentences; the first one is the answer."""
    mode, rate = best.setting.mode, rate_of(best)
    speed = f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"
    if best.steps == 1:
        head = f"do not accumulate: the batch fits undivided ({mode.said()}), {speed}"
    else:
        size = best.setting.micro_batch
        head = f"micro-batch {size} × {best.steps} steps ({mode.said()}), {speed}"
    said = [head, *_beside(best, trials)]
    if memory_of(best):
        said.append(f"Peak memory {bytes_said(memory_of(best))} of {bytes_said(budget)}.")
    if mode.precision != "full":
        said.append(
            f"{mode.precision} rounds more than full precision: the update is that of the "
            f"undivided batch in {mode.precision}."
        )
    return tuple(said)


def _beside(best: Trial, trials: Sequence[Trial]) -> list[str]:
    """Return the best divided setting beside an undivided one, or the other way around."""
    rate = rate_of(best)
    if best.steps == 1:
        divided = [trial for trial in trials if trial.steps > 1 and trial.units_per_second]
        if not divided:
            return []
        other = max(divided, key=rate_of)
        share = f"{rate_of(other) / rate:.0%}"
        return [f"With micro-batches it reaches {share} of that at best ({other.setting.said()})."]
    mode = best.setting.mode
    whole = next((t for t in trials if t.steps == 1 and t.setting.mode == mode), None)
    if whole is None:
        return []
    if not (whole.is_measured and whole.units_per_second):
        return [f"Undivided: {whole.why}."]
    faster = rate / whole.units_per_second - 1
    how = f"{faster:.0%} slower" if faster > 0.005 else "no faster"
    memory = f", and takes {bytes_said(whole.peak)}" if whole.peak else ""
    return [f"Undivided, the batch fits too, but is {how}{memory}."]
