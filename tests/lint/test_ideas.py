"""What the sets AH and AI taught: one idea in several spellings, each with a right twin."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from wholebatch.lint import lint_paths, lint_source


def codes(source: str) -> set[str]:
    return {f.code for f in lint_source(textwrap.dedent(source))}


def codes_of(folder: Path, **modules: str) -> set[str]:
    """Write modules into a folder and return the codes that are found in `train.py`."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    return {f.code for f in lint_paths([str(folder / "train.py")])}


LOOP = """
    def train(model, optimizer, loader, accum):
        criterion = nn.CrossEntropyLoss()
        for i, (a, b) in enumerate(loader):
            {body}
            (loss / accum).backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ("torch.arange(len(scores))", True),
        ("torch.tensor(range(len(scores)), device=a.device)", True),
        ("torch.linspace(0, n - 1, n, dtype=int)", True),
        ("torch.tensor([kinds[k] for k in b])", False),
    ],
)
def test_labels_that_count_the_samples_are_a_diagonal(labels: str, found: bool) -> None:
    body = f"scores = torch.mm(model(a), model(b).T); loss = criterion(scores, {labels})"
    assert ("WB114" in codes(LOOP.format(body=body))) is found


@pytest.mark.parametrize("right", ["sim_i2t", "text"])
def test_a_model_that_compares_its_samples_under_another_name(tmp_path: Path, right: str) -> None:
    train = """
        from pairs import Pairs

        def train(optimizer, loader, accum):
            model = Pairs()
            for i, batch in enumerate(loader):
                loss = model(batch)["loss"]
                (loss / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    diagonal = "torch.linspace(0, n - 1, n, dtype=int)"
    targets = diagonal if right == "sim_i2t" else "batch['kind']"
    pairs = f"""
        class Pairs(nn.Module):
            def forward(self, batch):
                image, text = self.image(batch), self.text(batch)
                sim_i2t = torch.matmul(image, text.t()) / self.temperature
                n = image.size(0)
                targets = {targets}
                return {{"loss": F.cross_entropy({right}, targets)}}
    """
    assert ("WB114" in codes_of(tmp_path, train=train, pairs=pairs)) is (right == "sim_i2t")


@pytest.mark.parametrize(
    ("labels", "setting", "found"),
    [
        ("torch.arange(0, q.size(0))", "self.hparams.accumulate_grad_batches", True),
        ("batch['labels']", "self.hparams.accumulate_grad_batches", False),
        ("torch.arange(0, q.size(0))", "self.hparams.size", False),
    ],
)
def test_a_step_that_compares_the_samples_itself(labels: str, setting: str, found: bool) -> None:
    source = f"""
        class BiEncoder(LightningModule):
            def forward(self, batch):
                return self.query(batch["q"]), self.passage(batch["p"])

            def training_step(self, batch, i):
                return self._loss(batch)

            def _loss(self, batch):
                q, p = self(batch)
                labels = {labels}
                scores = torch.matmul(q, p.transpose(0, 1))
                return F.cross_entropy(scores, labels)

            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.parameters())
                updates = len(self.rows) // {setting}
                return [optimizer], [LinearLR(optimizer, total_iters=updates)]
    """
    assert ("WB114" in codes(source)) is found


TRAINED_ELSEWHERE = """
    import lightning as pl
    from module import {imported}

    {chosen}

    def main(args, loader):
        {made}
        trainer = pl.Trainer(max_epochs=3, accumulate_grad_batches={accum})
        trainer.fit(model, loader)
"""


@pytest.mark.parametrize(
    ("chosen", "made"),
    [
        ("", "model = Summaries(args)"),
        ("KINDS = {'plain': Summaries}", "kind = KINDS[args.kind]; model = kind(args)"),
    ],
)
@pytest.mark.parametrize(("accum", "label"), [("4", "-100"), ("4", "0"), ("1", "-100")])
def test_a_framework_trains_a_class_of_another_module(
    tmp_path: Path, chosen: str, made: str, accum: str, label: str
) -> None:
    train = TRAINED_ELSEWHERE.format(imported="Summaries", chosen=chosen, made=made, accum=accum)
    module = f"""
        import lightning as pl
        from transformers import T5ForConditionalGeneration

        class Summaries(pl.LightningModule):
            def __init__(self, args):
                self.model = T5ForConditionalGeneration.from_pretrained(args.name)

            def training_step(self, batch, i):
                labels = batch["labels"]
                labels[labels == self.pad] = {label}
                return self.model(batch["ids"], labels=labels).loss
    """
    found = codes_of(tmp_path, train=train, module=module)
    assert ("WB103" in found) is (accum == "4" and label == "-100")


@pytest.mark.parametrize("divisor", ["", " / num_items_in_batch"])
def test_a_trainer_of_another_module_means_over_the_tokens(tmp_path: Path, divisor: str) -> None:
    train = """
        from rows import RowDataset
        from trainer import Tuner

        def main(model, cfg):
            args = TrainingArguments(gradient_accumulation_steps=cfg.accum)
            trainer = Tuner(model=model, train_dataset=RowDataset(cfg.path), args=args)
            trainer.train()
    """
    rows = """
        class RowDataset(Dataset):
            def __getitem__(self, i):
                labels = self.ids[i] + [-100] * self.rest[i]
                return {"input_ids": self.ids[i], "labels": labels}
    """
    trainer = f"""
        class Tuner(Trainer):
            def compute_loss(self, model, inputs, num_items_in_batch=None):
                outputs = model(inputs["input_ids"], labels=inputs["labels"])
                return outputs.loss{divisor}
    """
    found = codes_of(tmp_path, train=train, rows=rows, trainer=trainer)
    assert ("WB103" in found) is (divisor == "")


SUPERVISED = """
    from rows import make_loader
    {imports}

    def train(optimizer, accum):
        model = {model}
        for i, batch in enumerate(make_loader()):
            loss = model(batch["ids"], batch["labels"])["loss"] / accum
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize("label", ["-100", "0"])
def test_a_class_does_not_end_at_a_long_string(tmp_path: Path, label: str) -> None:
    rows = f"""
        class RowDataset(Dataset):
            def prompt(self, row):
                return f'''Answer.
                |{{row}}
                |'''

            def __getitem__(self, i):
                ids = self.encode(self.prompt(self.rows[i]))
                return {{"ids": ids, "labels": [{label}] * len(ids) + self.answers[i]}}

        def make_loader():
            return DataLoader(RowDataset())
    """
    rows = re.sub(r"\n *\|", "\n", textwrap.dedent(rows))
    train = SUPERVISED.format(imports="from net import Net", model="Net()")
    net = (
        "class Net(nn.Module):\n    def forward(self, ids, labels):\n        return self.run(ids)\n"
    )
    found = codes_of(tmp_path, train=train, rows=rows, net=net)
    assert ("WB103" in found) is (label == "-100")


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        ("self.mse(rate[chosen], target[chosen] / 2)", True),
        ("self.mse(rate, target / 2)", False),
    ],
)
def test_a_loss_of_another_module_means_over_a_selection(
    tmp_path: Path, loss: str, found: bool
) -> None:
    train = """
        from objectives import TwoTasks

        def train(model, optimizer, loader, accum):
            criterion = TwoTasks()
            for i, (x, y) in enumerate(loader):
                loss, parts = criterion(model(x), y)
                (loss / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    objectives = f"""
        class TwoTasks(nn.Module):
            def forward(self, rate, labels):
                target, chosen = labels["rate"], labels["kind"] == 1
                chosen = labels["kind"] == 1
                mse_loss = {loss.replace("self.mse", "self.mse_loss")}
                return mse_loss, {{}}
    """
    assert ("WB103" in codes_of(tmp_path, train=train, objectives=objectives)) is found


@pytest.mark.parametrize(("model", "found"), [("MaskedLM", True), ("CausalLM", False)])
def test_drawn_tokens_differ_in_number_though_texts_are_joined(model: str, found: bool) -> None:
    mlm = "mlm_probability=0.15" if found else "mlm=False"
    source = f"""
        model = AutoModelFor{model}.from_pretrained(name)
        rows = rows.map(group_texts, batched=True)
        collate = DataCollatorForLanguageModeling(tokenizer, {mlm})
        loader = DataLoader(rows, collate_fn=collate)
        accelerator = Accelerator(gradient_accumulation_steps=args.accum)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    """
    assert ("WB103" in codes(source)) is found


@pytest.mark.parametrize("mean", ["(nll * mask).sum() / mask.sum()", "(nll * mask).mean()"])
def test_a_likelihood_of_another_module_is_a_loss(tmp_path: Path, mean: str) -> None:
    train = """
        from density import skewed_nll

        def train(model, optimizer, loader, accum):
            for i, (x, y, mask) in enumerate(loader):
                loss = skewed_nll(y, model(x), mask=mask)
                (loss / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    density = f"""
        def skewed_nll(y, mu, mask=None):
            nll = torch.log(y - mu)
            for _ in range(3):
                nll = nll + 1
            return {mean}
    """
    assert ("WB103" in codes_of(tmp_path, train=train, density=density)) is ("/" in mean)


@pytest.mark.parametrize(("label", "found"), [("-1", True), ("end", False)])
def test_a_file_makes_the_label_that_its_model_leaves_out(
    tmp_path: Path, label: str, found: bool
) -> None:
    train = f"""
        from net import Net

        def rows(n, length, end):
            ys = np.full((n, length), {label}, dtype=np.int64)
            return ys

        def train(optimizer, accum, steps):
            model = Net()
            for step in range(steps):
                for _ in range(accum):
                    x, y = next_batch()
                    _, loss = model(x, y)
                    (loss / accum).backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    net = """
        class Net(nn.Module):
            def forward(self, x, y):
                logits = self.run(x)
                return logits, F.cross_entropy(logits.view(-1), y.view(-1), ignore_index=-1)
    """
    assert ("WB103" in codes_of(tmp_path, train=train, net=net)) is found


@pytest.mark.parametrize("mean", ["(loss * mask).sum() / (mask.sum() + self.eps)", "loss.mean()"])
def test_a_term_of_an_imported_criterion_means_over_a_mask(tmp_path: Path, mean: str) -> None:
    train = """
        from objectives import Both

        def train(model, optimizer, loader, accum):
            criterion = Both()
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y)["loss"] / accum
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    objectives = f"""
        class MaskedL1Loss(nn.Module):
            def forward(self, x, y, mask):
                loss = (x - y).abs()
                return {mean}

        class Both(nn.Module):
            def __init__(self):
                self.l1 = MaskedL1Loss()

            def forward(self, x, batch):
                return {{"loss": self.l1(x, batch["y"], batch["mask"])}}
    """
    found = codes_of(tmp_path, train=train, objectives=objectives)
    assert ("WB103" in found) is ("mask" in mean)


@pytest.mark.parametrize(("label", "found"), [("-100", True), ("0", False)])
def test_an_ignored_label_of_minus_100_says_nothing_of_the_data(
    tmp_path: Path, label: str, found: bool
) -> None:
    train = """
        from objectives import Total
        from rows import TokenDataset

        def train(model, optimizer, accum):
            criterion = Total()
            for i, (x, y) in enumerate(DataLoader(TokenDataset())):
                (criterion(model(x), y)["total"] / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    objectives = """
        class Total(nn.Module):
            def __init__(self):
                self.ce = nn.CrossEntropyLoss(ignore_index=-100)

            def forward(self, x, y):
                return {"total": self.ce(x, y)}
    """
    rows = f"""
        class TokenDataset(Dataset):
            def __getitem__(self, i):
                x = self.tokens[i : i + 64]
                return x, x[1:] + [{label}]
    """
    assert ("WB103" in codes_of(tmp_path, train=train, objectives=objectives, rows=rows)) is found


@pytest.mark.parametrize(("loop", "found"), [("rollouts", False), ("batches", True)])
def test_a_backward_of_its_own_for_each_sample(loop: str, found: bool) -> None:
    source = f"""
        def train(actor, optimizer, accum, prompts):
            for prompt in prompts:
                for _ in range(accum):
                    {loop} = play(actor, prompt)
                    for i, (ids, mask) in enumerate({loop}):
                        loss = (actor(ids) * mask).sum() / mask.sum()
                        (loss / (len({loop}) * accum)).backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    assert ("WB103" in codes(source)) is found


@pytest.mark.parametrize(
    ("share", "found"), [(" * tokens / total_tokens * accum", False), ("", True)]
)
def test_a_term_that_is_weighed_by_its_tokens(share: str, found: bool) -> None:
    source = f"""
        model = AutoModelForCausalLM.from_pretrained(name)

        def train(batches, optimizer, accum, total_tokens):
            for i, batch in enumerate(batches):
                output = model(**batch)
                tokens = (batch["labels"] != -100).sum()
                loss = output.token_loss{share} + output.other_loss
                (loss / accum).backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert ("WB103" in codes(source)) is found


@pytest.mark.parametrize("plugin", [", deepspeed_plugin=plugin", ""])
def test_deepspeed_counts_its_windows_over_epochs(plugin: str) -> None:
    source = f"""
        plugin = DeepSpeedPlugin(gradient_accumulation_steps=accum)
        accelerator = Accelerator(mixed_precision="bf16"{plugin})
        for epoch in range(epochs):
            for step, batch in enumerate(loader):
                accelerator.backward(model(batch).mean() / accum)
                if (step + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert ("WB109" in codes(source)) is (plugin == "")


IMAGES = """
    import timm
    {imports}

    {settings}

    def train(loader, accum, args):
        model = {model}
        optimizer = torch.optim.SGD(model.parameters())
        for i, (x, y) in enumerate(loader):
            (F.mse_loss(model(x), y) / accum).backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("network", "found"),
    [
        ("tf_efficientnet_b0_ns", True),
        ("resnet50.a1_in1k", True),
        ("gluon_seresnext50_32x4d", True),
        ("resnet50_gn", False),
        ("vit_base_patch16_224", False),
    ],
)
@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ("", "timm.create_model('NETWORK')"),
        ("NAME = 'NETWORK'", "timm.create_model(NAME)"),
        ("parser.add_argument('--arch', default='NETWORK')", "timm.create_model(args.arch)"),
        ("CONFIG = {'network': 'NETWORK'}", "timm.create_model(CONFIG['network'])"),
        ("", "Wrapped('NETWORK')"),
    ],
)
def test_a_network_that_is_asked_for_by_name(
    tmp_path: Path, settings: str, model: str, network: str, found: bool
) -> None:
    train = IMAGES.format(imports="from wrapped import Wrapped", settings=settings, model=model)
    wrapped = """
        class Wrapped(nn.Module):
            def __init__(self, name):
                self.body = timm.create_model(name, pretrained=True)
    """
    reported = codes_of(tmp_path, train=train.replace("NETWORK", network), wrapped=wrapped)
    assert ("WB113" in reported) is found


@pytest.mark.parametrize(("network", "found"), [("resnet50", True), ("vit_tiny_patch16", False)])
def test_a_network_that_a_class_has_by_default(tmp_path: Path, network: str, found: bool) -> None:
    train = IMAGES.format(imports="from wrapped import Wrapped", settings="", model="Wrapped()")
    wrapped = f"""
        class Wrapped(nn.Module):
            def __init__(self, name="{network}"):
                self.body = timm.create_model(name, pretrained=True)
    """
    assert ("WB113" in codes_of(tmp_path, train=train, wrapped=wrapped)) is found


@pytest.mark.parametrize(("mode", "found"), [("model.train_head()", True), ("pass", False)])
def test_a_mode_of_training_with_another_name(tmp_path: Path, mode: str, found: bool) -> None:
    settings = f"""
    def evaluate(model):
        model.eval()

    def prepare(model):
        {mode}
    """
    train = IMAGES.format(imports="from head import Head", settings=settings, model="Head()")
    head = """
        class Head(nn.Module):
            def __init__(self):
                self.norm = nn.BatchNorm2d(8)
    """
    assert ("WB113" in codes_of(tmp_path, train=train, head=head)) is found


@pytest.mark.parametrize(
    ("length", "found"), [("len(loader)", True), ("len(loader) // accum", False)]
)
def test_a_schedule_of_a_helper_that_is_handed_its_length(length: str, found: bool) -> None:
    source = f"""
        def build_scheduler(optimizer, warmup, epochs, per_epoch):
            total_steps = epochs * per_epoch

            def rate(step):
                return max(1 - step / total_steps, step / warmup)

            return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

        def train_one_epoch(model, loader, optimizer, scheduler, accum):
            for step, batch in enumerate(loader):
                (model(batch).mean() / accum).backward()
                if (step + 1) % accum == 0 or step + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()

        def train(model, loader, config, epochs):
            accum = config.get("accum", 1)
            optimizer = torch.optim.AdamW(model.parameters())
            scheduler = build_scheduler(optimizer, 100, epochs, {length})
            for epoch in range(epochs):
                train_one_epoch(model, loader, optimizer, scheduler, accum)
    """
    assert ("WB116" in codes(source)) is found


@pytest.mark.parametrize(
    ("length", "size", "found"),
    [
        ("int(len(rows) / SIZE * EPOCHS)", "SIZE", True),
        ("int(len(rows) / SIZE / accum * EPOCHS)", "SIZE", False),
        ("int(len(rows) / SIZE * EPOCHS)", "SIZE // accum", False),
    ],
)
def test_a_schedule_of_samples_over_the_size_of_a_batch(
    length: str, size: str, found: bool
) -> None:
    source = f"""
        def run(rows, model, accum):
            loader = DataLoader(Rows(rows), batch_size={size}, shuffle=True)
            optimizer = torch.optim.AdamW(model.parameters())
            scheduler = get_linear_schedule_with_warmup(
                optimizer, num_warmup_steps=10, num_training_steps={length}
            )
            for step, batch in enumerate(loader):
                (model(batch).mean() / accum).backward()
                if (step + 1) % accum == 0:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    """
    assert ("WB116" in codes(source)) is found


@pytest.mark.parametrize(
    ("prepared", "length", "found"),
    [
        ("scheduler", "len(loader) * epochs", True),
        ("scheduler", "len(loader) * epochs // config['gradient_accumulation_steps']", False),
        ("", "len(loader) * epochs", False),
    ],
)
def test_a_prepared_schedule_whose_loop_is_in_another_module(
    prepared: str, length: str, found: bool
) -> None:
    source = f"""
        from loops import LoopTrainer

        def main(config, model, loader, epochs):
            accelerator = Accelerator(
                gradient_accumulation_steps=config["gradient_accumulation_steps"]
            )
            optimizer = torch.optim.AdamW(model.parameters())
            steps = {length}
            scheduler = get_linear_schedule_with_warmup(
                optimizer, num_warmup_steps=10, num_training_steps=steps
            )
            model, optimizer, loader, other = accelerator.prepare(
                model, optimizer, loader, {prepared}
            )
            LoopTrainer(model, optimizer, scheduler, loader, accelerator).train()
    """
    assert ("WB116" in codes(source)) is found


@pytest.mark.parametrize(("default", "found"), [("mean", True), ("sum", False)])
def test_a_criterion_that_sums_only_if_it_is_told_to(
    tmp_path: Path, default: str, found: bool
) -> None:
    train = """
        from objectives import DiceLoss

        def train(model, optimizer, loader, accum):
            criterion = DiceLoss()
            for i, (x, y) in enumerate(loader):
                loss = criterion(model(x), y)
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    objectives = f"""
        class DiceLoss(nn.Module):
            def __init__(self, reduction="{default}"):
                self.reduction = reduction

            def forward(self, x, y):
                loss = 1 - (x * y).sum(1) / (x + y).sum(1)
                if self.reduction == "mean":
                    return loss.mean()
                elif self.reduction == "sum":
                    return loss.sum()
                return loss
    """
    assert ("WB101" in codes_of(tmp_path, train=train, objectives=objectives)) is found


@pytest.mark.parametrize("accum", ["gradient_accumulation_steps=k", ""])
def test_one_of_two_accelerators_is_told_its_number(accum: str) -> None:
    source = f"""
        def train(loader, model, optimizer, k):
            try:
                accelerator = Accelerator(deepspeed_plugin=plugin)
            except ImportError:
                accelerator = Accelerator({accum})
            for batch in loader:
                optimizer.zero_grad()
                accelerator.backward(model(batch).mean())
                optimizer.step()
    """
    assert ("WB119" in codes(source)) is (accum != "")


@pytest.mark.parametrize(("every", "found"), [("accum", True), ("critic_rounds", False)])
def test_a_second_backward_before_the_step_is_a_part_of_the_window(every: str, found: bool) -> None:
    source = f"""
        def train(model, optimizer, loader, attack, {every}, epochs):
            for epoch in range(epochs):
                for i, (x, y) in enumerate(loader):
                    loss = F.mse_loss(model(x), y) / {every}
                    loss.backward()
                    if (i + 1) % {every} == 0:
                        attack.perturb(model)
                        F.mse_loss(model(x), y).backward()
                        attack.restore(model)
                        optimizer.step()
                        optimizer.zero_grad()
    """
    assert ("WB109" in codes(source)) is found


@pytest.mark.parametrize(("name", "found"), [("acc_steps", True), ("words", False)])
def test_a_number_of_micro_batches_that_each_batch_decides(name: str, found: bool) -> None:
    source = f"""
        def train(model, optimizer, scaler, loader, epochs):
            for epoch in range(epochs):
                for i, (x, lengths) in enumerate(loader):
                    {name} = max(1, int(lengths.float().mean().item() / 64))
                    loss = model(x).mean() / {name}
                    scaler.scale(loss).backward()
                    if (i + 1) % {name} == 0:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
    """
    reported = codes(source)
    assert ("WB106" in reported) is found
    assert ("WB109" in reported) is found
