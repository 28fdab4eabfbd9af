"""Write a loop down: the set-up, which the oracle executes too, and the training.

A mistake is a line that is changed, added or left out; `is_planted` asks for it where that line
stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import indent

from tests.programs.plain.loop import Loop

OPTIMIZERS = {
    "sgd": "torch.optim.SGD({}, lr=0.1)",
    "momentum": "torch.optim.SGD({}, lr=0.05, momentum=0.9)",
    "decay": "torch.optim.SGD({}, lr=0.05, momentum=0.9, weight_decay=0.01)",
    "adam": "torch.optim.Adam({}, lr=1e-2)",
    "adamw": "torch.optim.AdamW({}, lr=1e-2, weight_decay=0.1)",
    "groups": "torch.optim.AdamW([{{'params': [p for p in {} if p.dim() > 1]}}, "
    "{{'params': [p for p in {} if p.dim() < 2], 'weight_decay': 0.0}}], lr=1e-2)",
}
SCHEDULERS = {
    "cosine": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max={updates})",
    "step": "torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)",
    "warm-up": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 3))",
    "one cycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps={updates} + 1)",
}
CLEARS = (
    "optimizer.zero_grad()",
    "optimizer.zero_grad(set_to_none=True)",
    "model.zero_grad()",
    "for p in model.parameters():\n    p.grad = None",
)
COUNTS = {
    "accum_steps": "accum_steps = {k}",
    "k": "k = {k}",
    "ACCUM": "ACCUM = {k}",
    "args.gradient_accumulation_steps": "args = argparse.Namespace("
    "gradient_accumulation_steps={k}, lr=0.1)",
    'config["grad_accum"]': 'config = {{"grad_accum": {k}, "lr": 0.1}}',
    "{k}": "",
}
NOISE = {
    "log": ("inner", "running += loss.item()"),
    "print": ("close", 'print("loss", float(loss))'),
    "evaluate": (
        "close",
        "model.eval()\nwith torch.no_grad():\n    model({sample})\nmodel.train()",
    ),
    "norm": ("close", "norm = sum(float(p.detach().norm()) for p in model.parameters())"),
    "comment": ("inner", "# one micro-batch"),
}
IMPORTS = """import argparse
import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
"""
NEVER_REDUCED = "gradients that are never reduced"
_LIBRARIES = {
    "accelerate": "from accelerate import Accelerator\n",
    "fabric": "from lightning.fabric import Fabric\n",
    "lightning": "import lightning as L\n",
}
_LIGHTNING = """class Lit(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.automatic_optimization = False
        self.seen = 0

    def training_step(self, batch, i):
{step}

    def configure_optimizers(self):
        return {made}


trainer = L.Trainer(
    max_epochs={epochs},
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Lit(model), loader)"""
_SHARED = (
    "model",
    "generator",
    "discriminator",
    "optimizer",
    "optimizer_d",
    "optimizer_g",
    "scheduler",
    "scaler",
    "average",
    "criterion",
    "summed",
    "balance",
    "loader",
    "accelerator",
    "fabric",
)
"""Names of the set-up that a function may take as arguments, and a class as attributes."""


@dataclass(frozen=True)
class Text:
    """The parts of a loop's text."""

    loop: Loop

    # ------------------------------------------------------------------ small questions

    def is_planted(self, mistake: str) -> bool:
        return self.loop.mistake == mistake

    @property
    def count(self) -> str:
        """The number of micro-batches of a full window, as the loop writes it."""
        return self.loop.count.format(k=self.loop.steps)

    @property
    def updates(self) -> int:
        """The updates of the whole run."""
        loop = self.loop
        if loop.shape in ("nested", "while"):
            return loop.windows * loop.epochs
        return (loop.windows + loop.has_tail) * loop.epochs

    # ------------------------------------------------------------------ the set-up

    def setup(self) -> str:
        """Return the model, the data and what trains it."""
        loop, task = self.loop, self.loop.of
        lines = [
            f"torch.manual_seed({loop.seed})",
            COUNTS[loop.count].format(k=loop.steps),
            task.model,
            task.before,
            *self.optimizers(),
        ]
        if loop.scheduler in SCHEDULERS:
            call = SCHEDULERS[loop.scheduler].format(updates=self.updates)
            lines.append(f"scheduler = {call}")
        if loop.amp.startswith("scaler"):
            enabled = "enabled=False" if loop.amp == "scaler off" else "init_scale=1024.0"
            lines.append(f'scaler = torch.amp.GradScaler("cpu", {enabled})')
        if loop.average == "by hand":
            lines.append("average = copy.deepcopy(model)")
        if loop.average == "torch":
            lines.append("average = torch.optim.swa_utils.AveragedModel(model)")
        lines += [task.data.format(n=loop.samples * loop.ranks)]
        begin = [
            'dist.init_process_group("gloo")',
            "rank, world = dist.get_rank(), dist.get_world_size()",
        ]
        return "\n".join(filter(None, [*(begin if loop.ranks > 1 else []), *lines]))

    def dealt(self) -> str:
        """Return the lines after the set-up: the loader of this rank, and what wraps the model."""
        lines = []
        if self.loop.ranks > 1:
            lines += ["inputs, targets = inputs[rank::world], targets[rank::world]"]
        return "\n".join([*lines, *self._loader(), *self._wrapped()])

    def _wrapped(self) -> list[str]:
        if self.loop.ranks > 1:
            return ["model = DistributedDataParallel(model)"]
        return self._library()

    def optimizers(self) -> list[str]:
        trained = "model.parameters()"
        return ["optimizer = " + OPTIMIZERS[self.loop.optimizer].format(trained, trained)]

    def _library(self) -> list[str]:
        """Return the lines that hand model, optimizer and data to the library."""
        loop = self.loop
        if loop.library == "accelerate":
            steps = f"gradient_accumulation_steps={self.count}, " * (loop.shape == "accumulate")
            prepared = ["model", "optimizer", *(["loader"] if loop.batch != "list" else [])]
            if loop.shape == "accumulate" and loop.scheduler in SCHEDULERS:
                prepared += [] if self.is_planted("schedule per micro-batch") else ["scheduler"]
            listed = ", ".join(prepared)
            return [
                f"accelerator = Accelerator({steps}cpu=True)",
                f"{listed} = accelerator.prepare({listed})",
            ]
        if loop.library == "fabric":
            lines = [
                'fabric = Fabric(accelerator="cpu", devices=1)',
                "model, optimizer = fabric.setup(model, optimizer)",
            ]
            return [*lines, *["loader = fabric.setup_dataloaders(loader)"][: loop.batch != "list"]]
        return []

    def _loader(self) -> list[str]:
        loop = self.loop
        size = loop.rows * (loop.steps if loop.shape == "split" else 1)
        shuffled = ", shuffle=True" if loop.shuffle else ""
        if loop.batch == "dict":
            samples = '[{"x": x, "y": y} for x, y in zip(inputs, targets)]'
            return [f"loader = DataLoader({samples}, batch_size={size}{shuffled})"]
        if loop.batch == "list":
            return [f"loader = list(zip(inputs.split({size}), targets.split({size})))"]
        data = "TensorDataset(inputs, targets)"
        return [f"loader = DataLoader({data}, batch_size={size}{shuffled})"]

    # ------------------------------------------------------------------ one micro-batch

    @property
    def is_total(self) -> bool:
        """True if a micro-batch's loss is a sum over its units."""
        return self.loop.divide in ("units", "counted") and bool(self.loop.of.total)

    def _divisor(self) -> str:
        """Return what a loss is divided by before its backward; empty if it is not."""
        loop = self.loop
        own = {
            "modulo": f"min({self.count}, len(loader) - i // {self.count} * {self.count})",
            "islice": "len(window)",
            "split": "len(parts)",
        }
        if self.is_planted("not divided") or loop.style == "gradients":
            return ""
        if loop.shape == "accumulate" and not self.is_planted("divided twice"):
            return ""  # Accelerate divides
        divisors = {"steps": self.count, "own count": own.get(loop.shape, ""), "units": "units"}
        return divisors.get(loop.divide, "")

    def loss(self) -> list[str]:
        """Return the lines that compute the loss of a micro-batch."""
        loop, task = self.loop, self.loop.of
        value = task.total if self.is_total else task.mean
        if loop.weight:
            value = f"{loop.weight} * ({value})" if " + " in value else f"{loop.weight} * {value}"
        forward = list(task.forward)
        if loop.task == "carried" and self.is_planted("a carry between micro-batches"):
            forward = ["logits, carry = model(x, carry)"]
        if loop.style == "in the mean" and (divisor := self._divisor()):
            value = f"({value}) / {divisor}"
        lines = [*forward, f"loss = {value}" if value != "loss" else ""]
        if loop.amp != "none":
            dtype = "float16" if loop.amp == "scaler" else "bfloat16"
            guard = f'with torch.autocast("cpu", dtype=torch.{dtype}):'
            lines = [guard, *(indent(line, "    ") for line in filter(None, lines))]
        return [line for line in lines if line]

    def backward(self) -> list[str]:
        """Return the lines that add the gradient of a micro-batch's loss."""
        loop, divisor = self.loop, self._divisor()
        loss, lines = "loss", []
        if loop.divide == "share":
            units = self._units()
            loss = f"(loss * {units} / units)"
        elif divisor and loop.style == "assign":
            lines.append(f"loss = loss / {divisor}")
        elif divisor and loop.style == "in place":
            lines.append(f"loss /= {divisor}")
        elif divisor and loop.style == "times":
            loss = f"(loss * (1.0 / {divisor}))"
        elif divisor and loop.style != "in the mean":
            loss = f"(loss / {divisor})"
        if loop.divide == "counted":
            lines.append(f"seen += {self._units()}")
        if self.is_planted("a detached loss"):
            return [*lines, f"together = together.detach() + {loss}"]
        if loop.amp.startswith("scaler"):
            loss = f"scaler.scale({loss})"
        calls = [self.backward_of(loss)]
        if self.is_planted("counted twice"):
            calls = [self.backward_of(loss, "retain_graph=True"), *calls]
        return [*lines, *calls]

    def backward_of(self, loss: str, options: str = "") -> str:
        """Return the call that runs the backward of a loss, in the words of the library."""
        owner = {
            "accelerate": "accelerator.backward",
            "fabric": "fabric.backward",
            "lightning": "self.manual_backward",
        }.get(self.loop.library)
        if owner is None:
            return f"{loss}.backward({options})"
        bare = loss[1:-1] if loss.startswith("(") and loss.endswith(")") else loss
        return f"{owner}({bare}{', ' * bool(options)}{options})"

    def _held(self, loss: list[str], backward: list[str], boundary: str) -> list[str]:
        """Return loss and backward, without a reduction where more of the window comes."""
        if self.is_planted("backward at the boundary"):
            backward = [f"if {boundary}:", *_in(backward)]
        if self.loop.ranks == 1 or not (self.loop.holds or self.is_planted(NEVER_REDUCED)):
            return [*loss, *backward]
        hold = f"with contextlib.nullcontext() if {boundary} else model.no_sync():"
        hold = "with model.no_sync():" if self.is_planted(NEVER_REDUCED) else hold
        return [hold, *_in([*loss, *backward])]

    def _units(self) -> str:
        task = self.loop.of
        return task.padded if self.is_planted("other units") else task.units

    def micro_batch(self, boundary: str = "") -> list[str]:
        """Return the lines for one micro-batch; `boundary` is true for the last of a window."""
        loop = self.loop
        lines = [*self.clear()] if self.is_planted("cleared per micro-batch") else []
        if loop.batch == "dict":
            lines += ['x, y = batch["x"], batch["y"]']
        backward = self._held(self.loss(), self.backward(), boundary)
        lines += [*backward, *self._noise("inner")]
        if self.is_planted("clip per micro-batch"):
            lines += self.clip()
        if self.is_planted("decayed per micro-batch"):
            lines += ["with torch.no_grad():", "    for p in model.parameters():"]
            lines += ["        p.mul_(0.99)"]
        if self.is_planted("schedule per micro-batch"):
            lines += ["scheduler.step()"]
        if self.is_planted("average per micro-batch"):
            lines += self.average()
        return lines

    # ------------------------------------------------------------------ the close of a window

    def clear(self) -> list[str]:
        return self.loop.clears.split("\n")

    def clip(self) -> list[str]:
        library = {
            "accelerate": ["accelerator.clip_grad_norm_(model.parameters(), 0.05)"],
            "fabric": ["fabric.clip_gradients(model, optimizer, max_norm=0.05)"],
            "lightning": [
                "self.clip_gradients(optimizer, gradient_clip_val=0.05, "
                'gradient_clip_algorithm="norm")'
            ],
        }
        if self.loop.clip == "norm" and self.loop.library in library:
            return library[self.loop.library]
        kinds = {
            "norm": ["torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)"],
            "value": ["torch.nn.utils.clip_grad_value_(model.parameters(), 0.005)"],
            "loose": ["nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e3)"],
        }
        return kinds.get(self.loop.clip, [])

    def average(self) -> list[str]:
        if self.loop.average == "torch":
            return ["average.update_parameters(model)"]
        pairs = "zip(average.parameters(), model.parameters())"
        by_hand = ["with torch.no_grad():", f"    for a, p in {pairs}:", "        a.lerp_(p, 0.1)"]
        return by_hand if self.loop.average == "by hand" else []

    def close(self, pending: str = "") -> list[str]:
        """Return the lines that make the update."""
        loop, lines = self.loop, list[str]()
        if self.is_planted("a detached loss"):
            loss = "scaler.scale(together)" if loop.amp.startswith("scaler") else "together"
            lines += [self.backward_of(loss), "together = torch.zeros(())"]
        scaled = loop.amp.startswith("scaler")
        if self.is_planted("cleared before the step"):
            lines += self.clear()
        if scaled and not self.is_planted("clip while scaled"):
            lines.append("scaler.unscale_(optimizer)")
        by = pending or self.count
        if loop.style == "gradients" and loop.divide in ("steps", "own count"):
            lines += [] if self.is_planted("not divided") else self._divide_gradients(by)
        if loop.divide == "counted":
            lines += [*self._divide_gradients("seen"), "seen = 0"]
        if self.is_planted("divided twice"):
            lines += self._divide_gradients(self.count)
        if not self.is_planted("clip per micro-batch"):
            lines += self.clip()
        lines += ["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]
        if loop.clear == "after" and not self.is_planted("never cleared"):
            lines += self.clear()
        if loop.scheduler in SCHEDULERS and not self.is_planted("schedule per micro-batch"):
            lines.append("scheduler.step()")
        if loop.scheduler == "by hand":
            lines += ["for group in optimizer.param_groups:", '    group["lr"] *= 0.9']
        if not self.is_planted("average per micro-batch"):
            lines += self.average()
        return [*lines, *self._noise("close")]

    def _divide_gradients(self, by: str) -> list[str]:
        lines = ["for p in model.parameters():", "    if p.grad is not None:"]
        return [*lines, f"        p.grad{' /= ' + by if self.loop.seed % 2 else f'.div_({by})'}"]

    def _noise(self, where: str) -> list[str]:
        lines: list[str] = []
        for name in self.loop.noise:
            place, text = NOISE[name]
            sample = "inputs[:1]"
            lines += text.format(sample=sample).split("\n") if place == where else []
        return lines

    # ------------------------------------------------------------------ windows

    def training(self) -> str:
        """Return the loop."""
        loop = self.loop
        before = ["model.train()"] if self.loop.task != "pair" else []
        before += ["running = 0.0"] if "log" in loop.noise else []
        before += ["seen = 0"] if loop.divide == "counted" else []
        before += ["together = torch.zeros(())"] if self.is_planted("a detached loss") else []
        before += ["carry = None"] if self.is_planted("a carry between micro-batches") else []
        before += self.clear() if loop.clear == "after" and loop.seed % 3 else []
        make = {
            "modulo": self._modulo,
            "from one": self._modulo,
            "counter": self._counter,
            "nested": self._nested,
            "while": self._while,
            "islice": self._islice,
            "split": self._split,
            "accumulate": self._accumulate,
        }
        return "\n".join([*before, *make[loop.shape]()])

    @property
    def _item(self) -> str:
        return "batch" if self.loop.batch == "dict" else "x, y"

    def _epochs(self, body: list[str]) -> list[str]:
        if self.loop.epochs == 1 and self.loop.seed % 2:
            return body
        return [f"for epoch in range({self.loop.epochs}):", *_in(body)]

    def _head(self) -> list[str]:
        """Return what stands before the first micro-batch of a window."""
        cleared = self.loop.clear == "before" and not self.is_planted("never cleared")
        return self.clear() if cleared else []

    def _numbered(self, first: int = 0) -> list[str]:
        """Return the lines for micro-batch `i` of an epoch, counted from `first`."""
        loop, k = self.loop, self.count
        number = "i" if first else "(i + 1)"
        boundary = f"{number} % {k} == 0"
        if self.is_planted("off by one"):
            boundary = f"(i + 1) % {k} == 0" if first else f"i % {k} == 0"
        tail_left = self.is_planted("tail dropped") or self.is_planted("tail leaked")
        if (loop.has_tail or loop.missing) and not tail_left:
            boundary += f" or {number.strip('()')} == len(loader)"
        close = self.close()
        if not self.is_planted("step per micro-batch"):
            close = [f"if {boundary}:", *_in(close)]
        begins = [f"if {'(i - 1)' if first else 'i'} % {k} == 0:", *_in(self._head())]
        return [*(begins if self._head() else []), *self.micro_batch(boundary), *close]

    def _modulo(self) -> list[str]:
        first = 1 if self.loop.shape == "from one" else 0
        item = self._item if self.loop.batch == "dict" else f"({self._item})"
        body = [f"for i, {item} in enumerate(loader{', 1' if first else ''}):"]
        head = self.clear() if self.is_planted("tail dropped") else []
        return self._epochs([*head, *body, *_in(self._numbered(first))])

    def _accumulate(self) -> list[str]:
        """Accelerate's context manager; it divides, and makes step and zero_grad wait."""
        clip = [] if self.is_planted("clip per micro-batch") else self.clip()
        lines = self.micro_batch()
        lines += ["if accelerator.sync_gradients:", *_in(clip)] if clip else []
        lines.append("optimizer.step()")
        if self.loop.scheduler in SCHEDULERS and not self.is_planted("schedule per micro-batch"):
            lines.append("scheduler.step()")
        lines.append("optimizer.zero_grad()")
        if self.average() and not self.is_planted("average per micro-batch"):
            lines += ["if accelerator.sync_gradients:", *_in(self.average())]
        body = [f"for {self._item} in loader:", "    with accelerator.accumulate(model):"]
        return self._epochs([*body, *_in(_in(lines))])

    def lightning(self) -> str:
        """Return a LightningModule that optimizes by hand, and its Trainer."""
        loop = self.loop
        lines = ["optimizer = self.optimizers()"]
        lines += ["x, y = batch"] if loop.batch != "dict" else []
        if loop.scheduler in SCHEDULERS:
            lines.append("scheduler = self.lr_schedulers()")
        lines += self._numbered()
        step = re.sub(r"(?<![\w.])model\b", "self.model", "\n".join(lines))
        step = re.sub(r"(?<![\w.])seen\b", "self.seen", step)
        configured = "[optimizer], [scheduler]" if loop.scheduler in SCHEDULERS else "optimizer"
        return _LIGHTNING.format(step=indent(step, "        "), made=configured, epochs=loop.epochs)

    def _counter(self) -> list[str]:
        loop = self.loop
        boundary = f"pending == {self.count}"
        inner = ["pending += 1", *self.micro_batch(boundary)]
        if self.is_planted("step per micro-batch"):
            inner += self.close("pending")
        else:
            inner += [f"if {boundary}:", *_in([*self.close("pending"), "pending = 0"])]
        body = ["pending = 0", f"for {self._item} in loader:", *_in(inner)]
        left = self.is_planted("tail dropped") or self.is_planted("tail leaked")
        if (loop.has_tail or loop.missing) and not left:
            body += ["if pending > 0:", *_in(self.close("pending"))]
        if self.is_planted("tail dropped"):
            body = [*self.clear(), *body]
        return self._epochs(body)

    def _batches(self) -> list[str]:
        return [
            "def endless(loader):",
            "    while True:",
            "        yield from loader",
            "",
            "batches = endless(loader)",
        ]

    def _nested(self) -> list[str]:
        inner = [f"{self._item} = next(batches)", *self.micro_batch("micro == 0")]
        if self.is_planted("step per micro-batch"):
            inner, close = [*inner, *self.close()], list[str]()
        else:
            close = self.close()
        body = [*self._head(), f"for micro in range({self.count}):", *_in(inner), *close]
        return [*self._batches(), f"for update in range({self.updates}):", *_in(body)]

    def _while(self) -> list[str]:
        boundary = f"micro % {self.count} == 0"
        inner = [f"{self._item} = next(batches)", "micro += 1", *self.micro_batch(boundary)]
        done = [*self.close(), "update += 1"]
        inner += [f"if {boundary}:", *_in(done)]
        return [
            *self._batches(),
            "micro = update = 0",
            f"while update < {self.updates}:",
            *_in(inner),
        ]

    def _units_before(self, every: str) -> list[str]:
        needs = self.loop.divide in ("units", "share")
        lines = [f"units = sum({self._units()} for {every})"] if needs else []
        return [*lines, *self._of_all_ranks()] if needs else []

    def _of_all_ranks(self) -> list[str]:
        """Return the lines that make the units those of all ranks, over the number of ranks."""
        if self.loop.ranks == 1 or self.is_planted("units of one rank"):
            return []
        lines = ["units = torch.as_tensor(units, dtype=torch.get_default_dtype())"]
        lines += ["dist.all_reduce(units)"]
        return [*lines, *([] if self.is_planted("world size forgotten") else ["units /= world"])]

    def _per_window(self, items: str, known: list[str]) -> list[str]:
        inner = self.micro_batch()
        if self.is_planted("step per micro-batch"):
            return [*known, *self._head(), f"for {items}:", *_in([*inner, *self.close()])]
        return [*known, *self._head(), f"for {items}:", *_in(inner), *self.close(self._length)]

    @property
    def _length(self) -> str:
        lengths = {"islice": "len(window)", "split": "len(parts)"}
        return lengths[self.loop.shape] if self.loop.divide == "own count" else ""

    def _islice(self) -> list[str]:
        if self.loop.batch == "dict":
            known = self._units_before("y in (batch['y'] for batch in window)")
        else:
            known = self._units_before("_, y in window")
        body = self._per_window(f"{self._item} in window", known)
        if self.is_planted("tail dropped"):
            body = [f"if len(window) < {self.count}:", "    break", *body]
        return self._epochs(
            [
                "batches = iter(loader)",
                f"while window := list(itertools.islice(batches, {self.count})):",
                *_in(body),
            ]
        )

    def _split(self) -> list[str]:
        rows = self.loop.rows
        unpack = ['xs, ys = batch["x"], batch["y"]'] if self.loop.batch == "dict" else []
        parts = f"parts = list(zip(xs.split({rows}), ys.split({rows})))"
        known = [*unpack, parts, *self._units_before("_, y in parts")]
        if self.loop.divide in ("units", "share") and self.loop.seed % 2:
            known = [
                *known[: len(known) - 1 - len(self._of_all_ranks())],
                f"units = {self._whole_units()}",
            ]
            known += self._of_all_ranks()
        body = self._per_window("x, y in parts", known)
        # The items are parts already: no line takes them out of a dict again.
        body = [line for line in body if line.strip() != 'x, y = batch["x"], batch["y"]']
        item = "batch" if self.loop.batch == "dict" else "xs, ys"
        return self._epochs([f"for {item} in loader:", *_in(body)])

    def _whole_units(self) -> str:
        return re.sub(r"\by\b", "ys", self._units())


def _in(lines: list[str]) -> list[str]:
    return [indent(line, "    ") for line in lines]


def text_of(loop: Loop) -> Text:
    """Return the parts of a loop's text."""
    from tests.programs.plain.pairs import PairText

    return PairText(loop) if loop.task == "pair" else Text(loop)


def imports(loop: Loop) -> str:
    """Return the imports of a loop's text."""
    library = _LIBRARIES.get(loop.library, "")
    text = IMPORTS.replace("\nimport torch\n", f"\n{library}import torch\n", 1)
    if loop.ranks > 1:
        text = text.replace("import argparse\n", "import argparse\nimport contextlib\n")
        text = text.replace(
            "import torch.nn.f", "import torch.distributed as dist\nimport torch.nn.f"
        )
        text += "from torch.nn.parallel import DistributedDataParallel\n"
    return text


def script(loop: Loop) -> str:
    """Return the text of a loop."""
    text = text_of(loop)
    head, setup = imports(loop), f"{text.setup()}\n{text.dealt()}"
    if loop.library == "lightning":
        return f"{head}\n{setup}\n\n\n{text.lightning()}\n"
    training = text.training()
    if loop.form == "main":
        body = f"{setup}\n\n{training}"
        start = 'if __name__ == "__main__":\n    main()\n'
        return f"{head}\n\ndef main():\n{indent(body, '    ')}\n\n\n{start}"
    if loop.form == "function":
        listed = ", ".join(_names(setup))
        return (
            f"{head}\n{setup}\n\n\ndef train({listed}):\n{indent(training, '    ')}\n\n\n"
            f"train({listed})\n"
        )
    if loop.form == "class":
        return head + _class(setup, training)
    return f"{head}\n{setup}\n\n{training}\n"


def _names(setup: str) -> list[str]:
    return [name for name in _SHARED if re.search(rf"^{name} = ", setup, re.MULTILINE)]


def _class(setup: str, training: str) -> str:
    """Return the loop as the method of a trainer."""
    names = _names(setup)
    word = re.compile(rf"(?<![\w.\"'])({'|'.join(names)})\b(?!\s*=[^=])")
    fit = word.sub(r"self.\1", training).replace("def endless(self.loader)", "def endless(loader)")
    fit = fit.replace("yield from self.loader", "yield from loader")
    listed = ", ".join(names)
    kept = "\n".join(f"        self.{name} = {name}" for name in names)
    return (
        f"\n{setup}\n\n\nclass Trainer:\n    def __init__(self, {listed}):\n{kept}\n\n"
        f"    def fit(self):\n{indent(fit, '        ')}\n\n\nTrainer({listed}).fit()\n"
    )
