"""The same window with other libraries, right: some divide by the steps, which is undone."""

from __future__ import annotations

from typing import Any

from tests.verification.loops.mistakes import mean, total, units


def accelerate_accumulate(model: Any, optimizer: Any, micros: Any) -> None:
    """`accelerator.backward` divides by the steps: the loss is multiplied by them before."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=len(micros), cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    all_units = units(micros)
    for index, micro in enumerate(micros):
        accelerator.gradient_state._set_sync_gradients(index + 1 == len(micros))
        loss = total(model, micro) * accelerator.gradient_accumulation_steps / all_units
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def accelerate_by_hand(model: Any, optimizer: Any, micros: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    all_units = units(micros)
    for micro in micros[:-1]:
        with accelerator.no_sync(model):
            accelerator.backward(total(model, micro) / all_units)
    accelerator.backward(total(model, micros[-1]) / all_units)
    optimizer.step()
    optimizer.zero_grad()


def accelerate_wrong(model: Any, optimizer: Any, micros: Any) -> None:
    """Divided by Accelerate, and by the loop once more."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=len(micros), cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for micro in micros:
        with accelerator.accumulate(model):
            accelerator.backward(mean(model, micro) / len(micros))
    accelerator.gradient_state._set_sync_gradients(True)
    optimizer.step()
    optimizer.zero_grad()


def fabric_loop(model: Any, optimizer: Any, micros: Any) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, optimizer)
    all_units = units(micros)
    for index, micro in enumerate(micros):
        is_last = index + 1 == len(micros)
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(total(model, micro) / all_units)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()


def fabric_bf16(model: Any, optimizer: Any, micros: Any) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model, optimizer = fabric.setup(model, optimizer)
    all_units = units(micros)
    for micro in micros:
        fabric.backward(total(model, micro) / all_units)
    optimizer.step()
    optimizer.zero_grad()
