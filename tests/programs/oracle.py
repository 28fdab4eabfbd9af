"""The truth: plain torch on the undivided batch of every window, in float64.

It imports nothing of wholebatch. The text of the model and of the data is the script's; loss,
normalisation, clipping and the order of events are written here a second time. In the program's own
precision, the same lines tell how far rounding alone leads from the truth.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs.description import NEXT_TOKEN, STRUCTURED, Program
from tests.programs.mistakes import mistake_of
from tests.programs.models import (
    CALLS,
    JUDGE,
    JUDGED,
    ROW_LOSSES,
    TEACHER,
    data_seed,
    data_text,
    model_call,
    model_text,
)
from tests.programs.script import SCHEDULERS, forward_lines, given_values

Window = dict[str, Any]


SKIPS = ("nan", "empty")
"""Events in whose window no update is made."""
_SCALE = 256.0
"""Of a loss under float16, as the scaler's of the script."""


def truth(program: Program, precision: str = "float64") -> list[Window]:
    """Return what each window must report, and the parameters after it.

    With a `precision` of the program, return what plain torch makes of the undivided batch in it.
    """
    scope = _scope(program, precision)
    with torch.random.fork_rng(devices=[]):  # a fork of a process with CUDA has none
        torch.manual_seed(3)
        model = eval(model_call(program), scope).to(dtype=scope["dtype"])
        scope["model"] = model
        exec(f"{JUDGE}\n{TEACHER}", scope)
        batches = _batches(program, scope["make_data"]) * program.epochs
        return _train(program, model, batches, scope)


def _scope(program: Program, precision: str) -> dict[str, Any]:
    """Return the classes and functions of the user's own text."""
    from torch.utils.checkpoint import checkpoint

    dtype = torch.float64 if precision == "float64" else torch.float32
    scope = {"torch": torch, "nn": nn, "F": F, "dtype": dtype, "checkpoint": checkpoint}
    scope["autocast"] = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scope["copy"] = copy
    before = "\n".join(mistake_of(program).before)
    exec("\n\n".join([model_text(program), data_text(program), before]), scope)
    return scope


def _batches(program: Program, make_data: Any) -> list[dict[str, Any]]:
    """Return the undivided batch of every window, by field."""
    batches = []
    for number, window in enumerate(program.windows):
        drawn = [
            make_data(data_seed(program, number, place), micro.rows, micro.labels)
            for place, micro in enumerate(window)
        ]
        joined = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        batch = dict(zip(program.fields, joined, strict=True))
        if program.model in STRUCTURED:
            batch["rows"] = [micro.rows for micro in window]
        batches.append(batch)
    return batches


def _loss_of_its_own(program: Program, model: nn.Module, batch: Any, scope: Any) -> Any:
    """Return the loss of a batch and its units, by the lines of the script."""
    plain = replace(program, batch="dict", names="short")
    scope.update(model=model, micro=batch)
    exec("\n".join(forward_lines(plain)), scope)
    value = given_values(plain)
    units = float(eval(value["units"], scope))
    if program.given == "total":
        return eval(value["total"], scope) / units, units
    return eval(value["mean"], scope), units


def _logits(program: Program, model: nn.Module, batch: Any, scope: Any) -> Tensor:
    inputs = "x, mask" if program.has_tokens else "x"
    called = {**batch, "torch": torch, "model": model, "elder": scope["elder"]}
    classes = 7 if program.loss in NEXT_TOKEN else 3
    return eval(CALLS[program.call].format(inputs), called).reshape(-1, classes)  # type: ignore[no-any-return]


def _autocast(scope: Any) -> torch.autocast:
    dtype = scope["autocast"]
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def _judge(program: Program, model: nn.Module, batch: Any, scope: Any) -> None:
    """Update the judge of the outputs."""
    counted = batch["y"].reshape(-1) != -100
    judge = scope["judge"].to(dtype=scope["dtype"])
    with _autocast(scope):
        logits = _logits(program, model, batch, scope)
        total = eval(JUDGED, {"judge": judge, "logits": logits, "counted": counted})
    gradients = torch.autograd.grad(total / counted.sum(), [*judge.parameters()])
    with torch.no_grad():
        for p, gradient in zip(judge.parameters(), gradients, strict=True):
            p.sub_(gradient, alpha=0.1)


def _mean_and_units(program: Program, model: nn.Module, batch: Any, scope: Any) -> Any:
    """Return the loss of a batch and its units."""
    if mistake_of(program).own_truth:
        return _loss_of_its_own(program, model, batch, scope)
    logits = _logits(program, model, batch, scope)
    if program.loss in NEXT_TOKEN:
        tokens = batch["x"].masked_fill(~batch["mask"], -100)
        labels = tokens if program.loss == "next unlabelled" else batch["y"]
        logits = logits.view(*labels.shape, -1)[:, :-1].flatten(0, 1)
        batch = {**batch, "y": labels[:, 1:]}
    y = batch["y"].reshape(-1)
    counts = (y != -100).double()
    if program.loss == "coupled":
        scores = (logits @ logits.T).log_softmax(1)
        return -scores.diagonal().mean(), float(len(scores))
    chances = logits.log_softmax(1)
    losses = -chances.gather(1, y.clamp(min=0)[:, None])[:, 0]
    weights = counts
    if program.loss == "classes":
        weights = counts * torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[y.clamp(min=0)]
    if program.loss == "smooth":
        losses = 0.9 * losses - 0.1 * chances.mean(1)
    if program.loss == "mse":
        losses = (logits - batch["target"].reshape(-1, 3)).square().mean(1)
        weights = counts * 3
    if program.loss in ROW_LOSSES:
        names = {"torch": torch, "F": F, "logits": logits, "y": y}
        losses = eval(ROW_LOSSES[program.loss], {**names, "target": batch["target"].reshape(-1, 3)})
    if program.loss == "weighted":
        per_row = batch["weight"][:, None].expand(len(batch["weight"]), batch["y"][0].numel())
        weights = counts * per_row.reshape(-1)
    units = float(weights.sum())
    mean = (losses * weights).sum() / units
    if program.way == "more":
        mean = mean + (logits.square().sum(1) * counts).sum() / units
    if program.loss == "terms":
        mean = mean + 0.5 * 0.1 * logits.square().sum() / len(logits)
        units = None  # several terms: no single number
    return mean, units


def _mean_of_parts(program: Program, model: nn.Module, batch: Any, scope: Any) -> Any:
    """Return the loss of a batch whose micro-batches are one example each, and its units."""
    total, units = torch.zeros((), dtype=scope["dtype"]), 0.0
    for rows in _parts(batch["rows"]):
        part = {name: value[rows] for name, value in batch.items() if name != "rows"}
        if bool((part["y"] != -100).any()):
            mean, some = _mean_and_units(program, model, part, scope)
            total, units = total + mean * some, units + some
    return total / units, units


def _parts(sizes: list[int]) -> list[slice]:
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "decay": (torch.optim.SGD, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"eps": 0.01}),
    "adamw fused": (torch.optim.AdamW, {"eps": 0.01}),
    "adam foreach": (torch.optim.Adam, {"eps": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"eps": 0.01}),
    "groups": (torch.optim.SGD, {}),
    "hooked": (torch.optim.SGD, {}),
    "two": (torch.optim.SGD, {}),
}


def _optimizer(program: Program, model: nn.Module, scope: Any) -> torch.optim.Optimizer:
    trained: Any = [p for p in model.parameters() if p.requires_grad]
    if program.optimizer == "two":
        trained = [{"params": trained[1:]}, {"params": trained[:1], "lr": 0.05}]
    if program.optimizer == "groups":
        trained = [{"params": trained[:1], "lr": 0.05}, {"params": trained[1:]}]
    if program.optimizer == "own":
        return scope["Normed"](trained, lr=0.1)  # type: ignore[no-any-return]
    kind, options = _OPTIMIZERS[program.optimizer]
    optimizer = kind(trained, lr=0.1, **options)
    if program.optimizer == "hooked":
        optimizer.register_step_pre_hook(scope["limit"])
    return optimizer


def _schedulers(program: Program, optimizer: torch.optim.Optimizer) -> list[Any]:
    text = SCHEDULERS.get(program.scheduler, "[]")
    schedulers = eval(text, {"torch": torch, "optimizer": optimizer})
    return schedulers if isinstance(schedulers, list) else [schedulers]


def _clip(program: Program, groups: list[list[nn.Parameter]]) -> None:
    limits = {"norm": [0.1], "loose": [1e3], "groups": [0.02, 0.1]}.get(program.clip, [])
    parts = groups if program.clip == "groups" else [[p for group in groups for p in group]]
    for limit, part in zip(limits, parts, strict=bool(limits)):
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in part if p.grad is not None))
        for p in part:
            if p.grad is not None:
                p.grad *= min(1.0, limit / (norm + 1e-6))
    if program.clip == "value":
        for p in (p for group in groups for p in group if p.grad is not None):
            p.grad.clamp_(-0.01, 0.01)


def _train(
    program: Program, model: nn.Module, batches: list[dict[str, Tensor]], scope: Any
) -> list[Window]:
    if program.model == "batchnorm" and not program.is_whole:
        model.eval()  # batchnorm="freeze"
    optimizer = _optimizer(program, model, scope)
    schedulers = _schedulers(program, optimizer)
    ema = torch.optim.swa_utils.AveragedModel(model) if "ema" in program.close else None
    if program.event == "thaw":
        thawed = next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)
    record: list[Window] = []
    updates = 0
    for number, batch in enumerate(batches):
        if number == program.at and number > 0:
            _event(program, model, optimizer, scope)
            if program.event == "thaw":
                thawed.requires_grad_(True)
        window: Window = {"skipped": program.event in SKIPS and number == program.at}
        if not window["skipped"]:
            updates += 1
            if program.joint:
                _judge(program, model, batch, scope)
            window.update(_update(program, model, optimizer, batch, scope))
            if ema is not None:
                ema.update_parameters(model)
            for scheduler in schedulers:
                scheduler.step(*([window["loss"]] if program.scheduler == "plateau" else []))
        window["update"] = updates
        window["skips"] = number + 1 - updates
        window["rate"] = [group["lr"] for group in optimizer.param_groups]
        all_of = [*model.parameters(), *(scope["judge"].parameters() if program.joint else ())]
        window["parameters"] = torch.cat([p.detach().double().flatten() for p in all_of])
        if ema is not None and program.event != "resume":
            averaged = [p.detach().double().flatten() for p in ema.module.parameters()]
            window["ema"] = torch.cat(averaged)
        if program.model == "counter" and program.sharded == "ddp":  # all have rank 0's buffers
            windows = program.windows[: number + 1]
            dealt = f"[micro for window in windows for micro in window[{program.dealt}]]"
            rows = sum(micro.rows for micro in eval(dealt, {"rank": 0, "windows": windows}))
            window["seen"] = [float(rows)] * program.ranks
        record.append(window)
    return record


def _update(
    program: Program,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    scope: Any,
) -> Window:
    optimizer.zero_grad()
    with _autocast(scope):
        if program.model in STRUCTURED:
            mean, units = _mean_of_parts(program, model, batch, scope)
        else:
            mean, units = _mean_and_units(program, model, batch, scope)
    scale = _SCALE if scope["autocast"] is torch.float16 else 1.0
    (mean * scale).backward()
    groups = [group["params"] for group in optimizer.param_groups]
    trained = [p for group in groups for p in group if p.grad is not None]
    for p in trained:
        p.grad = (p.grad.to_dense() if p.grad.is_sparse else p.grad) / scale
        if "on_gradient" in program.close:
            p.grad *= 0.5
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in trained if p.grad is not None))
    _clip(program, groups)
    optimizer.step()
    return {"loss": float(mean.detach()), "units": units, "norm": norm}


def _event(
    program: Program, model: nn.Module, optimizer: torch.optim.Optimizer, scope: Any
) -> None:
    if program.event == "swap":
        with torch.no_grad():
            for p in model.parameters():
                p *= 0.5
    if program.event == "gain":
        for p in model.parameters():
            p.gain = 0.5  # type: ignore[attr-defined]
    if program.event == "patch":
        scope["activation"] = torch.relu
    if program.event == "rate":
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    if program.event == "freeze":
        optimizer.zero_grad()
        next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)
    if program.event == "group":
        added = [*model.base.requires_grad_(True).parameters()]  # type: ignore[union-attr, operator]
        optimizer.add_param_group({"params": added, "lr": 0.05})
    if program.event == "load":
        with torch.no_grad():
            # Tied weights have two names in a state_dict: each tensor is halved once.
            for value in (*model.parameters(), *model.buffers()):
                if value.is_floating_point():
                    value *= 0.5
