"""Run under torchrun: DeepSpeed's ZeRO stages against one process on the global batch."""

from __future__ import annotations

import json
import logging
import sys
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
from tests.distributed.problem import (
    Errors,
    Micro,
    apart,
    everyones,
    fresh,
    global_mean,
    joined,
    loss,
    micro,
    micros_of,
    outcome,
)
from tests.support import Whole, distance, grouped, sgd


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
            gradients = [
                p.grad if stage == 0 else safe_get_full_grad(p) for p in engine.parameters()
            ]
            self.steps.append([None if g is None else g.detach().clone() for g in gradients])

        trainer._ledger.target.optimizers[0].register_step_pre_hook(look)


def parameters_of(engine: Any) -> list[Tensor]:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [p.detach().clone() for p in parameters]


def compared(
    stage: int,
    loop: Callable[[Any, Any], None],
    mine: list[list[Micro]],
    make: Any = sgd,
    clip: float | None = None,
    reference: type[Whole] = Whole,
    trainer: Callable[[Any], Any] | None = None,
    **config: Any,
) -> Errors:
    """Train an engine by `loop(engine, trainer)`, and compare with one process in float64.

    The engine's parameters are float32. What rounding them costs one process is the "floor".
    """
    engine = initialized(stage, make, **config)
    train = trainer(engine) if trainer else accumulator(engine, clip_norm=clip)
    recorded = SeenWhole(engine, train)
    loop(engine, train)
    windows = everyones(mine)
    whole, rounded = (
        reference(model, make, loss=global_mean, clip_norm=clip)
        for model in (fresh(), fresh().float())
    )
    for window in windows:
        whole.step(window)
        rounded.step(window)
    right = whole.seen.gradients
    assert len(recorded.steps) == len(right), (
        f"{len(recorded.steps)} updates instead of {len(right)}"
    )
    worst = max(apart(*pair) for pair in zip(recorded.steps, right, strict=True))
    start = [p.detach().float().double() for p in whole.start.parameters()]
    final = [p.detach() for p in whole.model.parameters()]
    trained = parameters_of(engine)
    engine.destroy()

    def moved(parameters: Any) -> list[Tensor]:
        return [p.detach().double() - s for p, s in zip(parameters, start, strict=True)]

    return {
        "gradients": worst,
        "parameters": distance(trained, final),
        "update": distance(moved(trained), moved(final)),
        "floor": distance(moved(rounded.model.parameters()), moved(final)),
    }


def accumulator(engine: Any, **options: Any) -> wb.Accumulator:
    return wb.Accumulator(engine, engine.optimizer, **{"steps": 3, **options})


def looped(stage: int, case: str, **options: Any) -> Errors:
    mine = micros_of(case, dist.get_rank())
    windows = mine if case == "counts" else [[m for window in mine for m in window]]

    def loop(engine: Any, acc: Any) -> None:
        for window in windows:
            for m in acc.over(window):
                acc.backward(loss(engine, m))

    return compared(stage, loop, mine, **options)


def whole_batches(stage: int, units: Any = None, **zero: Any) -> Errors:
    """By default with DeepSpeed's own thresholds: parameters this small stay whole on each rank."""
    mine = micros_of("counts", dist.get_rank())

    def loop(engine: Any, train: Any) -> None:
        for batch in train.over([joined(window) for window in mine]):
            train.step(batch)

    def trainer(engine: Any) -> Any:
        return wb.WholeBatch(
            engine, engine.optimizer, loss=loss, micro_batch=2, clip_norm=0.05, units=units
        )

    return compared(stage, loop, mine, clip=0.05, trainer=trainer, zero_optimization=zero)


def after_discard(stage: int) -> Errors:
    """A window that is given up, and one that is skipped, leave nothing behind."""
    rank = dist.get_rank()
    mine = micros_of("tokens", rank)

    def loop(engine: Any, acc: Any) -> None:
        acc.backward(loss(engine, micro(77 + rank, 2, branch=True)))
        acc.discard()
        for i, m in enumerate(acc.over([micro(78 + rank, 2)] * 3)):
            value = loss(engine, m)
            factor = float("nan") if i == 1 and rank == 0 else 1.0
            acc.backward(value.total * factor, units=value.units)
        assert (acc.skipped, acc.updates) == (1, 0)
        for m in acc.over([m for window in mine for m in window]):
            acc.backward(loss(engine, m))

    skipping = partial(accumulator, close=wb.Close(nonfinite="skip"))
    return compared(stage, loop, mine, trainer=skipping)


def used_late(stage: int, **config: Any) -> Errors:
    """A parameter that only the second micro-batch of each window uses, on all ranks."""
    rank = dist.get_rank()
    mine: list[list[Micro]] = [
        [micro(1000 * rank + 10 * w + i, 1 + i, branch=i == 1) for i in range(3)] for w in range(2)
    ]

    def loop(engine: Any, acc: Any) -> None:
        for m in acc.over([m for window in mine for m in window]):
            acc.backward(loss(engine, m))

    return compared(stage, loop, mine, **config)


def clipped_by_group(stage: int) -> Errors:
    by_group = partial(accumulator, clip_norm=[0.02, None])
    return looped(stage, "tokens", make=in_groups, reference=ClippedByGroup, trainer=by_group)


IN_BF16 = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def in_bf16(stage: int) -> dict[str, float]:
    """The distance of the first gradient to float64, beside that of the whole batch in bf16."""
    engine = initialized(stage, sgd, **IN_BF16)
    start = [p.double() for p in parameters_of(engine)]
    acc = accumulator(engine)
    recorded = SeenWhole(engine, acc)
    mine = micros_of("tokens", dist.get_rank())[:1]
    for m in acc.over(mine[0]):
        acc.backward(loss(engine, m))
    window = everyones(mine)[0]
    engine.destroy()

    def whole(dtype: torch.dtype) -> list[Tensor]:
        """The gradients of the undivided batch by plain torch, with the engine's parameters."""
        model = fresh().to(dtype)
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.data.copy_(value)
        global_mean(model, window).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

    right = whole(torch.float64)
    return {
        "ours": apart(recorded.steps[0], right),
        "whole": distance(whole(torch.bfloat16), right),
    }


def refused() -> dict[str, str]:
    told: dict[str, str] = {}

    def attempt(
        name: str, stage: int, use: Callable[[Any], Any] = accumulator, **config: Any
    ) -> None:
        engine = initialized(stage, sgd, **config)
        told[name] = outcome(partial(use, engine))
        engine.destroy()

    def whole(**options: Any) -> Callable[[Any], Any]:
        chosen = {"loss": loss, "micro_batch": 2, **options}
        return lambda engine: wb.WholeBatch(engine, engine.optimizer, **grouped(chosen)).step(
            micro(dist.get_rank(), 4)
        )

    def hooked(engine: Any) -> None:
        next(engine.module.parameters()).register_hook(lambda g: g.clamp(-1, 1))
        accumulator(engine).backward(loss(engine, micro(1, 2)))

    def opened(engine: Any) -> Any:
        acc = accumulator(engine)
        acc.backward(loss(engine, micro(1, 2)))
        return acc

    averaged = torch.optim.swa_utils.AveragedModel(fresh().float())
    close = wb.Close
    attempt("bf16", 2, bf16={"enabled": True}, communication_data_type="fp32")
    attempt("communication", 2, **{**IN_BF16, "communication_data_type": "bf16"})
    attempt("offload", 2, zero_optimization={"offload_optimizer": {"device": "nvme"}})
    attempt("overlap", 1, zero_optimization={"overlap_comm": True})
    attempt("clip", 1, partial(accumulator, clip_norm=1.0), gradient_clipping=1.0)
    attempt("every", 1, partial(accumulator, close=close(sync="every")))
    attempt("hold", 3, partial(accumulator, close=close(sync="hold")))
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    attempt("optimizer", 1, lambda engine: wb.Accumulator(engine, other, steps=2))
    attempt("precision", 1, whole(precision="bf16"))
    attempt("host", 0, whole(optimizer_state="host"))
    attempt("scaler", 1, whole(scaler=torch.amp.GradScaler("cpu")))
    attempt("ema", 3, whole(ema=averaged))
    attempt("a mean", 3, whole(loss=lambda m, b: wb.Loss(m(b["tokens"]).square().mean(), 40)))
    attempt("hook", 1, hooked)
    attempt("state", 3, lambda engine: opened(engine).state_dict())
    attempt("flush", 3, lambda engine: opened(engine).flush())
    engines = [initialized(1, sgd), initialized(1, sgd)]
    loops = [accumulator(engine, steps=1) for engine in engines]
    told["together"] = outcome(
        lambda: wb.Accumulator(engines, [e.optimizer for e in engines], steps=1)
    )
    told["one loop"] = outcome(lambda: list(wb.over([micro(1, 2)], *loops)))
    return told


def cases() -> dict[str, Callable[[], Errors]]:
    """The stages take turns; ZeRO 3, which has the most code of its own, meets most cases."""
    own = {"trainer": accumulator, "gradient_clipping": 0.05, "clip": 0.05}
    counted = lambda m: (m["labels"] != -100).sum()  # noqa: E731
    return {
        "0, counts": partial(looped, 0, "counts", clip=0.05),
        "0, unused": partial(looped, 0, "unused"),
        "0, discarded": partial(after_discard, 0),
        "1, tail": partial(looped, 1, "tail", make=adam, clip=0.05),
        "1, prescaled": partial(looped, 1, "tokens", prescale_gradients=True),
        "1, whole batches": partial(whole_batches, 1, counted),
        "2, own clipping": partial(looped, 2, "tokens", **own),
        "2, late": partial(used_late, 2),
        "2, offloaded": partial(looped, 2, "counts", clip=0.05, **OFFLOAD),
        "3, exhausted": partial(looped, 3, "exhausted"),
        "3, discarded": partial(after_discard, 3),
        "3, grouped": partial(clipped_by_group, 3),
        "3, offloaded": partial(looped, 3, "tail", make=adam, clip=0.05, **OFFLOAD),
        "3, partitioned": partial(whole_batches, 3, stage3_param_persistence_threshold=0),
    }


def main() -> None:
    warnings.simplefilter("ignore")  # DeepSpeed's own
    # A faster all-reduce on one machine that would be compiled at the first start: gloo will do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    torch.set_num_threads(1)
    report: dict[str, Any] = {"off": {name: case() for name, case in cases().items()}}
    report["bf16"] = {stage: in_bf16(stage) for stage in (2, 3)}
    report["refused"] = refused()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, report)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(ranks, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
