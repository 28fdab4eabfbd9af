"""Lines that a loop has kept, and hosts that are used otherwise than they want."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.mistakes.catalogue import EVERYWHERE, TOUCHED, mistake
from tests.mistakes.kinds import RANDOM, WITH_BATCHNORM
from tests.mistakes.task import Batch, Moment, Task, quotient

# In lock-step (exact BatchNorm) other micro-batches run their backwards while a loss function
# runs, so that what it does to gradients and learning rates cannot be told from theirs.
IN_TURN = frozenset(WITH_BATCHNORM)
LOOP = ("WholeBatch", "Accumulator", "Accumulator, counted", "Accelerate", "Fabric")


def in_the_loop(line: Callable[[Moment], None]) -> Callable[[Task], Task]:
    """A line after every backward of a window but its last one."""

    def stands(moment: Moment) -> None:
        if moment.place == "after backward" and not moment.last:
            line(moment)

    return lambda task: task.but(line=stands)


@mistake(TOUCHED, interfaces=(*LOOP, "Lightning", "Trainer"), never=IN_TURN)
def zero_grad_kept_in_the_loop(task: Task) -> Task:
    return in_the_loop(lambda moment: moment.model.zero_grad())(task)


@mistake(
    TOUCHED, moves=True, interfaces=("WholeBatch", "Accumulator", "Accumulator, counted", "Fabric")
)
def the_optimizers_step_kept_in_the_loop(task: Task) -> Task:
    return in_the_loop(lambda moment: moment.optimizer.step())(task)


@mistake(TOUCHED, interfaces=LOOP)
def a_plain_backward_beside(task: Task) -> Task:
    def line(moment: Moment) -> None:
        if moment.number == 0 and moment.micro is not None:
            quotient(task.sum(moment.model, moment.micro)).backward()

    return in_the_loop(line)(task)


@mistake(TOUCHED + "|clip", interfaces=(*LOOP, "Lightning", "Trainer"), never=IN_TURN)
def clipping_kept_in_the_loop(task: Task) -> Task:
    return in_the_loop(lambda m: nn.utils.clip_grad_norm_(m.model.parameters(), 1e-3) and None)(
        task
    )


@mistake(r"learning rate|schedul|\blr\b", interfaces=(*LOOP, "Lightning", "Trainer"), never=IN_TURN)
def the_schedule_kept_in_the_loop(task: Task) -> Task:
    def line(moment: Moment) -> None:
        for group in moment.optimizer.param_groups:
            group["lr"] *= 0.9

    return in_the_loop(line)(task)


@mistake(
    r"parameter|changed in the middle|modified by an inplace",
    moves=True,
    interfaces=(*LOOP, "Lightning", "Trainer"),
)
def weights_decayed_in_the_loop(task: Task) -> Task:
    @torch.no_grad()
    def line(moment: Moment) -> None:
        for p in moment.model.parameters():
            p.mul_(0.99)

    return in_the_loop(line)(task)


@mistake(r"froz|requires_grad|freez|grad", interfaces=(*LOOP, "Lightning", "Trainer"))
def a_parameter_frozen_in_the_window(task: Task) -> Task:
    def line(moment: Moment) -> None:
        trained = [p for p in moment.model.parameters() if p.requires_grad]
        if moment.number == 0:
            trained[-1].requires_grad_(False)

    return in_the_loop(line)(task)


@mistake(r"gradient", listed=True, interfaces=EVERYWHERE)
def gradients_left_from_before(task: Task) -> Task:
    def line(moment: Moment) -> None:
        if moment.place == "start":
            model, batch = moment.model, task.batch
            state = copy.deepcopy(list(model.buffers()))
            quotient(task.sum(model, batch)).backward()
            for now, was in zip(model.buffers(), state, strict=True):
                now.copy_(was)

    return task.but(line=line)


@mistake(r"gradient|clear", listed=True, interfaces=("Fabric, never cleared",), windows=2)
def gradients_that_the_loop_never_clears(task: Task) -> Task:
    return task


@mistake(r"accumulate", listed=True, interfaces=("Accelerate without accumulate()",))
def a_loop_without_accumulate(task: Task) -> Task:
    return task


@mistake(
    r"never",
    listed=True,
    # Lightning runs backward inside the optimizer's step, after its hooks, divided or not.
    interfaces=tuple(interface for interface in EVERYWHERE if interface != "Lightning"),
    never=frozenset({"complex"} | RANDOM),
)
def a_step_hook_that_wants_whole_gradients(task: Task) -> Task:
    """Not a mistake: it must be exact, with a fused optimizer in float32 too."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.5, fused=True)

        def limit(*_: Any) -> None:
            for p in trained:
                if p.grad is not None:
                    p.grad.mul_(0.02 / p.grad.norm().clamp(min=0.02))

        optimizer.register_step_pre_hook(limit)
        return optimizer

    def single(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    batch = {name: single(leaf) for name, leaf in task.batch.items()}
    return task.but(model=task.model.float(), batch=batch, optimizer=make, tolerance=2e-5)


@mistake(
    r"units",
    listed=True,
    interfaces=("Trainer that prepares inputs",),
    only=frozenset({"weighted samples"}),
)
def units_counted_before_inputs_are_prepared(task: Task) -> Task:
    def truth(model: nn.Module, batch: Batch) -> Tensor:
        return quotient(task.sum(model, heavier(batch)))

    return task.but(truth=truth)


def heavier(micro: Batch) -> Batch:
    """The samples that weigh most: what a trainer's own `_prepare_inputs` leaves over."""
    keep = micro["weight"] > 0.4
    return {name: leaf[keep] for name, leaf in micro.items()}
