"""Fabric, Accelerate, engines and losses of other modules, as public trainers write them."""

from __future__ import annotations

import textwrap

import pytest

from wholebatch.lint import Settings, lint_source

RULES_ONLY = Settings(select=("WB1",))


def codes(source: str) -> set[str]:
    return {f.code for f in lint_source(textwrap.dedent(source), settings=RULES_ONLY)}


@pytest.mark.parametrize(("length", "final"), [(16, 0.75), (4, 0.0)])
def test_accelerate_steps_a_prepared_schedule_once_per_update(length: int, final: float) -> None:
    """WB116 rests on this: a schedule as long as the micro-batches gets 1/K of the way."""
    accelerate = pytest.importorskip("accelerate")
    import torch
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = torch.utils.data.DataLoader(torch.ones(16, 2), batch_size=1)  # type: ignore[arg-type]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / length)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert schedule.get_last_lr() == [final]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_an_error_is_no_boundary() -> None:
    source = """
        accelerator = Accelerator(gradient_accumulation_steps=args.accum)
        for batch in loader:
            if kind == "epsilon":
                target = noise
            else:
                raise ValueError(kind)
            loss = F.mse_loss(model(batch), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    """
    assert codes(source) == {"WB119"}
