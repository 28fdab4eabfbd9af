"""The text of a program: a complete script, which prints a line of JSON with what each window did.

text = script(Program(way="run", loss="mse"))
exec(compile(text, "program.py", "exec"))
"""

from __future__ import annotations

from textwrap import indent

from tests.programs import hosts
from tests.programs.description import NEXT_TOKEN, Program
from tests.programs.mistakes import in_values, lines_of, mistake_of
from tests.programs.models import (
    CALLS,
    JUDGE,
    JUDGED,
    ROW_LOSSES,
    TEACHER,
    data_seed,
    data_text,
    model_call,
    model_text,
)

LONG = {
    "x": "input_ids",
    "mask": "attention_mask",
    "y": "labels",
    "weight": "sample_weight",
    "target": "targets",
}
STRANGE = {"x": "units", "mask": "static", "y": "total", "weight": "loss", "target": "input"}
NAMES = {
    "short": {name: name for name in LONG},
    "long": LONG,
    "strange": STRANGE,
    "globals": {name: name for name in LONG},
}
_HEAD = """import copy
import functools
import json
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import wholebatch as wb
"""
_DTYPES = {"float64": "float64", "float32": "float32", "bf16": "float32", "fp16": "float32"}
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(PARAMETERS, lr=0.1)",
    "momentum": "torch.optim.SGD(PARAMETERS, lr=0.1, momentum=0.9, nesterov=True)",
    "decay": "torch.optim.SGD(PARAMETERS, lr=0.1, weight_decay=0.1)",
    "adamw": "torch.optim.AdamW(PARAMETERS, lr=0.1, eps=0.01)",
    "adamw fused": "torch.optim.AdamW(PARAMETERS, lr=0.1, eps=0.01, fused=True)",
    "adam foreach": "torch.optim.Adam(PARAMETERS, lr=0.1, eps=0.01, foreach=True)",
    "rmsprop": "torch.optim.RMSprop(PARAMETERS, lr=0.1, eps=0.01)",
    "groups": "torch.optim.SGD(GROUPS, lr=0.1)",
    "own": "Normed(PARAMETERS, lr=0.1)",
    "hooked": "torch.optim.SGD(PARAMETERS, lr=0.1, fused=True)",
    "two": "torch.optim.SGD(PARAMETERS[:1], lr=0.05)",
}
GROUPS = "[{'params': PARAMETERS[:1], 'lr': 0.05}, {'params': PARAMETERS[1:]}]"
SCHEDULERS = {
    "exponential": "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)",
    "step": "torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)",
    "lambda": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))",
    "cosine": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)",
    "one cycle": "torch.optim.lr_scheduler.OneCycleLR(\n"
    "    optimizer, 0.1, total_steps=20, cycle_momentum=False)",
    "momentum cycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)",
    "warmup": "torch.optim.lr_scheduler.SequentialLR(optimizer, [\n"
    "    torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),\n"
    "    torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2)], [2])",
    "list": "[torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),\n"
    "    torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]",
    "plateau": "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)",
}
_TRACED = """from wholebatch.compile.execute_mode import ExecutePlan

plan_of = ExecutePlan.of


def without_compiler(*args):
    plan = plan_of(*args)
    plan.compiles = False  # a graph runs as it was traced: Inductor takes half a minute
    return plan


ExecutePlan.of = staticmethod(without_compiler)"""
_NOTE = """def note(step):
    parameters = torch.cat([p.detach().double().cpu().flatten() for p in model.parameters()])
    groups = optimizer.param_groups
    record.append(
        {
            "update": step.update,
            "loss": step.loss,
            "units": step.units,
            "norm": step.grad_norm,
            "skipped": step.skipped is not None,
            "rate": [group["lr"] for group in groups],
            "parameters": parameters.tolist(),
        }
    )"""


def _note(program: Program) -> str:
    """Return the function that records a window."""
    note = _note_of_state(program)
    if program.sharded != "ddp":
        note = note.replace("p.detach()", "p.detach().full_tensor()")
    if program.way in hosts.HOSTS:
        return note
    return f'{note}\n    record[-1]["skips"] = train.skipped'


def _note_of_state(program: Program) -> str:
    if program.joint:
        both = "for p in [*model.parameters(), *judge.parameters()]"
        return _NOTE.replace("for p in model.parameters()", both)
    if program.optimizer == "two":
        return _NOTE.replace("groups = ", "groups = second.param_groups + ")
    if "ema" not in program.close or program.event == "resume":
        return _NOTE
    averaged = "[p.flatten() for p in ema.module.parameters()]"
    more = f'    record[-1]["ema"] = torch.cat({averaged}).double().tolist()'
    return f"{_NOTE}\n{more}"


def optimizer_text(program: Program) -> str:
    """Return the call that makes the optimizer."""
    trained = "[p for p in model.parameters() if p.requires_grad]"
    text = OPTIMIZERS[program.optimizer].replace("GROUPS", GROUPS)
    return text.replace("PARAMETERS", trained)


def script(program: Program) -> str:
    """Return the text of the program."""
    head = _HEAD + hosts.IMPORTS.get(program.way, "") + (_RANKS_HEAD if program.ranks > 1 else "")
    parts = [head.strip() + f"\n\ndtype = torch.{_DTYPES[program.precision]}\nrecord = []"]
    parts += [_TRACED] if program.execute == "traced" else []
    parts += [model_text(program), data_text(program), *_containers(program), _data(program)]
    parts += [*_globals(program), *_loss(program), _note(program), *_build(program), _loop(program)]
    if program.ranks > 1:
        return "\n\n".join(_on_ranks(program, parts)) + "\n"
    parts += ["print(json.dumps(record))"]
    if program.style == "main":
        start = len(parts) - len(_loss(program)) - len(_build(program)) - 3
        body = indent("\n\n".join(parts[start:]), "    ")
        parts = [*parts[:start], f"def main():\n{body}", 'if __name__ == "__main__":\n    main()']
    return "\n\n".join(parts) + "\n"


_RANKS_HEAD = """
import os
import tempfile

import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
"""
_SEEN = """# After the loop: a rank with fewer micro-batches gets its last Step there.
seen = [torch.zeros((), dtype=dtype) for _ in range(RANKS)]
dist.all_gather(seen, model.module.seen)
record[-1]["seen"] = torch.stack(seen).tolist()"""
_RANKS_MAIN = """def main():
    meeting = tempfile.mktemp()
    answers = multiprocessing.get_context("fork").SimpleQueue()
    multiprocessing.start_processes(
        train_on, args=(meeting, answers), nprocs=RANKS, start_method="fork"
    )
    print(answers.get())


if __name__ == "__main__":
    main()"""


def _on_ranks(program: Program, parts: list[str]) -> list[str]:
    """Return the program with everything from the loss on in a function that each rank runs."""
    start = len(parts) - len(_loss(program)) - len(_build(program)) - 2
    ranks = program.ranks
    dealt = [f"drawn_here = [window[{program.dealt}] for window in drawn]"]
    data = _data(program).rsplit("\n", 1)[1].replace("in drawn]", "in drawn_here if window]")
    begins = (
        f'dist.init_process_group("gloo", f"file://{{meeting}}", rank=rank, world_size={ranks})'
    )
    ends = "if rank == 0:\n    answers.put(json.dumps(record))\ndist.destroy_process_group()"
    if program.model == "counter" and program.sharded == "ddp":
        ends = f"{_SEEN.replace('RANKS', str(ranks))}\n{ends}"
    if program.way == "trainer":  # what torchrun sets
        own = "RANK=str(rank), LOCAL_RANK=str(rank)"
        meet = f"WORLD_SIZE='{ranks}', MASTER_ADDR='127.0.0.1', MASTER_PORT='29500'"
        begins = f"os.environ.update({own}, {meet})\n{begins}"
    body = "\n\n".join([begins, *dealt, data, *parts[start:], ends])
    return [
        *parts[:start],
        "def train_on(rank, meeting, answers):\n" + indent(body, "    "),
        _RANKS_MAIN.replace("RANKS", str(ranks)),
    ]


# ------------------------------------------------------------------ the data


def _containers(program: Program) -> list[str]:
    """Return the class of a batch, if it has one."""
    names = NAMES[program.names]
    lines = [f"    {names[field]}: torch.Tensor" for field in program.fields]
    if program.batch == "dataclass":
        return ["\n".join(["@dataclass\nclass Batch:", *lines])]
    if program.batch == "namedtuple":
        return ["\n".join(["class Batch(NamedTuple):", *lines])]
    if program.batch == "nested":
        inputs = [field for field in program.fields if field in ("x", "mask")]
        parts = [f'"{names[field]}": {names[field]}' for field in program.fields]
        inside, rest = ", ".join(parts[: len(inputs)]), ", ".join(parts[len(inputs) :])
        arguments = ", ".join(names[field] for field in program.fields)
        named = f'"name": [str(row) for row in range(len({names["y"]}))]'
        line = f'return {{"inputs": {{{inside}}}, {rest}, {named}}}'
        return [_function(f"def Batch({arguments}):", [line])]
    if program.batch == "object":
        arguments = ", ".join(names[field] for field in program.fields)
        kept = [f"        self.{names[f]} = {names[f]}" for f in program.fields]
        return ["\n".join([f"class Batch:\n    def __init__(self, {arguments}):", *kept])]
    return []


def _batch_of(program: Program, values: str) -> str:
    """Return the call that makes a batch of a tuple of its fields."""
    if program.batch in ("tuple", "list"):
        return f"{program.batch}({values})"
    if program.batch == "dict":
        names = [NAMES[program.names][field] for field in program.fields]
        return f"dict(zip({names!r}, {values}))"
    return f"Batch(*{values})"


def field(program: Program, name: str) -> str:
    """Return the expression that reads a field of a micro-batch."""
    if program.batch in ("tuple", "list"):
        return f"micro[{program.fields.index(name)}]"
    key = NAMES[program.names][name]
    if program.batch == "nested":
        return f'micro["inputs"]["{key}"]' if name in ("x", "mask") else f'micro["{key}"]'
    return f'micro["{key}"]' if program.batch == "dict" else f"micro.{key}"


def _data(program: Program) -> str:
    """Return the lines that make `batches` or, for a loop, `windows` of micro-batches."""
    drawn = [
        [
            f"make_data({data_seed(program, number, place)}, {micro.rows}, {micro.labels!r})"
            for place, micro in enumerate(window)
        ]
        for number, window in enumerate(program.windows)
    ]
    rows = ",\n    ".join(f"[{', '.join(window)}]" for window in drawn)
    text = f"drawn = [\n    {rows},\n]\n"
    for line in mistake_of(program).data:
        text += line + "\n"
    if program.event == "nan":
        text += f"drawn[{program.at}][0][0][0, 0] = float('nan')\n"
    if program.is_whole:
        joined = "tuple(torch.cat(fields) for fields in zip(*window))"
        return text + f"batches = [{_batch_of(program, joined)} for window in drawn]"
    batch = _batch_of(program, "fields")
    if program.device != "cpu":
        batch = _batch_of(program, f'tuple(one.to("{program.device}") for one in fields)')
    return text + f"windows = [[{batch} for fields in window] for window in drawn]"


def _globals(program: Program) -> list[str]:
    """Return globals with the names of keys, and others that the loss reads."""
    lines = []
    if program.names == "globals":
        lines += [f"{name} = torch.zeros(3)" for name in program.fields]
    if program.loss == "classes":
        on = f', device="{program.device}"' if program.device != "cpu" else ""
        lines += [f"class_weights = torch.tensor([0.5, 1.0, 2.0], dtype=dtype{on})"]
    if program.event in ("raise", "oom"):
        lines += ["failing = [True]"]
    lines += mistake_of(program).before
    return ["\n".join(lines)] if lines else []


# ------------------------------------------------------------------ the loss


def forward_lines(program: Program) -> list[str]:
    """Return the lines from a micro-batch to `logits`, `y` and `counted`."""
    if program.loss in NEXT_TOKEN:
        return []
    inputs = [field(program, "x")] + ([field(program, "mask")] if program.has_tokens else [])
    called = CALLS[program.call].format(", ".join(inputs))
    lines = [f"logits = {called}", f"y = {field(program, 'y')}"]
    if program.has_tokens:
        lines = [lines[0] + ".flatten(0, 1)", lines[1] + ".flatten()"]
    lines += ["counted = y != -100"]
    flat = ".flatten(0, 1)" if program.has_tokens else ""
    if program.loss == "mse":
        lines += [f"errors = (logits - {field(program, 'target')}{flat}).square()[counted]"]
    if program.loss in ROW_LOSSES:
        lines += [f"target = {field(program, 'target')}{flat}"]
        lines += [f"losses = {ROW_LOSSES[program.loss]}", "losses = losses[counted]"]
    if program.loss == "weighted":
        weight = field(program, "weight")
        flat = f"[:, None].expand_as({field(program, 'y')}).flatten()" if flat else ""
        lines += [
            f"weight = {weight}{flat} * counted",
            'losses = F.cross_entropy(logits, y, reduction="none") * weight',
        ]
    return [*lines, *lines_of(mistake_of(program).forward, values(program), lines[0])]


def _cross_entropy(program: Program, reduction: str) -> str:
    options = [f'reduction="{reduction}"'] if reduction != "mean" else []
    options += ["weight=class_weights"] if program.loss == "classes" else []
    options += ["label_smoothing=0.1"] if program.loss == "smooth" else []
    if program.criterion:
        return f"nn.CrossEntropyLoss({', '.join(options)})(logits, y)"
    return f"F.cross_entropy({', '.join(['logits', 'y', *options])})"


def values(program: Program) -> dict[str, str]:
    """Return the expressions of the loss as a total, a mean, per unit, and of its units."""
    value = _values(program)
    return {**value, "units": f"float({value['units']})"} if program.numbers else value


def _values(program: Program) -> dict[str, str]:
    if program.loss in NEXT_TOKEN:
        return {"helper": "wb.causal_lm(model, micro)", "units": "counted.sum()"}
    if program.loss == "mse" and program.criterion:
        target = field(program, "target") + (".flatten(0, 1)" if program.has_tokens else "")
        call = f"(logits[counted], {target}[counted].to(logits.dtype))"
        calls = {name: f'nn.MSELoss(reduction="{name}"){call}' for name in ("sum", "mean", "none")}
        units = "3 * counted.sum()"
        return {"total": calls["sum"], "mean": calls["mean"], "unit": calls["none"], "units": units}
    if program.loss == "mse":
        return {
            "total": "errors.sum()",
            "mean": "errors.mean()",
            "unit": "errors",
            "units": "errors.numel()",
        }
    if program.loss in ROW_LOSSES:
        return {
            "total": "losses.sum()",
            "mean": "losses.mean()",
            "unit": "losses",
            "units": "len(losses)",
        }
    if program.loss == "weighted":
        units = "weight.sum()"
        return {"total": "losses.sum()", "mean": "losses.sum() / weight.sum()", "units": units}
    units = "counted.sum()"
    if program.loss == "classes":
        units = "class_weights[y[counted]].sum()"
    plain = program.__class__(**{**program.__dict__, "criterion": False})
    helper = _cross_entropy(plain, "mean").replace("F.", "wb.", 1)
    return {
        "total": _cross_entropy(program, "sum"),
        "mean": _cross_entropy(program, "mean"),
        "unit": _cross_entropy(program, "none") + "[counted]",
        "helper": helper,
        "units": units,
    }


def given_values(program: Program) -> dict[str, str]:
    """Return the same expressions, with a planted mistake in them."""
    return in_values(program, values(program))


def loss_value(program: Program) -> str:
    """Return the expression of what a loss function returns."""
    value = given_values(program)
    if program.loss == "terms":
        second = "(0.1 * logits.square().sum(), len(logits), 0.5)"
        first = f"wb.Loss({value['total']}, {value['units']})"
        if program.given == "mean":
            first = f"wb.mean_loss({value['mean']}, {value['units']})"
        return f'wb.Loss.terms({{"ce": {first}, "size": {second}}})'
    if program.given == "mean":
        return f"wb.mean_loss({value['mean']}, {value['units']})"
    if program.given in ("unit", "helper"):
        return value[program.given]
    return f"wb.Loss({value['total']}, {value['units']})"


def _loss(program: Program) -> list[str]:
    """Return the loss function, and the one that counts units; a loop has its loss inside."""
    parts = []
    if program.loss == "coupled":
        lines = [*forward_lines(program)[:1], *mistake_of(program).encode, "return logits"]
        parts += [_function("def encode(model, micro):", lines)]
        lines = [
            "scores = logits @ logits.T",
            "mean = F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))",
            "return wb.mean_loss(mean, len(scores))",
        ]
        return [
            *parts,
            _function("def compare(logits):", lines),
            "loss = wb.Coupled(encode, compare)",
        ]
    if program.is_whole or program.way == "run":
        arguments = "model, micro" if program.is_whole else "micro"
        lines = [*_failing(program), *forward_lines(program)]
        lines += _left(program) if program.is_whole else []
        lines += [f"return {loss_value(program)}"]
        parts += _in_style(program, f"def loss({arguments}):", lines)
    if program.counts:
        lines = [f"y = {field(program, 'y')}", "counted = y != -100"]
        if program.loss == "next":
            lines = [f"counted = {field(program, 'y')}[:, 1:] != -100"]
        if program.loss == "next unlabelled":
            lines = [f"counted = {field(program, 'mask')}[:, 1:]"]
        units = values(program)["units"]
        if program.loss == "mse":
            units = "counted.sum() * 3"
        if program.loss == "weighted":
            weight = field(program, "weight") + ("[:, None]" if program.has_tokens else "")
            units = f"({weight} * counted).sum()"
        if program.loss in ROW_LOSSES:
            units = "counted.sum()"
        if program.loss == "terms":
            units = f'{{"ce": {units}, "size": y.numel()}}'
        units = in_values(program, {**values(program), "count": units})["count"]
        parts += [_function("def count(micro):", [*lines, f"return {units}"])]
    return parts


def _left(program: Program) -> list[str]:
    """Return lines that somebody has left after the backward of a micro-batch."""
    after = mistake_of(program).after
    return lines_of(after, values(program), forward_lines(program)[0]) if after else []


def _failing(program: Program) -> list[str]:
    if program.event == "oom":
        rows = f"len({field(program, 'x')})"
        return [f"if failing and {rows} > 1 and len(record) == {program.at}:", *_MEMORY]
    if program.event != "raise":
        return []
    seed = "failing and model.training" if program.is_whole else "failing"
    return [f"if {seed} and len(record) == {program.at}:", "    failing.clear()", _RAISE]


_MEMORY = [
    "    failing.clear()",
    '    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")',
]
_RAISE = '    raise RuntimeError("a sample could not be read")'


def _inner(lines: list[str]) -> list[str]:
    """Return lines one level further in."""
    return indent("\n".join(lines), "    ").split("\n")


def _function(head: str, lines: list[str]) -> str:
    return "\n".join([head, *_inner(lines)])


def _in_style(program: Program, head: str, lines: list[str]) -> list[str]:
    """Return the loss function as people write it."""
    if program.style == "closure":
        lines = [line.replace("-100", "ignored") for line in lines]
        inner = indent(_function(head, lines), "    ")
        return [f"def make_loss(ignored):\n{inner}\n\n    return loss", "loss = make_loss(-100)"]
    if program.style == "class":
        lines = [line.replace("-100", "self.ignored") for line in lines]
        inner = indent(_function(head.replace("(", "(self, "), lines), "    ")
        ignored = "    @property\n    def ignored(self):\n        return -100\n\n"
        return [f"class Task:\n{ignored}{inner}", "loss = Task().loss"]
    if program.style in ("callable", "criterion"):
        lines = [line.replace("-100", "self.ignored") for line in lines]
        called = "__call__" if program.style == "callable" else "forward"
        inner = indent(_function(head.replace("loss(", f"{called}(self, "), lines), "    ")
        base = "" if program.style == "callable" else "(nn.Module)"
        return [f"class Task{base}:\n    ignored = -100\n\n{inner}", "loss = Task()"]
    if program.style == "partial":
        lines = [line.replace("-100", "ignored") for line in lines]
        head = head.replace("loss(", "loss_of(ignored, ")
        return [_function(head, lines), "loss = functools.partial(loss_of, -100)"]
    return [_function(head, lines)]


# ------------------------------------------------------------- the trainer


def _options(program: Program) -> list[str]:
    options = []
    if program.clip == "norm":
        options += ["clip_norm=0.1"]
    if program.clip == "loose":
        options += ["clip_norm=1e3"]
    if program.clip == "groups":
        options += ["clip_norm=[0.02, 0.1]"]
    if program.scheduler != "none" and program.way != "gradient":
        options += ["scheduler=scheduler"]
    close = ["clip_value=0.01"] if program.clip == "value" else []
    if program.event == "nan":
        close += ['nonfinite="skip"']
    close += [CLOSE[name] for name in program.close]
    if program.sharded in SYNCS:
        close += [f'sync="{program.sharded}"']
    if program.precision == "fp16":
        close += [f'scaler=torch.amp.GradScaler("{program.device}", init_scale=256.0)']
    if close:
        options += [f"close=wb.Close({', '.join(close)})"]
    if program.memory != "none":
        options += [MEMORY[program.memory]]
    if program.model == "batchnorm" and not program.is_whole:
        options += ['batchnorm="freeze"']
    if program.is_whole or program.way == "run":
        execute = "compile" if program.execute == "traced" else program.execute
        options += [f'execute="{execute}"']
    return options


CLOSE = {
    "zero_units": 'zero_units="skip"',
    "nonfinite": 'nonfinite="skip"',
    "sync": 'sync="none"',
    "on_gradient": "on_gradient=halve",
    "ema": "ema=ema",
}
MEMORY = {
    "host": 'memory=wb.Memory(optimizer_state="host")',
}


SYNCS = ("every", "gathered")
"""When FSDP2 reduces, other than by default."""
_FSDP = 'model = fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))'
SHARDED = {
    "ddp": "model = DistributedDataParallel(model)",
    **dict.fromkeys(("fsdp", *SYNCS), _FSDP),
    "hsdp": 'names = ("replicate", "shard")\n'
    'mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=names)\n'
    "model = fully_shard(model, mesh=mesh)",
}


def _mask_name(program: Program) -> str:
    """Return the argument that names the mask's leaf."""
    if program.batch in ("tuple", "list"):
        return f', mask="{program.fields.index("mask")}"'
    return f', mask="{NAMES[program.names]["mask"]}"'


def _trim(program: Program) -> str:
    """Return the argument that names the leaves to trim, if one is [samples, tokens, numbers]."""
    if "target" not in program.fields:
        return ""
    fields = [name for name in program.fields if name != "weight"]
    if program.batch in ("tuple", "list"):
        names = [str(program.fields.index(name)) for name in fields]
    else:
        names = [NAMES[program.names][name] for name in fields]
    return f", trim={tuple(names)!r}"


def _build(program: Program) -> list[str]:
    """Return the lines that make model, optimizer, scheduler and what trains them."""
    place = f', "{program.device}"' if program.device != "cpu" else ""
    lines = [
        "torch.manual_seed(3)",
        f"model = {model_call(program)}.to(dtype=dtype{place.replace(', ', ', device=')})",
    ]
    if program.way in hosts.HOSTS:
        lines += [f"optimizer = {optimizer_text(program)}", *mistake_of(program).start]
        return ["\n".join(lines)]
    if program.ranks > 1:
        lines += [SHARDED[program.sharded].replace("RANKS", str(program.ranks))]
    lines += [JUDGE] if program.joint else []
    lines += [TEACHER] if program.call == "teacher" else []
    lines += [f"optimizer = {optimizer_text(program)}"]
    if program.optimizer == "two":
        lines += [f"second = {optimizer_text(program).replace('[:1], lr=0.05', '[1:], lr=0.1')}"]
    if program.scheduler != "none":
        lines += [f"scheduler = {SCHEDULERS[program.scheduler]}"]
    before = []
    if "on_gradient" in program.close:
        halving = ["for name, parameter in named:", "    parameter.grad.mul_(0.5)"]
        before += [_function("def halve(named):", halving)]
    if "ema" in program.close:
        lines += ["ema = torch.optim.swa_utils.AveragedModel(model)"]
    options = _options(program)
    if program.is_whole:
        size = str(program.micro_batch)
        if program.tokens:
            mask = (
                "" if program.names == "long" and program.batch == "dict" else _mask_name(program)
            )
            size = f"wb.tokens({5 * program.micro_batch}{mask}{_trim(program)})"
        options = ["loss=loss", f"micro_batch={size}", *options]
        options += ["units=count"] if program.counts else []
        if program.precision in ("bf16", "fp16"):
            options += [f'precision="{program.precision}"']
        call = "train = wb.WholeBatch"
    else:
        options = [f"steps={_steps(program)}", *options]
        call = "train = wb.Accumulator"
    lines += ["optimizer.register_step_pre_hook(limit)"] if program.optimizer == "hooked" else []
    if program.event == "thaw":
        lines += ["thawed = next(p for p in model.parameters() if p.requires_grad)"]
        lines += ["thawed.requires_grad_(False)"]
    lines += mistake_of(program).start
    optimizer = "None" if program.way == "gradient" else "optimizer"
    optimizer = "[optimizer, second]" if program.optimizer == "two" else optimizer
    models = "[*model]" if program.call == "pair" else "model"
    lines += [f"{call}({models}, {optimizer}, {', '.join(options)})"]
    if program.joint:
        judging = "torch.optim.SGD(judge.parameters(), lr=0.1)"
        lines += [f"judging = wb.Accumulator(judge, {judging}, steps={_steps(program)})"]
    if program.event != "resume":
        return [*before, "\n".join(lines)]
    names = "model, optimizer, train" + (", scheduler" if program.scheduler != "none" else "")
    return [
        *before,
        _function("def build():", [*lines, f"return {names}"]),
        f"{names} = build()",
    ]


def _steps(program: Program) -> str:
    """Return `steps=`: a number, or a schedule where windows differ before the last."""
    lengths = [-(-len(window) // program.ranks) for window in program.windows]
    if len(set(lengths[:-1])) <= 1 and lengths[-1] <= lengths[0]:
        return str(lengths[0])
    return str(dict(enumerate(lengths)))


# ---------------------------------------------------------------- the loop

EVENTS = {
    # In another memory layout, too.
    "swap": [
        "for p in model.parameters():\n"
        "    p.data = (p.data.t().contiguous().t() if p.dim() == 2 else p.data) * 0.5"
    ],
    "gain": ["for p in model.parameters():\n    p.gain = 0.5"],
    "patch": ["globals()['activation'] = torch.relu"],
    "rate": ['for group in optimizer.param_groups:\n    group["lr"] *= 0.5'],
    "freeze": ["next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)"],
    "thaw": ["thawed.requires_grad_(True)"],
    "evaluate": [
        "model.eval()",
        "with torch.no_grad():\n    model(*example)",
        "model.train()",
    ],
    "group": [
        "added = [*model.base.requires_grad_(True).parameters()]",
        'optimizer.add_param_group({"params": added, "lr": 0.05})',
    ],
    "load": [
        "model.load_state_dict({name: value * 0.5 if value.is_floating_point() else value\n"
        "                       for name, value in model.state_dict().items()})"
    ],
}


def _event(program: Program) -> str:
    """Return the lines that stand between two windows; empty without an event."""
    if program.event == "resume":
        names = "model, optimizer, train" + (", scheduler" if program.scheduler != "none" else "")
        order = "model, optimizer, scheduler, train" if "sched" in names else names
        return (
            f"saved = copy.deepcopy([one.state_dict() for one in ({order})])\n"
            f"{names} = build()\n"
            f"for one, state in zip(({order}), saved):\n"
            "    one.load_state_dict(state)"
        )
    if program.event == "evaluate":
        inputs = "drawn[0][0][:2]" if program.has_tokens else "drawn[0][0][:1]"
        if program.device != "cpu":
            inputs = f'[one.to("{program.device}") for one in {inputs}]'
        return "\n".join([f"example = {inputs}", *EVENTS["evaluate"]])
    return "\n".join(EVENTS.get(program.event, []))


def _loop(program: Program) -> str:
    if program.way in hosts.HOSTS:
        lines = forward_lines(program)
        return hosts.loop_text(program, lines, given_values(program), _left(program))
    if program.is_whole:
        return _whole_batch_loop(program)
    if program.loop == "over":
        return _over_loop(program)
    return _counted_loop(program)


def _in_epochs(program: Program, lines: list[str]) -> list[str]:
    return ["for epoch in range(2):", *_inner(lines)] if program.epochs == 2 else lines


_REUSED = """class Reused:
    def __iter__(self):
        buffers = {}
        for fields in (fields for window in drawn for fields in window):
            copies = []
            for place, field in enumerate(fields):
                buffer = buffers.setdefault((place, field.shape), field.clone())
                copies.append(buffer.copy_(field))
            yield COPIED
"""


def _loader(program: Program, name: str, listed: str) -> list[str]:
    """Return the lines that make the loader `name`."""
    if program.loader == "list":
        return [f"{name} = {listed}"]
    if program.loader == "batches":
        return [f"{name} = DataLoader({listed}, batch_size=None)"]
    if program.loader == "reused":
        copied = _batch_of(program, "copies")
        return [_REUSED.replace("COPIED", copied), f"{name} = Reused()"]
    sizes = "[[next(place) for fields in window for _ in fields[0]] for window in drawn]"
    if not program.is_whole:
        sizes = "[[next(place) for _ in fields[0]] for window in drawn for fields in window]"
    stacked = _batch_of(program, "tuple(torch.stack(field) for field in zip(*samples))")
    return [
        "samples = [row for window in drawn for fields in window for row in zip(*fields)]",
        "place = iter(range(len(samples)))",
        f"{name} = DataLoader(",
        f"    samples, batch_sampler={sizes},",
        f"    collate_fn=lambda samples: {stacked},",
        ")",
    ]


def _whole_batch_loop(program: Program) -> str:
    loader = _loader(program, "loader", "batches")
    return "\n".join([*loader, *_in_epochs(program, _whole_batch_lines(program))])


def _whole_batch_lines(program: Program) -> list[str]:
    batches = "train.over(loader)" if program.way == "over" else "loader"
    if program.way == "over" and program.event == "resume":  # saved after a step, as its advice is
        body = [f"for batch in {batches}:", "    step = train.step(batch)", "    note(step)"]
        stop = [f"    if len(record) == {program.at}:", "        break"]
        return [*body, *stop, *_event(program).split("\n"), *body]
    lines = [f"for number, batch in enumerate({batches}):"]
    if event := _event(program):
        lines += [f"    if number == {program.at}:", *indent(event, "        ").split("\n")]
    call = "train.gradient(batch)" if program.way == "gradient" else "train.step(batch)"
    if program.event == "raise":
        again = ["    except RuntimeError:", f"        step = {call}"]
        lines += ["    try:", f"        step = {call}", *again]
    else:
        lines += [f"    step = {call}"]
    if program.way == "gradient":
        lines += ["    if step.skipped is None:", "        optimizer.step()"]
        if program.scheduler != "none":
            metric = "step.loss" if program.scheduler == "plateau" else ""
            lines += [f"        scheduler.step({metric})"]
        lines += ["    optimizer.zero_grad()"]
    return [*lines, "    note(step)"]


def body_lines(program: Program, last: str = "") -> list[str]:
    """Return the lines of a loop's body, from a micro-batch to `step`."""
    if program.way == "run":
        lines = [f"step = train.run(loss, micro{last})"]
    else:
        judging = f"judging.backward({JUDGED}, units=counted.sum())"
        lines = [*_failing(program), *forward_lines(program), *[judging] * program.joint]
        lines += _backward(program, last)
    if program.precision in ("bf16", "fp16"):
        kind = {"bf16": "bfloat16", "fp16": "float16"}[program.precision]
        lines = [f'with torch.autocast("{program.device}", dtype=torch.{kind}):', *_inner(lines)]
    left = _left(program)
    return [*lines, *(["if step is None:", *_inner(left)] if left else [])]


def _backward(program: Program, last: str) -> list[str]:
    value = given_values(program)
    if program.way == "announce":
        return [f"step = train.backward({loss_value(program)}{last})"]
    if program.way == "more":
        mean = program.given == "mean"
        first = f"mean={value['mean']}" if mean else value["total"]
        square = "logits.square()[counted]"
        second = f"mean={square}.sum() / {value['units']}" if mean else f"{square}.sum()"
        units = f"units={value['units']}"
        return [
            f"train.backward({first}, {units}, more=True{last})",
            forward_lines(program)[0],
            f"step = train.backward({second}, {units}{last})",
        ]
    if program.given == "mean":
        return [f"step = train.backward(mean={value['mean']}, units={value['units']}{last})"]
    if program.given == "total":
        return [f"step = train.backward({value['total']}, units={value['units']}{last})"]
    if program.given == "helper":
        return [f"step = train.backward({value['helper']}{last})"]
    loss = loss_value(program.__class__(**{**program.__dict__, "given": "mean"}))
    return [f"step = train.backward({loss}{last})"]


def _after_step(program: Program) -> list[str]:
    lines = ["if step is not None:", "    note(step)"]
    if event := _event(program):
        lines += [f"    if len(record) == {program.at}:", indent(event, "        ")]
    return lines


def _tail(program: Program) -> list[str]:
    """Return what follows a loop: a short last window closes when the loader has ended."""
    return ["if step is None:", "    step = train.last_step", *_inner(_after_step(program))]


def _over_loop(program: Program) -> str:
    lines = _loader(program, "loader", "[micro for window in windows for micro in window]")
    body = [*body_lines(program), *_after_step(program)]
    if program.event == "resume":
        body += [f"    if len(record) == {program.at}:\n        break"]
        more = _function("for micro in train.over(loader):", [*body_lines(program), *_plain_note()])
        first = _function("for micro in train.over(loader):", body)
        return "\n".join([*lines, first, *_tail(program), more, *_tail(program)])
    if program.event == "left":
        rows = sum(map(len, program.windows[: program.at]))
        body += [f"    if len(record) == {program.at}:\n        break"]
        more = [*body_lines(program), *_plain_note()]
        return "\n".join(
            [
                *lines,
                "bar = train.over(loader)",  # a progress bar holds it
                _function("for micro in bar:", body),
                "step = None",
                _function(f"for micro in train.over([*loader][{rows}:]):", more),
                "if step is None and len(record) < len(windows):",
                *_inner(["note(train.last_step)"]),
            ]
        )
    over = "wb.over(loader, train, judging)" if program.joint else "train.over(loader)"
    loop = _function(f"for micro in {over}:", body).split("\n")
    return "\n".join([*lines, *_in_epochs(program, [*loop, *_tail(program)])])


def _plain_note() -> list[str]:
    return ["if step is not None:", "    note(step)"]


def _counted_loop(program: Program) -> str:
    last = ", last=place == len(window) - 1" if program.loop == "last" else ""
    inner = ["for place, micro in enumerate(window):"]
    inner += _inner(body_lines(program, last))
    if program.event == "raise":
        again = _inner(inner)
        inner = ["try:", *again, "except RuntimeError:", "    train.discard()", *again]
    start = []
    if program.event == "discard":
        start = [f"if len(record) == {program.at}:", "    micro = window[0]"]
        start += [*_inner(body_lines(program, ", last=False")), "    train.discard()"]
    if program.way == "announce":
        y = field(program, "y")
        counted = f"sum(({y} != -100).sum() for micro in window)"
        if program.loss != "terms":
            raise ValueError("announce() is written for terms only")
        every = f"sum({y}.numel() for micro in window)"
        start += [f'train.announce({{"ce": {counted}, "size": {every}}})']
    flush = ["if step is None:", "    step = train.flush()"] if program.loop == "flush" else []
    return _function("for window in windows:", [*start, *inner, *flush, *_after_step(program)])
