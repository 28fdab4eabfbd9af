"""Run under torchrun: DeepSpeed's ZeRO stages against one process on the global batch."""

from __future__ import annotations

import copy
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401 (before the ranks are forked)
from torch import Tensor, nn

import wholebatch as wb
from tests.distributed.exact_worker import joined, micros_of
from tests.distributed.problem import (
    Micro,
    everyones,
    fresh,
    global_mean,
    loss,
    micro,
)
from tests.support import Whole, distance, sgd


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Without decay: a parameter that nothing uses gets a gradient of zeros from DeepSpeed."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:4], "lr": 0.2}, {"params": parameters[4:]}]
    return torch.optim.SGD(groups, lr=0.1)


class ClippedByGroup(Whole):
    """The reference for a clipping of the first group only."""

    def step(self, batch: Any) -> float:
        loss = self.loss(self.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], 0.02)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Crossed(nn.Module):
    """Two layers alike, in one order or the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, flipped: bool) -> Tensor:
        layers = [self.second, self.first] if flipped else [self.first, self.second]
        out: Tensor = layers[1](torch.tanh(layers[0](x)))
        return out


def initialized(stage: int, make: Any, *, model: nn.Module | None = None, **config: Any) -> Any:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model = fresh().float() if model is None else model
    zero = {
        "stage": stage,
        "reduce_bucket_size": 300,  # several buckets, also for a model this small
        **config.pop("zero_optimization", {}),
    }
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 5,  # not what the windows have: it must not matter
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
        **config,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=make(model), config=settings)
    return engine


class SeenWhole:
    """The gradients at each step, gathered by DeepSpeed's own means."""

    def __init__(self, engine: Any, trainer: Any) -> None:
        from deepspeed.utils import safe_get_full_grad

        self.steps: list[list[Tensor | None]] = []
        stage = engine.zero_optimization_stage()

        def look(*_: Any) -> None:
            found = [p.grad if stage == 0 else safe_get_full_grad(p) for p in engine.parameters()]
            self.steps.append([None if g is None else g.detach().clone() for g in found])

        trainer._ledger.target.optimizers[0].register_step_pre_hook(look)


def parameters_of(engine: Any) -> list[Tensor]:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [p.detach().clone() for p in parameters]


def errors(
    engine: Any,
    seen: SeenWhole,
    mine: list[list[Micro]],
    clip: float | None,
    make: Any,
    reference: type[Whole] = Whole,
) -> dict[str, float]:
    windows = everyones(mine)
    whole = reference(fresh(), make, loss=global_mean, clip_norm=clip)
    for window in windows:
        whole.step(window)
    right = whole.seen.gradients
    assert len(seen.steps) == len(right), f"{len(seen.steps)} updates instead of {len(right)}"
    worst = 0.0
    for ours, theirs in zip(seen.steps, right, strict=True):
        filled = [
            torch.zeros_like(t) if o is None else o for o, t in zip(ours, theirs, strict=True)
        ]
        worst = max(worst, distance(filled, theirs))
    start = [p.detach().float() for p in whole.start.parameters()]
    final = [p.detach() for p in whole.model.parameters()]
    ours = [a.double() - b.double() for a, b in zip(parameters_of(engine), start, strict=True)]
    theirs = [a - b.double() for a, b in zip(final, start, strict=True)]
    # float32 parameters round every update: one process on the undivided batch in float32 does too
    rounded = reference(fresh().float(), make, loss=global_mean, clip_norm=clip)
    for window in windows:
        rounded.step(window)
    floor = [
        p.detach().double() - b.double()
        for p, b in zip(rounded.model.parameters(), start, strict=True)
    ]
    return {
        "gradients": worst,
        "parameters": distance(parameters_of(engine), final),
        "update": distance(ours, theirs),
        "floor": distance(floor, theirs),
    }


def by_accumulator(
    stage: int, case: str, make: Any, clip: float | None, own_clip: bool = False, **config: Any
) -> Any:
    config["gradient_clipping"] = clip if own_clip else 0.0
    engine = initialized(stage, make, **config)
    acc = wb.Accumulator(engine, engine.optimizer, steps=3, clip_norm=None if own_clip else clip)
    seen = SeenWhole(engine, acc)
    mine = micros_of(case, dist.get_rank())
    if case == "counts":
        for window in mine:
            for m in acc.over(window):
                acc.backward(loss(engine, m))
    else:
        for m in acc.over([m for window in mine for m in window]):
            acc.backward(loss(engine, m))
    assert acc.last_step is not None
    clipped = (acc.last_step.clip < 1.0) == (clip is not None)
    assert clipped, acc.last_step
    found = errors(engine, seen, mine, clip, make)
    engine.destroy()
    return found


def by_whole_batch(
    stage: int, case: str, make: Any, clip: float | None, known: bool, **zero: Any
) -> Any:
    """By default with DeepSpeed's own thresholds: parameters this small stay whole on each rank."""
    engine = initialized(stage, make, zero_optimization=zero)
    train = wb.WholeBatch(
        engine,
        engine.optimizer,
        loss=loss,
        micro_batch=2,
        clip_norm=clip,
        units=(lambda m: (m["labels"] != -100).sum()) if known else None,
    )
    seen = SeenWhole(engine, train)
    mine = micros_of(case, dist.get_rank())
    for batch in train.over([joined(window) for window in mine]):
        train.step(batch)
    found = errors(engine, seen, mine, clip, make)
    engine.destroy()
    return found


IN_BF16 = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}


def in_bf16(stage: int, **config: Any) -> dict[str, float]:
    """The distance of the first gradient and update to float64, beside that of the whole batch.

    The update is that of the engine's own float32 copies of its parameters.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    engine = initialized(stage, sgd, **IN_BF16, **config)
    rounded = [p.double() for p in parameters_of(engine)]
    before = [safe_get_full_fp32_param(p).clone() for p in engine.parameters()]
    acc = wb.Accumulator(engine, engine.optimizer, steps=3)
    seen = SeenWhole(engine, acc)
    mine = micros_of("tokens", dist.get_rank())[:1]
    for m in acc.over(mine[0]):
        acc.backward(loss(engine, m))
    window = everyones(mine)[0]

    def whole(dtype: torch.dtype) -> list[Tensor]:
        """The gradients of the undivided batch by plain torch, with the engine's parameters."""
        model = fresh().to(dtype)
        for parameter, value in zip(model.parameters(), rounded, strict=True):
            parameter.data.copy_(value)
        global_mean(model, window).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

    right = whole(torch.float64)
    ours = [
        torch.zeros_like(r) if g is None else g for g, r in zip(seen.steps[0], right, strict=True)
    ]
    after = [safe_get_full_fp32_param(p) for p in engine.parameters()]
    moved = [(b - a).double() / 0.1 for a, b in zip(after, before, strict=True)]
    engine.destroy()
    return {
        "gradients": distance(ours, right),
        "whole": distance(whole(torch.bfloat16), right),
        "update": distance(moved, right),
    }


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def after_discard(stage: int, **config: Any) -> Any:
    """A window that is given up, and one that is skipped, leave nothing behind."""
    engine = initialized(stage, sgd, **config)
    acc = wb.Accumulator(engine, engine.optimizer, steps=3, close=wb.Close(nonfinite="skip"))
    seen = SeenWhole(engine, acc)
    rank = dist.get_rank()
    acc.backward(loss(engine, micro(77 + rank, 2, branch=True)))
    acc.discard()
    poison = micro(78 + rank, 2)
    for i, m in enumerate(acc.over([poison] * 3)):
        factor = float("nan") if i == 1 and rank == 0 else 1.0
        value = loss(engine, m)
        acc.backward(value.total * factor, units=value.units)
    assert acc.skipped == 1
    assert acc.updates == 0
    mine = micros_of("tokens", rank)
    for m in acc.over([m for window in mine for m in window]):
        acc.backward(loss(engine, m))
    found = errors(engine, seen, mine, None, sgd)
    engine.destroy()
    return found


def used_late(stage: int, **config: Any) -> Any:
    """A parameter that only the second micro-batch of each window uses, on all ranks."""
    engine = initialized(stage, sgd, **config)
    acc = wb.Accumulator(engine, engine.optimizer, steps=3)
    seen = SeenWhole(engine, acc)
    rank = dist.get_rank()
    mine: list[list[Micro]] = [
        [micro(1000 * rank + 10 * w + i, 1 + i, branch=i == 1) for i in range(3)] for w in range(2)
    ]
    for m in acc.over([m for window in mine for m in window]):
        acc.backward(loss(engine, m))
    found = errors(engine, seen, mine, None, sgd)
    engine.destroy()
    return found


def clipped_by_group(stage: int) -> Any:
    engine = initialized(stage, in_groups)
    scheduler = torch.optim.lr_scheduler.ConstantLR(engine.basic_optimizer, factor=1.0)
    acc = wb.Accumulator(engine, engine, steps=3, clip_norm=[0.02, None], scheduler=scheduler)
    seen = SeenWhole(engine, acc)
    mine = micros_of("tokens", dist.get_rank())
    for m in acc.over([m for window in mine for m in window]):
        acc.backward(loss(engine, m))
    assert scheduler.last_epoch == 2
    found = errors(engine, seen, mine, None, in_groups, ClippedByGroup)
    engine.destroy()
    return found


def refused() -> dict[str, str]:
    said: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            said[name] = "accepted"
        except wb.errors.WholebatchError as error:
            said[name] = str(error)

    for name, config in {
        "bf16": {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
        "communication": {**IN_BF16, "communication_data_type": "bf16"},
        "offload": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
    }.items():
        engine = initialized(2, sgd, **config)
        attempt(name, lambda e=engine: wb.Accumulator(e, e.optimizer, steps=2))
        engine.destroy()
    engine = initialized(1, sgd, gradient_clipping=1.0)
    attempt("clip", lambda: wb.Accumulator(engine, engine.optimizer, steps=2, clip_norm=1.0))
    attempt(
        "every",
        lambda: wb.Accumulator(engine, engine.optimizer, steps=2, close=wb.Close(sync="every")),
    )
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    attempt("optimizer", lambda: wb.Accumulator(engine, other, steps=2))
    attempt(
        "precision",
        lambda: wb.WholeBatch(engine, engine.optimizer, loss=loss, micro_batch=1, precision="bf16"),
    )
    next(engine.module.parameters()).register_hook(lambda g: g.clamp(-1, 1))
    acc = wb.Accumulator(engine, engine, steps=2)
    attempt("hook", lambda: acc.backward(loss(engine, micro(1, 2))))
    engine.destroy()
    two = initialized(2, sgd, model=Crossed())
    acc = wb.Accumulator(two, two.optimizer, steps=1)
    x = torch.ones(2, 4)
    flipped = dist.get_rank() == 1
    attempt("order", lambda: [acc.backward(two(x, flipped).sum(), units=2) for _ in acc.over([x])])
    before = Crossed()
    said["untouched"] = str(all(map(torch.equal, parameters_of(two), before.parameters())))
    two.destroy()
    attempt("late", lambda: used_late(3, **copy.deepcopy(OFFLOAD)))
    overlapping = initialized(1, sgd, zero_optimization={"overlap_comm": True})
    attempt("overlap", lambda: wb.Accumulator(overlapping, overlapping.optimizer, steps=2))
    overlapping.destroy()
    three = initialized(3, sgd)
    attempt(
        "hold", lambda: wb.Accumulator(three, three.optimizer, steps=2, close=wb.Close(sync="hold"))
    )
    acc = wb.Accumulator(three, three.optimizer, steps=4)
    acc.backward(loss(three, micro(1, 2)))
    attempt("state", acc.state_dict)
    attempt("flush", acc.flush)
    return said


KINDS: dict[str, tuple[Any, float | None]] = {
    "tokens": (sgd, None),
    "counts": (sgd, 0.05),
    "tail": (adam, 0.05),
    "exhausted": (sgd, None),
    "unused": (sgd, None),
}
# The stages take turns; ZeRO 3, which has the most code of its own, meets every case.
STAGES = {
    0: ["counts", "exhausted", "unused", "own clipping", "discarded", "late"],
    1: ["tail", "unused", "grouped", "offloaded", "prescaled"],
    2: ["own clipping", "discarded", "late", "offloaded"],
    3: ["counts", "tail", "exhausted", "own clipping", "discarded", "grouped", "late", "offloaded"],
}


def cases_of() -> dict[str, Callable[[], Any]]:
    cases: dict[str, Callable[[], Any]] = {}
    for stage, names in STAGES.items():
        known = stage % 2 == 1
        runs: dict[str, Callable[[], Any]] = {
            "own clipping": partial(by_accumulator, stage, "tokens", sgd, 0.05, own_clip=True),
            "discarded": partial(after_discard, stage, **copy.deepcopy(OFFLOAD if known else {})),
            "grouped": partial(clipped_by_group, stage),
            "late": partial(used_late, stage),
            "offloaded": partial(
                by_accumulator, stage, "counts", sgd, 0.05, **copy.deepcopy(OFFLOAD)
            ),
            "prescaled": partial(
                by_accumulator, stage, "tokens", sgd, None, prescale_gradients=True
            ),
        }
        for case, (make, clip) in KINDS.items():
            runs[case] = partial(by_accumulator, stage, case, make, clip)
        cases |= {f"zero {stage} {name}": runs[name] for name in names}
        cases[f"zero {stage} whole batch known={known}"] = partial(
            by_whole_batch, stage, "counts", sgd, 0.05, known
        )
    cases["zero 3 whole batch, all parameters partitioned"] = partial(
        by_whole_batch, 3, "counts", sgd, 0.05, False, stage3_param_persistence_threshold=0
    )
    cases["zero 3 whole batch, offloaded"] = partial(
        by_whole_batch, 3, "counts", sgd, 0.05, False, **copy.deepcopy(OFFLOAD["zero_optimization"])
    )
    return cases


def main() -> None:
    warnings.simplefilter("ignore")  # DeepSpeed's own
    # A faster all-reduce on one machine that would be compiled at the first start: gloo will do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    for name, run in cases_of().items():
        if only in name:
            started = time.perf_counter()
            results[name] = {**run(), "seconds": time.perf_counter() - started}
    said = refused() if not only else {}
    advice: dict[str, Any] = {}
    if only in ("", "advice"):
        from tests.distributed.deepspeed_advice import (
            in_another_order,
            tested,
            two_engines,
            walked,
        )

        advice = {**walked(), "engines": two_engines(), "order": in_another_order()}
        advice["tested"] = {stage: tested(stage) for stage in (0, 3)}
    bf16: dict[str, Any] = {}
    for stage in (2, 3) if only in ("", "bf16") else ():
        bf16[f"{stage}"] = in_bf16(stage)
        bf16[f"{stage} offloaded"] = in_bf16(stage, **copy.deepcopy(OFFLOAD))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    if dist.get_rank() == 0:
        worst = {
            name: {key: max(r[name][key] for r in gathered) for key in results[name]}
            for name in results
        }
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            found = {"errors": worst, "refused": said, "advice": advice}
            found["bf16"] = bf16
            json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
