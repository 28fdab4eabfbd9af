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
    pairs = f"""
        class Pairs(nn.Module):
            def forward(self, batch):
                image, text = self.image(batch), self.text(batch)
                sim_i2t = torch.matmul(image, text.t()) / self.temperature
                n = image.size(0)
                targets = {"torch.linspace(0, n - 1, n, dtype=int)" if right == "sim_i2t" else "batch['kind']"}
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
    net = "class Net(nn.Module):\n    def forward(self, ids, labels):\n        return self.run(ids)\n"
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
