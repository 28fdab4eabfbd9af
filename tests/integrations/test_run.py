"""Graphs of micro-batches inside Accelerate, Fabric and Lightning: the undivided batch's update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import wholebatch as wb
from tests.support import EXACT, Whole, distance, mlp, pieces, samples, sgd
from wholebatch.compile import ExecuteWarning

pytestmark = [
    pytest.mark.usefixtures("graphs_run_as_traced"),
    pytest.mark.filterwarnings("ignore", "error:execute="),
]
SIZES = ((3, 1, 4), (3, 1, 4), (2, 5, 3), (4, 4, 4), (3, 1, 4), (1, 3))
"""Micro-batches of windows of three; the last is a short one."""


def parts() -> list[list[dict[str, Tensor]]]:
    return [pieces(samples(sum(sizes)), sizes) for sizes in SIZES]


def joined(window: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([micro[name] for micro in window]) for name in ("x", "y")}


def loss_of(model: nn.Module) -> Callable[[dict[str, Tensor]], wb.Loss]:
    def loss(batch: dict[str, Tensor]) -> wb.Loss:
        logits = model(batch["x"])
        hits = (logits.argmax(-1) == batch["y"]).sum()
        found = wb.cross_entropy(logits, batch["y"])
        return wb.Loss(found.total, found.units, extras={"hits": hits})

    return loss


def reference(model: nn.Module) -> Whole:
    whole = Whole(model, clip_norm=0.2)
    for window in parts():
        whole.step(joined(window))
    return whole


def test_accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from wholebatch.integrations.accelerate import AccelerateAccumulator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    model = mlp()
    whole = reference(model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    micros = [micro for window in parts() for micro in window]
    given: Any = DataLoader(micros, batch_size=None)  # type: ignore[arg-type]
    prepared, optimizer, loader = accelerator.prepare(model, sgd(model), given)
    windows = AccelerateAccumulator(accelerator, prepared, optimizer, execute="compile")
    loss = loss_of(prepared)
    losses, modes = [], set()
    for index, batch in enumerate(loader):
        with accelerator.accumulate(prepared):
            if index % 2:
                plain = functional.cross_entropy(prepared(batch["x"]), batch["y"])
                settled = windows.backward(mean=plain, units=len(batch["y"]))
            else:
                settled = windows.run(loss, batch)
                modes.add(windows._functions[loss].executor.mode)
            if accelerator.sync_gradients:
                assert settled is not None
                losses.append(settled.loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
    whole.assert_same(model)
    assert len(losses) == 6
    assert "operations" in modes
    assert windows._functions[loss].executor.kinds.changes == 0


def test_fabric() -> None:
    from lightning.fabric import Fabric

    from wholebatch.integrations.lightning import FabricAccumulator

    model = mlp()
    fabric = Fabric(accelerator="cpu", devices=1)
    set_up, optimizer = fabric.setup(model, sgd(model))
    windows = FabricAccumulator(fabric, set_up, optimizer, execute="compile")
    loss = loss_of(set_up)
    whole = reference(model)
    for window in parts():
        for index, micro in enumerate(window):
            last = index + 1 == len(window)
            with fabric.no_backward_sync(set_up, enabled=not last):
                windows.run(loss, micro, last=last)
        fabric.clip_gradients(set_up, optimizer, max_norm=0.2)
        optimizer.step()
        optimizer.zero_grad()
    assert windows._functions[loss].executor.mode == "operations"
    assert windows._functions[loss].executor.kinds.changes == 0
    whole.assert_same(model)


def fitted(model: nn.Module, body: Callable[[Any, Any, int], Any], **options: Any) -> Any:
    """Train in Lightning; return the module, with what it logged after each batch."""
    from lightning.pytorch import LightningModule, Trainer

    from wholebatch.integrations.lightning import ExactAccumulation

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.metrics: list[dict[str, float]] = []
            self.outputs: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return body(self, batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.metrics.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})
            self.outputs.append(outputs)
            assert windows._step is not None
            executor = windows._step.executor
            modes.append(executor.mode)
            changes.append(executor.kinds.changes)

        def configure_optimizers(self) -> Any:
            return sgd(self)

    modes: list[str] = []
    changes: list[float] = []
    windows = ExactAccumulation(units=lambda batch: len(batch["y"]), execute="compile", **options)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=3,
        gradient_clip_val=0.2,
        callbacks=[windows],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    micros = [micro for window in parts() for micro in window]
    trainer.fit(module, DataLoader(micros, batch_size=None))  # type: ignore[arg-type]
    assert max(changes) == 0  # no graph is made again
    return module, modes


def test_lightning() -> None:
    model = mlp()
    whole = reference(model)

    def body(module: Any, batch: Any, batch_idx: int) -> Any:
        logits = module.model(batch["x"])
        loss = functional.cross_entropy(logits, batch["y"])
        hits = (logits.argmax(-1) == batch["y"]).double().mean()
        module.log("hits", hits, on_step=True)
        module.log_dict({"loss": loss}, on_step=True)
        return {"loss": loss, "logits": logits}

    with torch.no_grad():
        before = model(parts()[0][0]["x"])
    module, modes = fitted(model, body)
    whole.assert_same(model)
    assert modes[-1] == "operations"
    assert distance([module.outputs[0]["logits"]], [before]) < EXACT
    # Logged at every batch, by eager code and by graphs: the means of the micro-batches.
    assert all(metrics.keys() == {"hits", "loss"} for metrics in module.metrics)
    for metrics, output in zip(module.metrics, module.outputs, strict=True):
        # Lightning divides the loss by its number of micro-batches, for the backward.
        assert metrics["loss"] == pytest.approx(3 * float(output["loss"]), rel=1e-6)
    assert len({metrics["loss"] for metrics in module.metrics}) > 10


@pytest.mark.parametrize("what", ["number", "batch_idx"])
def test_a_training_step_that_a_graph_cannot_hold_runs_eagerly(what: str) -> None:
    model = mlp()
    whole = reference(model)

    def body(module: Any, batch: Any, batch_idx: int) -> Any:
        loss = functional.cross_entropy(module.model(batch["x"]), batch["y"])
        if what == "number":
            module.log("number", 3.0)
        elif batch_idx % 2:
            module.log("odd", loss)
        return loss

    with pytest.warns(ExecuteWarning, match={"number": "not a tensor"}.get(what, "")):
        _, modes = fitted(model, body)
    whole.assert_same(model)
    assert set(modes) == {"eager"}
