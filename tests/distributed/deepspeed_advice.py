"""Goes where the refusals send a user of DeepSpeed; run by deepspeed_worker.py under torchrun."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import wholebatch as wb
from tests.distributed.deepspeed_worker import Crossed, initialized, parameters_of
from tests.distributed.problem import loss, micro
from tests.support import distance, grouped, sgd


def walked() -> dict[str, list[str]]:
    """Refusals that send somewhere else: what each says, and what going there gives."""
    found: dict[str, list[str]] = {}

    def outcome(stage: int, *, model: nn.Module | None = None, **options: Any) -> str:
        engine = initialized(stage, sgd, model=model)
        averages = options.pop("averages", False)
        try:
            if averages:
                options["ema"] = torch.optim.swa_utils.AveragedModel(engine.module)
            options = {"loss": loss if model is None else squares, "micro_batch": 2, **options}
            train = wb.WholeBatch(engine, engine.optimizer, **grouped(options))
            batch = micro(dist.get_rank(), 4) if model is None else {"x": torch.randn(4, 4)}
            train.step(batch)
        except wb.errors.WholebatchError as error:
            return str(error)
        finally:
            engine.destroy()
        return "accepted"

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    scaler = torch.amp.GradScaler("cpu")
    for name, (refused, *instead) in {
        "state": ((0, {"optimizer_state": "host"}), (2, {}), (3, {"optimizer_state": "device"})),
        "precision": ((2, {"precision": "bf16"}), (2, {"precision": "full"})),
        "scaler": ((1, {"scaler": scaler}), (1, {})),
        "ema": ((3, {"averages": True}), (2, {"averages": True})),
        "every": ((1, {"sync": "every"}), (1, {"sync": "auto"}), (2, {"sync": "every"})),
        "hold": ((3, {"sync": "hold"}), (3, {"sync": "auto"}), (1, {"sync": "hold"})),
        "batchnorm": (
            (2, {"model": normed(), "batchnorm": "exact"}),
            *((2, {"model": normed(), "batchnorm": policy}) for policy in ("freeze", "allow")),
        ),
    }.items():
        found[name] = [outcome(stage, **options) for stage, options in (refused, *instead)]
    return found


def contrast(model: Any, batch: dict[str, Tensor]) -> wb.Loss:
    """Compares the samples of a micro-batch with each other."""
    similar = model(batch["x"]) @ model(batch["x"]).T
    return wb.Loss(
        F.cross_entropy(similar, torch.arange(len(similar)), reduction="sum"), len(similar)
    )


def averaged(model: Any, batch: dict[str, Tensor]) -> wb.Loss:
    """Gives a mean as a sum."""
    return wb.Loss(model(batch["x"]).square().mean(), len(batch["x"]))


def tested(stage: int) -> dict[str, str]:
    """Return what is said of losses that are wrong in micro-batches, before the first update."""
    found = {}
    for function in (contrast, averaged):
        engine = initialized(stage, sgd, model=nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
        before = parameters_of(engine)
        try:
            train = wb.WholeBatch(engine, engine.optimizer, loss=function, micro_batch=4)
            train.step({"x": torch.randn(12, 4)})
            said = "accepted"
        except wb.errors.WholebatchError as error:
            said = str(error)
        moved = not all(map(torch.equal, before, parameters_of(engine)))
        found[function.__name__] = "moved" if moved else said
        engine.destroy()
    return found


def squares(model: Any, batch: dict[str, Tensor]) -> wb.Loss:
    return wb.Loss(model(batch["x"]).square().sum(), len(batch["x"]))


def in_another_order() -> float:
    """ZeRO 1 for layers in another order on each rank, as ZeRO 2's refusal says."""
    engine = initialized(1, sgd, model=Crossed())
    acc = wb.Accumulator(engine, engine.optimizer, steps=1)
    x = torch.ones(2, 4)
    for _ in acc.over([x]):
        acc.backward(engine(x, dist.get_rank() == 1).sum(), units=2)
    whole = Crossed()
    optimizer = sgd(whole)
    (sum(whole(x, flipped).sum() for flipped in (False, True)) / 4).backward()
    optimizer.step()
    found = distance(parameters_of(engine), list(whole.parameters()))
    engine.destroy()
    return found


def two_engines() -> list[str]:
    """Several engines are refused in one accumulator, and in one loop: each has a loop."""
    engines = [initialized(1, sgd), initialized(1, sgd)]
    said = []
    accumulators = [wb.Accumulator(e, e.optimizer, steps=1) for e in engines]
    optimizers = [e.optimizer for e in engines]
    micros = [micro(dist.get_rank(), 2)]
    for call in (
        lambda: wb.Accumulator(engines, optimizers, steps=1),
        lambda: list(wb.over(micros, *accumulators)),
    ):
        try:
            call()
        except wb.errors.WholebatchError as error:
            said.append(str(error))
    for engine, acc in zip(engines, accumulators, strict=True):
        for m in acc.over(micros):
            acc.backward(loss(engine, m))
        said.append(str(acc.updates))
        engine.destroy()
    return said
