"""One window of training, right, in as many ways as people write it: none may be called wrong."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from tests.verification.loops.mistakes import mean, total, units


def count(micro: dict[str, Tensor]) -> int:
    return int((micro["y"] != -100).sum())


def sums_over_counted_units(model: Any, optimizer: Any, micros: Any) -> None:
    all_units = units(micros)
    for micro in micros:
        (total(model, micro) / all_units).backward()
    optimizer.step()
    optimizer.zero_grad()


def means_times_their_share(model: Any, optimizer: Any, micros: Any) -> None:
    all_units = units(micros)
    optimizer.zero_grad()
    for micro in micros:
        loss = mean(model, micro) * count(micro) / all_units
        loss.backward()
    optimizer.step()


def divided_at_the_end(model: Any, optimizer: Any, micros: Any) -> None:
    seen = 0
    for micro in micros:
        total(model, micro).backward()
        seen += count(micro)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= seen
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def buffers_of_its_own(model: Any, optimizer: Any, micros: Any) -> None:
    parameters = list(model.parameters())
    held = [torch.zeros_like(parameter) for parameter in parameters]
    for micro in micros:
        gradients = torch.autograd.grad(total(model, micro), parameters)
        torch._foreach_add_(held, list(gradients))
    all_units = units(micros)
    for parameter, gradient in zip(parameters, held, strict=True):
        parameter.grad = gradient / all_units
    optimizer.step()
    optimizer.zero_grad()


def one_backward_for_all(model: Any, optimizer: Any, micros: Any) -> None:
    losses = [total(model, micro) for micro in micros]
    (torch.stack(losses).sum() / units(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()


def seeded_backward(model: Any, optimizer: Any, micros: Any) -> None:
    weight = torch.tensor(1.0 / units(micros))
    for micro in micros:
        total(model, micro).backward(gradient=weight)
    optimizer.step()
    optimizer.zero_grad()


def per_token_losses(model: Any, optimizer: Any, micros: Any) -> None:
    all_units = units(micros)
    for micro in micros:
        logits = model(micro["x"]).flatten(0, -2)
        losses = functional.cross_entropy(logits, micro["y"].flatten(), reduction="none")
        (losses.sum() / all_units).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped_once(model: Any, optimizer: Any, micros: Any) -> None:
    all_units = units(micros)
    for index, micro in enumerate(micros):
        (total(model, micro) / all_units).backward()
        if index + 1 == len(micros):
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()


def clipped_by_value(model: Any, optimizer: Any, micros: Any) -> None:
    all_units = units(micros)
    for micro in micros:
        (total(model, micro) / all_units).backward()
    nn.utils.clip_grad_value_(model.parameters(), clip_value=1e-3)
    optimizer.step()
    optimizer.zero_grad()


def warmed_up(model: Any, optimizer: Any, micros: Any) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
    all_units = units(micros)
    for micro in micros:
        (total(model, micro) / all_units).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def with_an_average(model: Any, optimizer: Any, micros: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    all_units = units(micros)
    for micro in micros:
        (total(model, micro) / all_units).backward()
    optimizer.step()
    average.update_parameters(model)
    optimizer.zero_grad()


def functional_gradients(model: Any, optimizer: Any, micros: Any) -> None:
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Any, micro: Any) -> Tensor:
        logits = functional_call(model, weights, (micro["x"],)).flatten(0, -2)
        return functional.cross_entropy(logits, micro["y"].flatten(), reduction="sum")

    held: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in weights.items()}
    for micro in micros:
        for name, gradient in grad(loss)(weights, micro).items():
            held[name] += gradient
    all_units = units(micros)
    for name, parameter in model.named_parameters():
        parameter.grad = held[name] / all_units
    optimizer.step()
    optimizer.zero_grad()


def checkpointed(model: Any, optimizer: Any, micros: Any) -> None:
    all_units = units(micros)
    for micro in micros:
        logits = checkpoint(model, micro["x"], use_reentrant=False).flatten(0, -2)
        loss = functional.cross_entropy(logits, micro["y"].flatten(), reduction="sum")
        (loss / all_units).backward()
    optimizer.step()
    optimizer.zero_grad()


def a_copy_per_micro_batch(model: Any, optimizer: Any, micros: Any) -> None:
    """Replicas on 'workers', reduced by hand."""
    all_units = units(micros)
    for micro in micros:
        worker = copy.deepcopy(model)
        worker.zero_grad()
        total(worker, micro).backward()
        for mine, theirs in zip(model.parameters(), worker.parameters(), strict=True):
            share = theirs.grad / all_units
            mine.grad = share if mine.grad is None else mine.grad + share
    optimizer.step()
    optimizer.zero_grad()


def sample_by_sample(model: Any, optimizer: Any, micros: Any) -> None:
    """Divides further than it is asked to."""
    all_units = units(micros)
    for micro in micros:
        for x, y in zip(micro["x"].split(1), micro["y"].split(1), strict=True):
            (total(model, {"x": x, "y": y}) / all_units).backward()
    optimizer.step()
    optimizer.zero_grad()


def backwards_in_pairs(model: Any, optimizer: Any, micros: Any) -> None:
    iterator = iter(micros)
    all_units = units(micros)
    while pair := list(itertools.islice(iterator, 2)):
        torch.stack([total(model, micro) for micro in pair]).sum().div(all_units).backward()
    optimizer.step()
    optimizer.zero_grad()


def bf16_autocast(model: Any, optimizer: Any, micros: Any) -> None:
    all_units = units(micros)
    for micro in micros:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = total(model, micro) / all_units
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def fp16_with_a_scaler(model: Any, optimizer: Any, micros: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    all_units = units(micros)
    for micro in micros:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = total(model, micro) / all_units
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def accumulator(model: Any, optimizer: Any, micros: Any) -> None:
    acc = wb.Accumulator(model, optimizer, steps=len(micros), clip_norm=1e9)
    for micro in acc.over(micros):
        acc.backward(total(model, micro), units=count(micro))


def whole_batch(model: Any, optimizer: Any, micros: Any) -> None:
    batch = {name: torch.cat([micro[name] for micro in micros]) for name in ("x", "y")}
    loss = lambda model, micro: wb.cross_entropy(model(micro["x"]), micro["y"])  # noqa: E731
    wb.WholeBatch(model, optimizer, loss=loss, micro_batch=3).step(batch)


def stepped_with_a_closure(model: Any, optimizer: Any, micros: Any) -> None:
    """As Lightning does: the window is inside the optimizer's step."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = [total(model, micro) / units(micros) for micro in micros]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).sum().detach()

    optimizer.step(closure)


def stepped_with_a_named_closure(model: Any, optimizer: Any, micros: Any) -> None:
    def closure() -> None:
        backwards(model, micros)

    optimizer.zero_grad()
    optimizer.step(closure=closure)


def backwards(model: Any, micros: Any) -> None:
    for micro in micros:
        (total(model, micro) / units(micros)).backward()


def clipped_in_two_calls(model: Any, optimizer: Any, micros: Any) -> None:
    backwards(model, micros)
    gradients = [p.grad for p in model.parameters()]
    norm = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
    optimizer.step()
    optimizer.zero_grad()


def clipped_in_two_imported_calls(model: Any, optimizer: Any, micros: Any) -> None:
    backwards(model, micros)
    norm = get_total_norm([p.grad for p in model.parameters()])
    clip_grads_with_norm_(model.parameters(), 0.01, norm)
    optimizer.step()
    optimizer.zero_grad()


def an_optimizer_made_inside(model: Any, optimizer: Any, micros: Any) -> None:
    inside = torch.optim.AdamW(model.parameters(), lr=1e-3)
    backwards(model, micros)
    inside.step()
    inside.zero_grad()


def an_optimizer_for_each_part(model: Any, optimizer: Any, micros: Any) -> None:
    parameters = list(model.parameters())
    both = [torch.optim.SGD(some, lr=0.1) for some in (parameters[:2], parameters[2:])]
    for micro in micros:
        (total(model, micro) / units(micros)).backward()
    for one in both:
        one.step()
        one.zero_grad()


def rate_set_before_the_step(model: Any, optimizer: Any, micros: Any) -> None:
    backwards(model, micros)
    for group in optimizer.param_groups:
        group["lr"] = 0.003
    optimizer.step()
    optimizer.zero_grad()


def bf16_clipped_by_value(model: Any, optimizer: Any, micros: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [total(model, micro) / units(micros) for micro in micros]
    for loss in losses:
        loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


RIGHT = [
    sums_over_counted_units,
    means_times_their_share,
    divided_at_the_end,
    buffers_of_its_own,
    one_backward_for_all,
    seeded_backward,
    per_token_losses,
    clipped_once,
    clipped_by_value,
    warmed_up,
    with_an_average,
    functional_gradients,
    checkpointed,
    a_copy_per_micro_batch,
    sample_by_sample,
    backwards_in_pairs,
    bf16_autocast,
    fp16_with_a_scaler,
    accumulator,
    whole_batch,
    stepped_with_a_closure,
    stepped_with_a_named_closure,
    clipped_in_two_calls,
    clipped_in_two_imported_calls,
    an_optimizer_made_inside,
    an_optimizer_for_each_part,
    rate_set_before_the_step,
    bf16_clipped_by_value,
]
