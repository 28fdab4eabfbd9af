"""`verify_loop`: watch a function that trains one window, with the units of its loss given."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from wholebatch.batch import to_device
from wholebatch.distributed.process_group import world_size
from wholebatch.errors import OptionError
from wholebatch.losses.loss import as_loss, terms_of
from wholebatch.verification.example_models import ZOO, Case
from wholebatch.verification.verdicts import LoopVerdict
from wholebatch.verification.watch_loop import Watch

Loop = Callable[[Any, Any, Any], object]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def verify_loop(
    loop: Loop,
    *,
    case: Case | str | None = None,
    steps: int = 4,
    optimizer: MakeOptimizer | None = None,
    uneven: bool = True,
    device: torch.device | str = "cpu",
    name: str | None = None,
) -> LoopVerdict:
    """Return a verdict: does `loop(model, optimizer, micro_batches)` make the right update?

    Right is the update of the undivided batch.

    >>> import torch
    >>> def loop(model, optimizer, micro_batches):                     # a mean of means
    ...     for micro in micro_batches:
    ...         logits = model(micro["x"]).flatten(0, -2)
    ...         loss = torch.nn.functional.cross_entropy(logits, micro["y"].flatten())
    ...         (loss / len(micro_batches)).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> verify_loop(loop, case="mlp").mistakes
    ('mean-of-means',)

    The loop trains on several windows under a `watch`: equal micro-batches hide a mean of means,
    and full windows hide a nominal count.

    `case` is a model with micro-batches: built-in ones by name ("mlp", "lm"), or a `Case`, whose
    loss tells the units. By default all built-in ones are tried, and those on which the loop fails
    are left out. `steps` is the number of micro-batches in a full window; a short window is tried
    too. `uneven=False` tries only micro-batches with the same number of units. `optimizer(model)`
    creates the optimizer (default: SGD). On several ranks, the loop gets the plain model and wraps
    it; every rank has its own micro-batches.
    """
    began = time.perf_counter()
    if not callable(loop):
        raise OptionError(f"loop={loop!r}: must be a function of (model, optimizer, micro_batches)")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise OptionError(f"steps={steps!r}: must be a number of micro-batches, at least 2")
    name = name or str(getattr(loop, "__name__", "the loop"))
    verdicts: list[LoopVerdict] = []
    failed: dict[str, Exception] = {}
    for tried in ZOO.values() if case is None else [_case(case)]:
        model = tried.model().to(device)
        own_optimizer = (optimizer or _sgd)(model)
        watch = Watch(model, own_optimizer, name=name, logs=False)
        try:
            _train(loop, tried, watch, model, own_optimizer, steps=steps, uneven=uneven)
        except Exception as error:
            if case is not None or world_size() > 1:
                raise
            failed[tried.name] = error
        else:
            trials = tuple(replace(trial, case=tried.name) for trial in watch.verdict.trials)
            verdicts.append(replace(watch.verdict, trials=trials))
    if not verdicts:
        raise next(iter(failed.values()))
    trials = tuple(trial for verdict in verdicts for trial in verdict.trials)
    left_out = tuple(
        f"not run on the built-in model {name!r}, where the loop raises {type(error).__name__}"
        for name, error in failed.items()
    )
    first = replace(trials[0], notes=(*trials[0].notes, *left_out))
    return replace(
        verdicts[0],
        trials=(first, *trials[1:]),
        seconds=time.perf_counter() - began,
        watched=None,
    )


def _train(
    loop: Loop,
    case: Case,
    watch: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    uneven: bool,
) -> None:
    """Let the loop train on full and short windows, with equal and uneven micro-batches."""
    rank = torch.distributed.get_rank() if world_size() > 1 else 0
    device = next(model.parameters()).device
    shapes = [(even, steps - less) for even in (True, False)[: 1 + uneven] for less in (0, 1)]
    windows = [copy.deepcopy(case.window(steps, even, rank)[:count]) for even, count in shapes]
    windows = [[to_device(micro, device) for micro in micros] for micros in windows]
    own = copy.deepcopy(model)
    units = [[_units(case, own, micro) for micro in micros] for micros in windows]
    with watch:
        for micros, of_window in zip(windows, units, strict=True):
            if not watch.next_window([unit for unit in of_window if unit is not None]):
                return  # the step of this window would be on the micro-batches before it, too
            loop(model, optimizer, micros)


def _units(case: Case, model: nn.Module, micro: Any) -> float | None:
    """Return the units of a loss with one term; None of several, which the graph tells apart."""
    terms = terms_of(as_loss(case.loss(model, micro)))
    return float(next(iter(terms.values())).units) if len(terms) == 1 else None


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _case(case: Case | str) -> Case:
    if isinstance(case, Case):
        return case
    if case not in ZOO:
        raise OptionError(f"case={case!r}: must be one of {', '.join(ZOO)}, or a Case of your own")
    return ZOO[case]
