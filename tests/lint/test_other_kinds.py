"""Fabric, Accelerate, engines and losses of other modules, as public trainers write them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from wholebatch.lint import lint_paths, lint_source


def codes(source: str) -> set[str]:
    return {f.code for f in lint_source(textwrap.dedent(source))}


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


@pytest.mark.parametrize(
    ("shown", "expected"), [("total", {"WB115"}), ("total / args.accum", set())]
)
def test_a_sum_that_every_window_begins_anew(shown: str, expected: set[str]) -> None:
    source = f"""
        accelerator = Accelerator(gradient_accumulation_steps=args.accum)
        total = 0
        for batch in sampler:
            with accelerator.accumulate(model):
                loss = model(batch).mean()
                total = total + loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                mean = accelerator.gather({shown}).mean()
                total = 0
                writer.add_scalar("loss", mean.item(), step)
    """
    assert codes(source) == expected


def test_a_helper_with_several_answers() -> None:
    """`return True` without accumulation, or the engine's boundary, beside the condition."""
    source = """
        class Trainer:
            def ends(self, done, last):
                if self.engine:
                    return self.model.is_gradient_accumulation_boundary()
                if self.accum > 1:
                    return (done + 1) % self.accum == 0 or last
                return True
            def train(self, loader):
                done = 0
                for i, batch in enumerate(loader):
                    update = self.ends(done, i == len(loader) - 1)
                    (self.model(batch).mean() / self.accum).backward()
                    done += 1
                    if update:
                        self.optimizer.step()
                        self.optimizer.zero_grad()
                        done = 0
    """
    assert codes(source) == {"WB109"}


@pytest.mark.parametrize(("strategy", "expected"), [("ddp", set()), ("any", {"WB112"})])
def test_replicas_that_are_held_beside_shards(strategy: str, expected: set[str]) -> None:
    source = f"""
        def train(model, optimizer, batches, strategy, accum):
            if strategy == "fsdp":
                fully_shard(model)
            for i in range(total):
                last = (i + 1) % accum == 0
                if strategy == "{strategy}" and not last:
                    with model.no_sync():
                        (model(next(batches)).mean() / accum).backward()
                else:
                    (model(next(batches)).mean() / accum).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert codes(source) == expected


@pytest.mark.parametrize(("reduction", "expected"), [("mean", {"WB103"}), ("none", set())])
def test_a_label_that_a_caller_hands_to_a_helper(reduction: str, expected: set[str]) -> None:
    source = f"""
        def loss_of(logits, y, ignore_index, reduction):
            return F.cross_entropy(logits, y, ignore_index=ignore_index, reduction=reduction)
        def train(fabric, model, optimizer, batches, ignore_index, accum):
            for i in range(total):
                x, y = next(batches)
                loss = loss_of(model(x), y, ignore_index, reduction="{reduction}").mean() / accum
                fabric.backward(loss)
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        train(fabric, model, optimizer, batches, tokenizer.pad_token_id, 4)
    """
    assert codes(source) == expected


@pytest.mark.parametrize(
    ("labels", "expected"), [("y", set()), ("torch.cat([y, full(n, pad_id=-1)])", {"WB103"})]
)
def test_a_loss_that_would_leave_labels_out(
    tmp_path: Path, labels: str, expected: set[str]
) -> None:
    """A default `ignore_index` of another module counts where the file makes such labels."""
    (tmp_path / "utils.py").write_text(
        textwrap.dedent("""
            def chunked_cross_entropy(logits, targets, ignore_index: int = -1):
                losses = F.cross_entropy(logits, targets, ignore_index=ignore_index,
                                         reduction="none")
                valid = (targets != ignore_index).sum()
                return losses.sum() / valid
        """)
    )
    (tmp_path / "train.py").write_text(
        textwrap.dedent(f"""
            from utils import chunked_cross_entropy
            for i in range(total):
                x, y = next(batches)
                loss = chunked_cross_entropy(model(x), {labels}) / accum
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """)
    )
    assert {f.code for f in lint_paths([str(tmp_path / "train.py")])} == expected


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


@pytest.mark.parametrize(
    ("mean", "found"),
    [
        ("(per_token * mask).sum() / mask.sum()", True),
        ("((per_token * mask).sum(dim=1) / mask.sum(dim=1)).mean()", False),
        ("(per_token * mask).sum() / num_items_in_batch", False),
    ],
)
def test_a_trainer_may_ignore_the_tokens_that_it_is_given(mean: str, found: bool) -> None:
    reported = codes(f"""
        class PolicyTrainer(Trainer):
            def __init__(self, args):
                self.buffer = [None] * args.gradient_accumulation_steps

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                mask = inputs["mask"]
                per_token = self.per_token(model, inputs)
                loss = {mean}
                share = (per_token.detach() * mask).sum() / mask.sum()
                self.metrics.append(share)
                return loss
    """)
    assert ("WB103" in reported) is found


@pytest.mark.parametrize(
    ("own", "found"), [("self.compute_loss(model, inputs)", True), ("model(inputs).loss", False)]
)
def test_a_training_step_of_ones_own_may_call_compute_loss(own: str, found: bool) -> None:
    reported = codes(f"""
        class TokenTrainer(Trainer):
            def training_step(self, model, inputs, num_items_in_batch=None):
                loss = {own} / self.args.gradient_accumulation_steps
                self.accelerator.backward(loss)
                return loss.detach()

            def compute_loss(self, model, inputs):
                logits = model(inputs["x"])
                return F.cross_entropy(logits, inputs["y"], ignore_index=-100)
    """)
    assert ("WB103" in reported) is found


@pytest.mark.parametrize(("labels", "found"), [("-100", True), ("0", False)])
def test_a_module_that_calls_itself_is_the_model(labels: str, found: bool) -> None:
    reported = codes(f"""
        class Tuned(LightningModule):
            def __init__(self):
                self.lm = AutoModelForCausalLM.from_pretrained("gpt2")

            def forward(self, **inputs):
                return self.lm(**inputs)

            def training_step(self, batch, batch_idx):
                inputs = dict(input_ids=batch[0])
                inputs["labels"] = batch[0].masked_fill(batch[1] == 0, {labels})
                outputs = self(**inputs)
                return outputs[0]

        trainer = Trainer(accumulate_grad_batches=steps)
    """)
    assert ("WB103" in reported) is found


@pytest.mark.parametrize(
    ("length", "found"),
    [
        ("len(self.trainer.datamodule.train_dataloader()) * self.epochs", True),
        ("len(self.loader) * self.epochs // self.trainer.accumulate_grad_batches", False),
        ("self.trainer.estimated_stepping_batches", False),
    ],
)
def test_lightning_steps_a_schedule_once_per_update(length: str, found: bool) -> None:
    reported = codes(f"""
        class Net(LightningModule):
            def training_step(self, batch, batch_idx):
                return self.loss(self.net(batch))

            def configure_optimizers(self):
                optimizer = AdamW(self.parameters())
                total = {length}
                schedule = get_linear_schedule_with_warmup(optimizer, 100, total)
                return [optimizer], [dict(scheduler=schedule, interval="step")]

        trainer = Trainer(accumulate_grad_batches=8)
    """)
    assert ("WB116" in reported) is found


@pytest.mark.parametrize(
    ("update", "found"),
    [
        ("grads", True),
        ("jax.tree_util.tree_map(lambda g: g / accum_steps, grads)", False),
    ],
)
def test_gradients_that_jax_adds_up_are_divided_once(update: str, found: bool) -> None:
    source = f"""
        import jax
        import jax.numpy as jnp
        import optax

        def train(params, state, loader, tx, accum_steps):
            grads = None
            for i, batch in enumerate(loader):
                loss, new = grad_fn(params, batch)
                grads = new if grads is None else jax.tree_util.tree_map(jnp.add, grads, new)
                if (i + 1) % accum_steps == 0:
                    updates, state = tx.update({update}, state, params)
                    params = optax.apply_updates(params, updates)
                    grads = None
            return params
    """
    assert ("WB101" in codes(source)) is found


def test_a_masked_mean_that_jax_adds_up_by_hand() -> None:
    source = """
        import jax, optax

        def loss_fn(params, batch):
            losses = optax.softmax_cross_entropy_with_integer_labels(f(params, batch.x), batch.y)
            return (losses * batch.mask).sum() / batch.mask.sum()

        def accumulate(params, batches, grad_accum):
            total = jax.grad(loss_fn)(params, batches[0])
            for batch in batches[1:]:
                new = jax.grad(loss_fn)(params, batch)
                total = jax.tree.map(lambda a, g: a + g, total, new)
            return optax.apply_updates(params, jax.tree.map(lambda g: g / grad_accum, total))
    """
    assert {"WB101", "WB103"} & codes(source) == {"WB103"}
