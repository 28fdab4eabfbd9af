"""`tune`: measure the ways to run one batch here, and recommend one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.core.options import flattened
from wholebatch.core.splitting import batch_size_of, to_device
from wholebatch.coupled import batchnorms
from wholebatch.errors import OptionError, UnsupportedError, WindowError
from wholebatch.memory.budget import Budget, parse_memory, sharing_processes
from wholebatch.memory.choose_micro_batch import resize_batch
from wholebatch.tune.bottleneck import accumulation, fixed_cost, name_bottleneck
from wholebatch.tune.machine_speed import best_flops, copy_bandwidth, flops_of, reduce_bandwidth
from wholebatch.tune.ranks_model import RanksModel
from wholebatch.tune.search import Limits, Search, Watch
from wholebatch.tune.search_space import Predicted, sizes_of, ways_of
from wholebatch.tune.setting_run import Agreed, Make, Subject
from wholebatch.tune.settings import Trial
from wholebatch.tune.tuning_result import Tuned, advice_of

__all__ = ["share_of_arithmetic", "tune"]

_PRECISIONS = ("full", "bf16", "fp16")
_EXECUTES = ("eager", "compile", "graph")
_SYNCS = ("auto", "hold", "every")
_RANKS = (2, 4, 8, 16, 32, 64)


def tune(
    make: Make,
    *,
    loss: Callable[[Any, Any], Any],
    batch: Any | None = None,
    batches: Callable[[], Any] | None = None,
    memory: Budget = "free",
    micro_batches: Sequence[int] | None = None,
    precisions: Sequence[str] = ("full",),
    executes: Sequence[str] | None = None,
    checkpointing: Sequence[bool] = (False, True),
    syncs: Sequence[str] = ("auto",),
    unit: str = "units",
    limits: Limits | None = None,
    exhaustive: bool = False,
    bandwidth: float | None = None,
    ranks: Sequence[int] = _RANKS,
    watch: Watch | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Tuned:
    """Find the fastest way to make updates from batches like this one, within `memory`.

    `make()` returns a new model with its optimizer, on its device; it is called for every setting.
    Give `batch`, one whole batch, or `batches()`, which returns the next one and is then part of
    the time. `tune` measures micro-batch sizes, `precisions`, `executes` (on CUDA eager code and
    captured graphs, else eager code alone), `checkpointing` and `syncs`. It prunes by predicted
    memory and by earlier measurements; `exhaustive=True` measures everything that fits. Other
    options go to `WholeBatch`: `units=`, `clip_norm=`, `batchnorm=`, … With `bandwidth` (bytes per
    second of one rank's link) the result includes a model of the time over `ranks`. `clock` times
    the windows: on a shared CPU, `time.process_time` counts this process alone, which is right for
    one thread.

    >>> import torch, wholebatch as wb
    >>> def make():
    ...     model = torch.nn.Linear(8, 2)
    ...     return model, torch.optim.AdamW(model.parameters())
    >>> def loss(model, micro):
    ...     return wb.cross_entropy(model(micro["x"]), micro["y"])
    >>> batch = {"x": torch.randn(32, 8), "y": torch.randint(0, 2, (32,))}
    >>> found = tune(make, loss=loss, batch=batch, limits=Limits(seconds=0.01))
    >>> found.best.setting.way.said(), 32 % found.best.setting.micro_batch
    ('full, eager', 0)
    """
    began = time.perf_counter()
    if (batch is None) == (batches is None):
        raise OptionError(
            "tune(batch=, batches=): give one of them, a batch or a source of batches"
        )
    fetch: Callable[[], Any] = batches if batches is not None else lambda: batch
    model, optimizer = make()
    device = next(model.parameters()).device
    on_cuda = device.type == "cuda"
    given = (
        tuple(executes) if executes is not None else ("eager", "graph") if on_cuda else ("eager",)
    )
    _check("precisions", precisions, _PRECISIONS)
    _check("executes", given, _EXECUTES)
    _check("syncs", syncs, _SYNCS)
    first = fetch()
    options = flattened(options)
    layout = {name: options[name] for name in ("batch_size", "static") if name in options}
    samples = batch_size_of(first, **layout)
    sizes = _sizes(micro_batches, samples)
    inner = getattr(model, "module", model)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    # The budget of the rank that has the least: all ranks try the same settings.
    dist = torch.distributed
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    sharing = sharing_processes(device, world)
    free = parse_memory(memory, device=device, held=held, processes=sharing)
    budget = -int(Agreed(device)(-float(free)))
    ways = ways_of(
        inner,
        precisions=tuple(precisions),
        executes=given,
        syncs=tuple(syncs),
        checkpointing=tuple(checkpointing),
    )
    predicted = Predicted(
        inner, optimizer, loss, first, samples, budget, static=layout.get("static", ())
    )
    if batchnorms(inner) and options.get("batchnorm", "exact") == "exact":
        # Lock-step keeps the activations of all micro-batches, so predicting one says little.
        predicted.why_not = "BatchNorm runs micro-batches in lock-step"
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    dtype = next(model.parameters()).dtype
    del model, optimizer, inner

    subject = Subject(make, loss, fetch, options, clock)
    search = Search(subject, samples, sizes, ways, predicted, budget, limits or Limits(), watch)
    search.run_all() if exhaustive else search.run()
    best = search.recommended()
    if best is None:
        raise WindowError(_nothing(search.trials.values()))
    search.trials[best.setting] = best.with_(recommended=True)
    trials = tuple(trial.in_proportion() for trial in search.trials.values())
    best = next(trial for trial in trials if trial.recommended)
    alike = [t for t in trials if t.setting.way == best.setting.way and t.seconds]
    copies = copy_bandwidth(device)
    # A micro-step reads the parameters in forward and backward, and writes their gradients.
    fixed = fixed_cost(alike, moving=3 * gradient_bytes / copies)
    used = share_of_arithmetic(subject, best, first, device=device, dtype=dtype)
    smaller = max(
        (t for t in trials if t.setting.way == best.setting.way and t.steps > best.steps),
        key=lambda t: t.setting.micro_batch,
        default=None,
    )
    measured = reduce_bandwidth(device, numbers)
    link = bandwidth or measured
    model_of_ranks = None
    if link is not None:
        model_of_ranks = _over_ranks(
            best, gradient_bytes, link, measured=bandwidth is None
        ).to_dict(ranks)
    way = best.setting.way
    return Tuned(
        best=best,
        trials=trials,
        settings={
            "batch_size": samples,
            "micro_batch": best.setting.micro_batch,
            "precision": way.precision,
            "checkpointing": way.checkpointing,
            "execute": way.execute,
        },
        advice=advice_of(best, trials, budget=budget, unit=unit),
        bottleneck=name_bottleneck(best, fixed=fixed, used=used, bandwidth=copies),
        accumulation=accumulation(best, fixed=fixed, smaller=smaller),
        batch_size=samples,
        unit=unit,
        device=_device_said(device),
        budget=budget,
        seconds=time.perf_counter() - began,
        memory={
            "points": predicted.points(way),
            "budget": budget,
            "precision": way.precision,
            "micro_batch": best.setting.micro_batch,
        },
        ranks=model_of_ranks,
    )


def _check(name: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    for one in given:
        if one not in allowed:
            raise OptionError(f"{name}: {one!r} must be one of {', '.join(allowed)}")
    if not given:
        raise OptionError(f"{name}: must name at least one of {', '.join(allowed)}")


def _sizes(given: Sequence[int] | None, samples: int) -> list[int]:
    if given is None:
        return sizes_of(samples)
    for size in given:
        if not 1 <= size <= samples:
            raise OptionError(f"micro_batches: {size} must be from 1 to the batch of {samples}")
    if not given:
        raise OptionError("micro_batches: must name at least one size")
    return sorted(set(given), reverse=True)


def _nothing(trials: Any) -> str:
    # The smallest first: it shows how much more memory is needed.
    ordered = sorted(trials, key=lambda trial: trial.predicted or 0)
    reasons = list(dict.fromkeys(f"{t.setting.said()}: {t.why}" for t in ordered))
    return "no setting could be measured; " + "; ".join(reasons[:3])


def share_of_arithmetic(
    subject: Subject, best: Trial, batch: Any, *, device: torch.device, dtype: torch.dtype
) -> float | None:
    """Return the share of a large matrix product's speed that forward and backward reach."""
    parts = ("forward", "backward", "micro-step", "addition")
    seconds = sum(best.split.get(part, 0.0) for part in parts)
    precision = best.setting.way.precision
    model: nn.Module = subject.make()[0]
    inner = getattr(model, "module", model)
    size = min(best.setting.micro_batch, 8)
    static = subject.options.get("static", ())
    try:
        micro = to_device(resize_batch(batch, size, static=static), device)
        counted = flops_of(inner, subject.loss, micro, precision=precision)
    except (RuntimeError, UnsupportedError):
        return None  # The loss cannot run on these samples: do without this evidence.
    if counted is None or not seconds:
        return None
    samples = batch_size_of(batch, static=static)
    return counted / size * samples / seconds / best_flops(device, precision, dtype)


def _over_ranks(best: Trial, gradient_bytes: int, link: float, *, measured: bool) -> RanksModel:
    assert best.seconds is not None
    backward = best.split.get("backward", 0.0) + 2 / 3 * best.split.get("micro-step", 0.0)
    alone = best.seconds - best.split.get("communication", 0.0)
    # A window's units are those of all ranks that measured it; the model counts those of one.
    units = (best.units_per_second or 0.0) * best.seconds / _ranks_here()
    return RanksModel(alone, backward / best.steps, units, gradient_bytes, link, measured)


def _ranks_here() -> int:
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _device_said(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'' if threads == 1 else 's'})"
