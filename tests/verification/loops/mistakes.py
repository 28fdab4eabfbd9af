"""One window of training, wrong in one way each: what `verify_loop` must tell by name."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_value_

NOMINAL = 4


def mean(model: Any, micro: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(micro["x"]).flatten(0, -2), micro["y"].flatten())


def total(model: Any, micro: dict[str, Tensor]) -> Tensor:
    logits = model(micro["x"]).flatten(0, -2)
    return functional.cross_entropy(logits, micro["y"].flatten(), reduction="sum")


def units(micros: Any) -> int:
    return sum(int((micro["y"] != -100).sum()) for micro in micros)


def not_divided(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        mean(model, micro).backward()
    optimizer.step()
    optimizer.zero_grad()


def not_divided_sums(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        total(model, micro).backward()
    optimizer.step()
    optimizer.zero_grad()


def not_divided_but_clipped(model: Any, optimizer: Any, micros: Any) -> None:
    """Clipping hides the scale wherever it cuts."""
    for micro in micros:
        mean(model, micro).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def divided_twice(model: Any, optimizer: Any, micros: Any) -> None:
    all_units = units(micros)
    for micro in micros:
        loss = total(model, micro) / all_units
        (loss / len(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()


def divided_twice_means(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        loss = mean(model, micro) / len(micros)
        (loss / len(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()


def only_the_last(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        optimizer.zero_grad()
        (mean(model, micro) / len(micros)).backward()
    optimizer.step()


def only_the_last_undivided(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        optimizer.zero_grad()
        mean(model, micro).backward()
    optimizer.step()


def mean_of_means(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        (mean(model, micro) / len(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped_per_micro_batch(model: Any, optimizer: Any, micros: Any) -> None:
    all_units = units(micros)
    for micro in micros:
        (total(model, micro) / all_units).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def clipped_each_alone(model: Any, optimizer: Any, micros: Any) -> None:
    """Each micro-batch's own gradient is clipped, then added."""
    all_units = units(micros)
    parameters = list(model.parameters())
    held = [torch.zeros_like(parameter) for parameter in parameters]
    for micro in micros:
        optimizer.zero_grad()
        (total(model, micro) / all_units).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for sum_, parameter in zip(held, parameters, strict=True):
            sum_ += parameter.grad
    for sum_, parameter in zip(held, parameters, strict=True):
        parameter.grad = sum_
    optimizer.step()
    optimizer.zero_grad()


def nominal_count(model: Any, optimizer: Any, micros: Any) -> None:
    all_units = units(micros)
    for micro in micros:
        (total(model, micro) / all_units * (len(micros) / NOMINAL)).backward()
    optimizer.step()
    optimizer.zero_grad()


def nominal_count_means(model: Any, optimizer: Any, micros: Any) -> None:
    """The usual loop: two mistakes, this one and the mean of means."""
    for index, micro in enumerate(micros):
        (mean(model, micro) / NOMINAL).backward()
        if (index + 1) % NOMINAL == 0 or index + 1 == len(micros):
            optimizer.step()
            optimizer.zero_grad()


def stepped_every_micro_batch(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        (mean(model, micro) / len(micros)).backward()
        optimizer.step()
        optimizer.zero_grad()


def stepped_without_clearing(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        mean(model, micro).backward()
        optimizer.step()
    optimizer.zero_grad()


def tail_dropped(model: Any, optimizer: Any, micros: Any) -> None:
    all_units = units(micros)
    for index, micro in enumerate(micros):
        (total(model, micro) / all_units).backward()
        if (index + 1) % NOMINAL == 0:
            optimizer.step()
            optimizer.zero_grad()


def off_by_one(model: Any, optimizer: Any, micros: Any) -> None:
    for index, micro in enumerate(micros):
        (mean(model, micro) / len(micros)).backward()
        if index % NOMINAL == 0:
            optimizer.step()
            optimizer.zero_grad()


def never_cleared(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        (total(model, micro) / units(micros)).backward()
    optimizer.step()


def last_left_out(model: Any, optimizer: Any, micros: Any) -> None:
    """The step comes before the last backward; what that adds is thrown away."""
    for micro in micros:
        if micro is micros[-1]:
            optimizer.step()
        (total(model, micro) / units(micros)).backward()
    optimizer.zero_grad()


def first_counted_twice(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in [micros[0], *micros]:
        (mean(model, micro) / len(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()


def scheduled_per_micro_batch(model: Any, optimizer: Any, micros: Any) -> None:
    """With half the rate for every step of the schedule: 16 times too small after four."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for micro in micros:
        (total(model, micro) / units(micros)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch notices the first of these itself
            schedule.step()
    optimizer.step()
    optimizer.zero_grad()


def value_clipped_per_micro_batch(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        (total(model, micro) / units(micros)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def value_clipped_by_an_imported_name(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        (total(model, micro) / units(micros)).backward()
        clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def blended_with_an_average(model: Any, optimizer: Any, micros: Any) -> None:
    """The average is written back into the weights that are trained."""
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for micro in micros:
        (total(model, micro) / units(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), average, strict=True):
            parameter.lerp_(old, 0.1)


def clipped_before_the_last(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        if micro is micros[-1]:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        (total(model, micro) / units(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped_before_dividing(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        total(model, micro).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        parameter.grad /= units(micros)
    optimizer.step()
    optimizer.zero_grad()


def value_clipped_before_dividing(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        total(model, micro).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad /= units(micros)
    optimizer.step()
    optimizer.zero_grad()


def weighed_by_samples(model: Any, optimizer: Any, micros: Any) -> None:
    samples = sum(len(micro["y"]) for micro in micros)
    for micro in micros:
        (mean(model, micro) * len(micro["y"]) / samples).backward()
    optimizer.step()
    optimizer.zero_grad()


def weighed_by_padded_tokens(model: Any, optimizer: Any, micros: Any) -> None:
    tokens = sum(micro["y"].numel() for micro in micros)
    for micro in micros:
        (mean(model, micro) * micro["y"].numel() / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def divided_by_padded_tokens(model: Any, optimizer: Any, micros: Any) -> None:
    tokens = sum(micro["y"].numel() for micro in micros)
    for micro in micros:
        (total(model, micro) / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


PLANTED = {
    not_divided: "not-divided",
    not_divided_sums: "not-divided",
    not_divided_but_clipped: "not-divided",
    divided_twice: "divided-twice",
    divided_twice_means: "divided-twice",
    only_the_last: "only-the-last",
    only_the_last_undivided: "only-the-last",
    mean_of_means: "mean-of-means",
    clipped_per_micro_batch: "clipped-per-micro-batch",
    clipped_each_alone: "clipped-per-micro-batch",
    nominal_count: "nominal-count",
    nominal_count_means: "nominal-count",
    stepped_every_micro_batch: "stepped-every-micro-batch",
    stepped_without_clearing: "stepped-every-micro-batch",
    tail_dropped: "no-update",
    off_by_one: "only-the-first",
    never_cleared: "never-cleared",
    last_left_out: "left-out",
    first_counted_twice: "counted-twice",
    scheduled_per_micro_batch: "scheduled-per-micro-batch",
    value_clipped_per_micro_batch: "clipped-per-micro-batch",
    value_clipped_by_an_imported_name: "clipped-per-micro-batch",
    blended_with_an_average: "moved-beside-the-step",
    clipped_before_the_last: "clipped-too-early",
    clipped_before_dividing: "clipped-too-early",
    value_clipped_before_dividing: "clipped-too-early",
}
"""Each loop with the key of the mistake that it makes, the first to be named."""

OTHER_UNITS = [weighed_by_samples, weighed_by_padded_tokens, divided_by_padded_tokens]
"""Loops that are wrong where labels are masked or padded: every label counts in them."""


# ------------------------------------------------------------------------ written in other ways


def divided_after_every_backward(model: Any, optimizer: Any, micros: Any) -> None:
    """What was added before is divided again."""
    for micro in micros:
        mean(model, micro).backward()
        torch._foreach_div_([p.grad for p in model.parameters()], len(micros))
    optimizer.step()
    optimizer.zero_grad()


def running_loss(model: Any, optimizer: Any, micros: Any) -> None:
    """The sum of the losses so far is differentiated again with every micro-batch."""
    so_far: Any = 0.0
    for micro in micros:
        so_far = so_far + total(model, micro) / units(micros)
        so_far.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()


def running_sums_added(model: Any, optimizer: Any, micros: Any) -> None:
    """`.grad` is a running sum already, and is added to another."""
    parameters = list(model.parameters())
    held = [torch.zeros_like(parameter) for parameter in parameters]
    for micro in micros:
        (total(model, micro) / units(micros)).backward()
        torch._foreach_add_(held, [parameter.grad for parameter in parameters])
    for parameter, gradient in zip(parameters, held, strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def clipped_in_a_hook(model: Any, optimizer: Any, micros: Any) -> None:
    def cut(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.002, 0.002)

    hooks = [p.register_post_accumulate_grad_hook(cut) for p in model.parameters()]
    for micro in micros:
        (total(model, micro) / units(micros)).backward()
    for hook in hooks:
        hook.remove()
    optimizer.step()
    optimizer.zero_grad()


def mean_of_a_stack(model: Any, optimizer: Any, micros: Any) -> None:
    torch.stack([mean(model, micro) for micro in micros]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def cleared_in_the_middle(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        if micro is micros[len(micros) // 2]:
            for parameter in model.parameters():
                parameter.grad.zero_()
        (total(model, micro) / units(micros)).backward()
    optimizer.step()
    optimizer.zero_grad()


def head_stepped_every_time(model: Any, optimizer: Any, micros: Any) -> None:
    parameters = list(model.parameters())
    body, head = (torch.optim.SGD(some, lr=0.1) for some in (parameters[:-2], parameters[-2:]))
    for micro in micros:
        (total(model, micro) / units(micros)).backward()
        head.step()
        head.zero_grad()
    body.step()
    body.zero_grad()


def decayed_every_time(model: Any, optimizer: Any, micros: Any) -> None:
    for micro in micros:
        (total(model, micro) / units(micros)).backward()
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.99)
    optimizer.step()
    optimizer.zero_grad()


UNUSUAL_MISTAKES = {
    divided_after_every_backward: "divided-twice",
    running_loss: "counted-twice",
    running_sums_added: "counted-twice",
    clipped_in_a_hook: "clipped-per-micro-batch",
    mean_of_a_stack: "mean-of-means",
    cleared_in_the_middle: "cleared-in-the-window",
    head_stepped_every_time: "stepped-every-micro-batch",
    decayed_every_time: "moved-in-the-window",
}
"""Mistakes that are written in unusual ways, by the key of each."""
