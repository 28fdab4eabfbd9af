"""Values are followed through helpers, objects, dictionaries and other modules of the package."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from wholebatch.lint import lint_paths, lint_source
from wholebatch.lint.fix import fix_text
from wholebatch.lint.lint_settings import Settings


def codes(source: str) -> set[str]:
    return {f.code for f in lint_source(textwrap.dedent(source))}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a folder of modules, with the parts of a step in another module."""
    (tmp_path / "parts.py").write_text(
        textwrap.dedent("""
            import torch
            from torch import nn

            class SpanLoss(nn.Module):
                def forward(self, out, mask):
                    count = torch.sum(mask)
                    return (self.token_loss(out) * mask).sum() / count

            class Summed(nn.Module):
                def forward(self, x, y):
                    return nn.CrossEntropyLoss(reduction="sum")(self.head(x), y)

            def scaled_backward(loss, accum):
                (loss / accum).backward()

            def update(optimizer, state, accum):
                optimizer.zero_grad()
                if (state["index"] + 1) % accum == 0:
                    optimizer.step()

            def whole_loop(model, optimizer, loader, accum):
                for i, x in enumerate(loader):
                    model(x).mean().backward()
                    if (i + 1) % accum == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        """)
    )
    return tmp_path


def checked(folder: Path, source: str) -> set[str]:
    (folder / "train.py").write_text(textwrap.dedent(source))
    return {f.code for f in lint_paths([str(folder / "train.py")], settings=Settings())}


def test_parts_of_the_step_in_another_module(package: Path) -> None:
    source = """
        from parts import scaled_backward, update
        def train(model, optimizer, loader, accum):
            state = {}
            for i, x in enumerate(loader):
                state["index"] = i
                scaled_backward(model(x).mean(), accum)
                update(optimizer, state, accum)
    """
    assert checked(package, source) == {"WB104", "WB109"}
    # What is in another file is not edited from here.
    text = (package / "train.py").read_text()
    assert fix_text(text, Settings(), path=str(package / "train.py")) == (text, 0)


def test_a_whole_loop_of_another_module_is_read_there(package: Path) -> None:
    source = """
        from parts import whole_loop
        for epoch in range(3):
            whole_loop(model, optimizer, loader, 4)
            loss.backward(); optimizer.zero_grad()
    """
    assert checked(package, source) == set()
    assert {f.code for f in lint_paths([str(package / "parts.py")])} == {"WB101", "WB109"}


LOOP = """
    import parts
    from parts import {made}
    def train(model: {made}, optimizer, batches, accum, total):
        criterion = {made}()
        for i in range(total):
            x, y = next(batches)
            loss = {loss}
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("made", "loss", "expected"),
    [
        ("SpanLoss", "criterion(model(x), y) / accum", {"WB103"}),
        ("SpanLoss", "model(x, y).mean()", {"WB101", "WB103"}),
        ("Summed", "model(x, y)", set()),  # A sum must not be divided.
    ],
)
def test_classes_of_another_module(package: Path, made: str, loss: str, expected: set[str]) -> None:
    assert checked(package, LOOP.format(made=made, loss=loss)) == expected


BODY = """
    def train(model, optimizer, loader, accum, writer, cfg):
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            {before}
            {backward}
            if (i + 1) % accum == 0{tail}:
                optimizer.step()
                optimizer.zero_grad()
                {log}
"""


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({"log": "writer.step_train(i, float(loss))"}, "WB115"),
        ({"log": "print(metrics['loss'])", "before": "metrics = {'loss': loss.item()}"}, "WB115"),
        ({"log": "pass", "before": "writer.add_scalar('l', loss.item() * accum, i)"}, "WB115"),
        (
            {
                "log": "print(sum(v for v in losses.values()).item())",
                "before": "losses = criterion(x); loss = sum(losses[k] for k in losses)",
            },
            "WB115",
        ),
    ],
    ids=["a writer's own method", "an entry", "K times too large", "a comprehension"],
)
def test_logged_losses(parts: dict[str, str], code: str) -> None:
    defaults = {"before": "pass", "backward": "(loss / accum).backward()", "tail": " or i == last"}
    assert code in codes(BODY.format(**{**defaults, **parts}))
    assert code not in codes(BODY.format(**defaults, log="pass"))


def test_a_flag_that_both_branches_set() -> None:
    source = """
        def train(model, optimizer, loader, accum):
            n = 0
            for x in loader:
                n += 1
                if n == accum:
                    is_last, n = True, 0
                    last = True
                    n = 0
                else:
                    last = False
                step(model, optimizer, x, last, accum)

        def step(model, optimizer, x, last, accum, evaluate=False):
            loss = model(x).mean() / accum
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    """
    assert codes(source) == {"WB109"}


def test_methods_of_another_object() -> None:
    source = """
        class Runner:
            def __init__(self, model, optimizer):
                self.model, self.optimizer = model, optimizer
            def backward(self, loss):
                loss.backward()
            def step(self):
                self.optimizer.step()
                self.optimizer.zero_grad()

        def run_epoch(runner: Runner, loader, accum):
            for i, x in enumerate(loader):
                runner.backward(runner.model(x).mean())
                if (i + 1) % accum == 0:
                    runner.step()
    """
    assert codes(source) == {"WB101", "WB109"}


def test_ddp_in_a_function_beside() -> None:
    loop = """
            for i, x in enumerate(loader):
                (model(x).mean() / accum).backward()
                if (i + 1) % accum == 0 or i + 1 == n:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    alone = f"""
        def on_one_device(model, optimizer, loader, accum, n):
            {loop.strip()}
        def on_many(model, optimizer, loader, accum):
            model = DistributedDataParallel(model)
            model(next(loader)).mean().backward()
            optimizer.step()
    """
    assert "WB111" not in codes(alone)
    called = alone.replace("model(next(loader)).mean().backward()", "on_one_device(model)")
    assert "WB111" in codes(called)


def test_parts_of_a_split_that_may_be_uneven() -> None:
    source = """
        def train(model, optimizer, loader, size):
            for x, y in loader:
                optimizer.zero_grad()
                micros = list(zip(x.split(size), y.split(size)))
                for a, b in micros:
                    (F.cross_entropy(model(a), b{more}) / len(micros)).backward()
                optimizer.step()
    """
    assert codes(source.format(more="")) == {"WB103"}
    assert codes(source.format(more=", reduction='sum'")) == set()


def test_clearing_at_the_start_of_a_window_loses_the_tail() -> None:
    source = """
        def train(model, optimizer, loader, accum):
            for i, x in enumerate(loader):
                if i % accum == 0:
                    optimizer.zero_grad()
                (model(x).mean() / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
    """
    assert codes(source) == {"WB109"}


@pytest.mark.parametrize(("length", "expected"), [("steps", {"WB116"}), ("steps // accum", set())])
def test_a_schedule_as_long_as_the_clock(length: str, expected: set[str]) -> None:
    source = f"""
        def build(args, steps):
            optimizer = BertAdam(params, t_total=args.{length})
            return optimizer
        def train(model, optimizer, batches, args, accum):
            clock = 1
            while True:
                if clock == args.steps + 1:
                    break
                (model(next(batches)).mean() / accum).backward()
                if clock % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                clock += 1
    """
    assert codes(source) == expected


@pytest.mark.parametrize(
    ("total", "every", "expected"),
    [
        ("total = [a + g for a, g in zip(total, found)]", "(step + 1) % n_accum == 0", "101 109"),
        ("total = [a + g / k for a, g in zip(total, found)]", "(step + 1) % k == 0", "109"),
        ("total = [a + g for a, g in zip(total, found)]", "step % 4 == 0", "101 109 110"),
        ("for s, g in zip(total, found): s.assign_add(g)", "not (step + 1) % k", "101 109"),
        ("total = found", "step % n_critic == 0", ""),  # a second network's turn
    ],
)
def test_a_tape_that_accumulates_is_read(total: str, every: str, expected: str) -> None:
    source = f"""
        import tensorflow as tf
        for step, (x, y) in enumerate(data):
            with tf.GradientTape() as tape:
                loss = loss_of(model(x), y)
            found = tape.gradient(loss, weights)
            {total}
            if {every}:
                optimizer.apply_gradients(zip(total, weights))
    """
    assert codes(source) - {"WB003"} == {f"WB{code}" for code in expected.split()}


@pytest.mark.parametrize(
    ("divided", "expected"),
    [
        ("", {"WB101", "WB113"}),
        ("self.total[i] / self.k", {"WB101", "WB113"}),  # a quotient that nobody keeps
        ("self.total[i].assign(self.total[i] / self.k)", {"WB113"}),
    ],
)
def test_a_keras_model_that_accumulates_is_read(divided: str, expected: set[str]) -> None:
    source = f"""
        import tensorflow as tf
        class Accumulating(tf.keras.Model):
            def __init__(self, k, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.k = tf.constant(k)
                self.count = tf.Variable(0, trainable=False)
                self.total = [tf.Variable(tf.zeros_like(v)) for v in self.trainable_variables]
            def train_step(self, data):
                self.count.assign_add(1)
                x, y = data
                with tf.GradientTape() as tape:
                    loss = self.compiled_loss(y, self(x, training=True))
                for i, grad in enumerate(tape.gradient(loss, self.trainable_variables)):
                    self.total[i].assign_add(grad)
                tf.cond(tf.equal(self.count, self.k), self.update, lambda: None)
            def update(self):
                for i in range(len(self.total)):
                    {divided or "pass"}
                self.optimizer.apply_gradients(zip(self.total, self.trainable_variables))
                self.count.assign(0)
        layers = [tf.keras.layers.BatchNormalization()]
    """
    assert codes(source) - {"WB003"} == expected


@pytest.mark.parametrize(
    ("count", "by", "expected"),
    [
        ("jnp.sum(mask)", "accum_steps", {"WB103"}),
        ("labels.shape[0]", "accum_steps", set()),
        ("jnp.sum(mask)", "total_tokens", set()),
    ],
)
def test_masked_means_that_jax_averages(count: str, by: str, expected: set[str]) -> None:
    source = f"""
        import jax
        import jax.numpy as jnp
        import optax
        def loss_of(params, x, labels):
            mask = labels != 0
            number = {count}
            return -jnp.sum(apply(params, x) * mask) / number
        def train(params, state, batches, accum_steps, total_tokens):
            grads_accum = zeros(params)
            for step, (x, labels) in enumerate(batches):
                grads = jax.value_and_grad(loss_of)(params, x, labels)[1]
                grads_accum = jax.tree_util.tree_map(
                    lambda a, g: a + g / {by}, grads_accum, grads)
                if (step + 1) % accum_steps == 0:
                    updates, state = optimizer.update(grads_accum, state)
                    params = optax.apply_updates(params, updates)
    """
    assert codes(source) - {"WB003"} == expected


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("(1 - ratio) * F.l1_loss(model(x), y) + ratio * F.mse_loss(model(x), y)", {"WB101"}),
        ("F.cross_entropy(head(h[mask]), y[mask].clone()) / accum", {"WB103"}),
        ("torch.sum(nll * mask.view(-1)) / torch.sum(mask.view(-1), dim=0) / accum", {"WB103"}),
        ("(torch.eq(labels, labels.T) * nll).mean() / accum", set()),
        ("F.mse_loss(model(x), y) / opt.accum", set()),
    ],
)
def test_forms_of_losses_in_public_loops(loss: str, expected: set[str]) -> None:
    source = f"""
        restarted = -100
        def train(model, loader, optimizer, ratio, accum, start):
            for step, (x, y, labels) in enumerate(loader, start=start + 1):
                nll, h = forward(model, x)
                mask = (nll != 0).int()
                loss = {loss}
                loss.backward()
                if step % accum == 0:
                    optimizer.step(lr)
                    optimizer.zero_grad()
    """
    assert codes(source) - {"WB109"} == expected


def test_two_optimizers_in_turn_are_no_window() -> None:
    source = """
        for step, x in enumerate(loader):
            losses = criterion(model(x))
            if step % 2 == 0:
                opt_ae.zero_grad()
                losses["ae"].backward()
                opt_ae.step()
            else:
                opt_disc.zero_grad()
                losses["disc"].backward()
                opt_disc.step()
    """
    assert codes(source) == set()


@pytest.mark.parametrize(("mode", "expected"), [("eval", set()), ("train", {"WB113"})])
def test_batchnorm_in_eval_mode_is_frozen(mode: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        self.norm = nn.BatchNorm2d(3)\n"
    )
    source = f"""
        from nets import Net
        normal_net = Net()
        normal_net.{mode}()
        for step in range(steps):
            for _ in range(accum):
                (F.mse_loss(model(next(data)), normal_net(x)) / accum).backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(source))
    assert {f.code for f in lint_paths([str(file)])} == expected


def test_the_last_losses_of_a_helper() -> None:
    source = """
        def micro(x, share):
            loss = F.mse_loss(model(x), x) * share
            loss.backward()
            return dict(loss=loss.item())
        for batch in loader:
            optimizer.zero_grad()
            for i in range(0, len(batch), micro_batch_size):
                part = batch[i : i + micro_batch_size]
                status = micro(part, part.shape[0] / len(batch))
            optimizer.step()
            tracker.log(status)
    """
    assert codes(source) == {"WB115"}


def test_the_loss_of_a_trainer_in_a_part_of_it() -> None:
    source = """
        labels[labels == pad] = -100
        class Distillation:
            def __init__(self):
                self.cross_entropy = torch.nn.CrossEntropyLoss()
            def total(self, logits, labels):
                return self.cross_entropy(logits.view(-1, 5), labels.view(-1))
        class Distilling(Trainer):
            def __init__(self, config):
                self.parts = Distillation()
                self.args = TrainingArguments(gradient_accumulation_steps=config.accum)
            def compute_loss(self, model, inputs):
                return self.parts.total(model(**inputs).logits, inputs["labels"])
    """
    assert codes(source) == {"WB103"}


@pytest.mark.parametrize(
    ("added", "expected"), [("loss.item()", {"WB115"}), ("loss.item() / accum", set())]
)
def test_a_sum_of_losses_that_is_shown_as_it_is(added: str, expected: set[str]) -> None:
    source = f"""
        for step in range(steps):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(accum):
                loss = model.compute_loss(next(data))
                total += {added}
                (loss / accum).backward()
            optimizer.step()
            pbar.set_postfix(loss=f"{{total:.4f}}")
    """
    assert codes(source) == expected


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("mask.sum() / whole", set()),  # its share of the batch's tokens
        ("0.5", {"WB101", "WB103"}),
    ],
)
def test_a_mean_that_is_weighed_by_its_tokens(weight: str, expected: set[str]) -> None:
    source = f"""
        def masked(losses, mask):
            return (losses * mask).sum() / mask.sum().clamp_min(1.0)
        for batch in loader:
            optimizer.zero_grad()
            for lo in range(0, len(batch), micro_batch_size):
                losses, mask = forward(model, batch[lo : lo + micro_batch_size])
                share = {weight}
                (masked(losses, mask) * share).backward()
            optimizer.step()
    """
    assert codes(source) == expected


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("(nll(x) * m).sum() / count(m)", {"WB103"}),
        ("(nll(x) / lengths(m)).sum() / len(m)", set()),  # each sample by its own length
        ("Criterion(m)(x, batch.ntokens)", {"WB103"}),
        ("(nll(x) * m).sum() / whole", set()),
    ],
)
def test_a_divisor_that_the_data_decide(loss: str, expected: set[str]) -> None:
    source = f"""
        class Criterion:
            def __call__(self, x, norm):
                return self.sum_of(x) / norm
        def count(m):
            selected = (m != 0).sum()
            return selected.float().clamp(min=1.0)
        def train(model, optimizer, batches, accum, whole):
            for batch in batches:
                m, x = batch.mask, model(batch.x)
                criterion = Criterion(m)
                loss = {loss.replace("Criterion(m)(", "criterion(")}
                (loss / accum).backward()
                batch_count += 1
                if batch_count % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert codes(source) & {"WB103"} == expected


@pytest.mark.parametrize(
    ("added", "shown", "expected"),
    [
        ("loss.item()", "total / every", {"WB115"}),  # undivided, over updates
        ("loss.item()", "total / (every * accum)", set()),
        ("scaled.item()", "total / every", set()),
        ("scaled.item()", "total / seen", {"WB115"}),  # divided, over micro-batches
        ("scaled.item() * accum", "total / seen", set()),
        ("loss.item()", "total * accum / seen", {"WB115"}),
        ("loss.item() * share", "total / every", set()),  # a share of the window
    ],
)
def test_the_powers_of_k_in_a_mean(added: str, shown: str, expected: set[str]) -> None:
    source = f"""
        def train(model, optimizer, batches, accum, every):
            total, seen, updates = 0.0, 0, 0
            for x, y in batches:
                loss = F.mse_loss(model(x), y)
                share = len(x) / size
                scaled = loss / accum
                scaled.backward()
                total += {added}
                seen += 1
                if seen % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    updates += 1
                    if updates % every == 0:
                        print({shown})
    """
    assert codes(source) & {"WB115"} == expected


def test_nothing_and_a_loss() -> None:
    """A helper that returns None and 0.0 for an empty batch still returns the loss."""
    source = """
        def loss_of(model, x):
            if x is None:
                return None, 0.0
            loss = model(x).mean()
            return loss, loss.item()
        def train(model, optimizer, batches, accum):
            for i in range(total):
                loss, shown = loss_of(model, next(batches))
                if loss is not None:
                    (loss / accum).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    print(shown)
    """
    assert codes(source) == {"WB105", "WB115"}


def test_a_flush_after_the_outer_loop() -> None:
    source = """
        def train(model, optimizer, groups, accum):
            done = 0
            for group in groups:
                for x in group:
                    (model(x).mean() / accum).backward()
                    done += 1
                    if done % accum == 0:
                        optimizer.step()
                        optimizer.zero_grad()
            if done % accum != 0:
                optimizer.step()
    """
    assert codes(source) == {"WB109"}
    assert (
        codes(source.replace("if done % accum != 0:\n                optimizer.step()", ""))
        == set()
    )


@pytest.mark.parametrize("labels", ["torch.arange(x.size(0))", "y"])
def test_the_samples_of_a_batch_as_classes(labels: str) -> None:
    source = f"""
        def train(model, optimizer, batches, accum):
            for i in range(total):
                x, y = next(batches)
                rows, columns = model(x)
                labels = {labels}
                loss = nn.CrossEntropyLoss()(rows, labels)
                loss = (loss + F.cross_entropy(columns, labels)) / 2
                (loss / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert codes(source) == ({"WB114"} if "arange" in labels else set())


def test_a_method_of_a_class_under_src(tmp_path: Path) -> None:
    (tmp_path / "src" / "nets").mkdir(parents=True)
    (tmp_path / "src" / "nets" / "speech.py").write_text(
        textwrap.dedent("""
            import torch.nn.functional as F
            class Speech:
                def compute_loss(self, out, mask):
                    loss = F.l1_loss(out, self.target, reduction="none") * mask
                    return loss.sum() / mask.sum()
        """)
    )
    source = """
        from nets.speech import Speech
        def train(optimizer, batches, accum):
            model = Speech()
            for i in range(1000):
                x, mask = next(batches)
                loss = model.compute_loss(model(x), mask)
                (loss / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert checked(tmp_path, source) == {"WB103"}


@pytest.mark.parametrize(
    ("given", "place", "expected"),
    [
        ("len(loader) * args.epochs", "loop", set()),
        ("args.updates", "loop", {"WB107"}),
        ("args.updates", "boundary", set()),
    ],
)
def test_a_schedule_of_another_module_may_read_its_length_from_the_settings(
    given: str, place: str, expected: set[str], tmp_path: Path
) -> None:
    (tmp_path / "parts.py").write_text(
        "def build(args, model):\n"
        "    optimizer = AdamW(model.parameters())\n"
        "    return optimizer, LinearLR(optimizer, total_iters=args.training_steps)\n"
    )
    found = checked(
        tmp_path,
        f"""
        from parts import build

        def train(model, loader, args):
            args.training_steps = {given}
            optimizer, scheduler = build(args, model)
            for i, batch in enumerate(loader):
                (model(batch).mean() / args.accum).backward()
                if (i + 1) % args.accum == 0 or i + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
                    {"scheduler.step()" if place == "boundary" else ""}
                {"scheduler.step()" if place == "loop" else ""}
        """,
    )
    assert found & {"WB107"} == expected


@pytest.mark.parametrize("divided", ["", " // accum"])
def test_a_factory_of_another_module_is_handed_the_length_of_a_schedule(
    divided: str, tmp_path: Path
) -> None:
    (tmp_path / "parts.py").write_text(
        "def build(model, batches, epochs, accum=4):\n"
        "    optimizer = AdamW(model.parameters())\n"
        f"    return optimizer, LinearLR(optimizer, total_iters=batches{divided} * epochs)\n"
        if divided
        else "def build(model, batches, epochs):\n"
        "    optimizer = AdamW(model.parameters())\n"
        "    return optimizer, LinearLR(optimizer, total_iters=batches * epochs)\n"
    )
    found = checked(
        tmp_path,
        """
        from parts import build

        def train(model, loader, args):
            optimizer, scheduler = build(model, len(loader), args.epochs)
            for i, batch in enumerate(loader):
                (model(batch).mean() / args.accum).backward()
                if (i + 1) % args.accum == 0:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        """,
    )
    assert ("WB116" in found) is (divided == "")
