"""The loss over a large vocabulary beside cut-cross-entropy and Liger, on one CUDA device.

    python benchmarks/gpu_vocabulary.py                    # the table of docs/benchmarks
    python benchmarks/gpu_vocabulary.py --vocabularies 128000 --ways graph cut
    python benchmarks/gpu_vocabulary.py --tokens 300 --width 64 --vocabularies 500   # on a CPU too

Every way is the loss function of the same window: micro-batches of `--tokens` hidden states
(trained parameters, so that their gradient is made) and an output layer with fp32 weights, in bf16
autocast, whose gradients are added into fp32. The time is that of a micro-batch within a window;
the memory is the most that the process had reserved in it, less parameters, gradients and bf16
copies; the errors are those of the gradients against float64, from the same 16-bit weights and
hidden states.
The peers must be importable (`cut-cross-entropy` 25.1, `liger-kernel` 0.8.5).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import wholebatch as wb  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIB = 2.0**20
MICRO_BATCHES = 6


@dataclass
class Output:
    """What a language model of Hugging Face returns."""

    last_hidden_state: Any = None
    logits: Any = None


class States(nn.Module):
    """Hidden states that are parameters."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.states = nn.Parameter(torch.randn(tokens, width))

    def forward(self, input_ids: Tensor) -> Any:
        samples, length = input_ids.shape
        states = self.states[None, :length].bfloat16().expand(samples, -1, -1)
        return Output(last_hidden_state=states)


class Model(nn.Module):
    """Shaped like a language model of Hugging Face."""

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.base_model = States(tokens, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Any:
        return Output(logits=self.head(self.base_model(input_ids).last_hidden_state))


def of_hidden(model: Any, micro: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the 16-bit weight and the shifted labels, as the peers take them."""
    hidden = model.base_model(micro["input_ids"]).last_hidden_state[:, :-1].flatten(0, 1)
    return hidden, model.head.weight.bfloat16(), micro["input_ids"][:, 1:].flatten()


def cut(filter_eps: str | None) -> Callable[[Any, Any], wb.Loss]:
    from cut_cross_entropy import linear_cross_entropy

    def loss(model: Any, micro: dict[str, Tensor]) -> wb.Loss:
        hidden, weight, labels = of_hidden(model, micro)
        total = linear_cross_entropy(hidden, weight, labels, reduction="sum", filter_eps=filter_eps)
        return wb.Loss(total.float(), labels.numel())

    return loss


def liger() -> Callable[[Any, Any], wb.Loss]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    function = LigerFusedLinearCrossEntropyLoss(reduction="sum")

    def loss(model: Any, micro: dict[str, Tensor]) -> wb.Loss:
        hidden, weight, labels = of_hidden(model, micro)
        return wb.Loss(function(weight, hidden, labels).float(), labels.numel())

    return loss


def whole(model: Any, micro: dict[str, Tensor]) -> wb.Loss:
    return wb.cross_entropy(model(micro["input_ids"]).logits[:, :-1], micro["input_ids"][:, 1:])


WAYS: dict[str, tuple[str, Callable[[], Callable[[Any, Any], wb.Loss]], str]] = {
    "graph": ("wholebatch, recorded", lambda: wb.causal_lm, "graph"),
    "eager": ("wholebatch, eager", lambda: wb.causal_lm, "eager"),
    "cut": ("cut-cross-entropy", lambda: cut("high"), "eager"),
    "cut-exact": ("cut-cross-entropy, nothing filtered", lambda: cut(None), "eager"),
    "liger": ("Liger", liger, "eager"),
    "whole": ("all logits, eager", lambda: whole, "eager"),
}


def truth(model: Model, tokens: Tensor) -> list[Tensor]:
    """The gradients of one micro-batch in float64, from 16-bit weights and states."""
    hidden = model.base_model.states.detach()[: len(tokens) - 1].bfloat16().double()
    weight, labels = model.head.weight.detach().bfloat16().double(), tokens[1:]
    d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    for start in range(0, len(labels), 512):
        part = slice(start, start + 512)
        slope = (hidden[part] @ weight.t()).softmax(-1)
        slope -= functional.one_hot(labels[part], len(weight))
        d_hidden[part] = slope @ weight
        d_weight.addmm_(slope.t(), hidden[part])
    # On the host: on the device, they would count as memory of the ways that are measured later.
    return [(d_hidden / len(labels)).cpu(), (d_weight / len(labels)).cpu()]


def error(model: Model, right: list[Tensor]) -> list[float]:
    made = [model.base_model.states.grad, model.head.weight.grad]
    pairs = [(a, b.to(a.device)) for a, b in zip(made, right, strict=True) if a is not None]
    return [float((a[: len(b)].double() - b).norm() / b.norm()) for a, b in pairs]


def measured(way: str, tokens: int, width: int, vocabulary: int, right: Any) -> dict[str, Any]:
    _, make, execute = WAYS[way]
    torch.manual_seed(0)
    with DEVICE:
        model = Model(tokens, width, vocabulary)
        ids = torch.randint(0, vocabulary, (MICRO_BATCHES, tokens))
        ids[:] = ids[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    on_cuda = DEVICE.type == "cuda"
    train = wb.WholeBatch(
        model,
        optimizer,
        loss=make(),
        micro_batch=1,
        precision="bf16",
        execute=execute if on_cuda else "eager",  # type: ignore[arg-type]
        units=lambda micro: micro["input_ids"].numel() - micro["input_ids"].shape[0],
    )
    for _ in range(2):
        train.step({"input_ids": ids})
    gc.collect()
    events: list[Any] = []

    def note(*_: int) -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    mode = train._runner.executor.mode
    found: dict[str, Any] = {"way": way, "vocabulary": vocabulary, "mode": mode}
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            train.step({"input_ids": ids}, after_micro=note)
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        del times[MICRO_BATCHES - 1]  # the close
        numbers = sum(p.numel() for p in model.parameters())
        copies = 2 * model.head.weight.numel()
        found["ms"] = statistics.median(times)
        found["mib"] = (torch.cuda.max_memory_reserved() - 8 * numbers - copies) / MIB
    train.gradient({"input_ids": ids})
    right = truth(model, ids[0]) if right is None else right
    found["errors"] = error(model, right)
    return found | {"right": right}


def page(rows: list[dict[str, Any]], machine: str) -> str:
    """The table, in Markdown."""
    lines = [
        "# The loss over a large vocabulary",
        "",
        f"Written by `benchmarks/gpu_vocabulary.py` on {date.today().isoformat()}. {machine}",
        "",
        "| vocabulary | loss | ms | beside cut-cross-entropy | MiB | beside cut-cross-entropy | "
        "error of d(hidden) | error of d(weight) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peer = next(
            (r for r in rows if r["way"] == "cut" and r["vocabulary"] == row["vocabulary"]), row
        )
        errors = " | ".join(f"{one:.1e}" for one in row["errors"])
        lines.append(
            f"| {row['vocabulary']} | {WAYS[row['way']][0]} | {row['ms']:.2f} | "
            f"{row['ms'] / peer['ms']:.2f}× | {row['mib']:.0f} | {row['mib'] / peer['mib']:.2f}× | "
            f"{errors} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000, 128000, 256000])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--out", type=Path, help="where to write vocabulary.md and .json")
    options = parser.parse_args()
    rows = []
    for vocabulary in options.vocabularies:
        right = None
        for way in options.ways:
            try:
                row = measured(way, options.tokens, options.width, vocabulary, right)
            except Exception as problem:  # a peer may be missing, or refuse
                print(f"{way} {vocabulary}: {type(problem).__name__}: {str(problem)[:300]}")
                continue
            finally:
                gc.collect()
                if DEVICE.type == "cuda":
                    torch.cuda.empty_cache()
            right = row.pop("right")
            print(json.dumps(row), flush=True)
            rows.append(row)
    if DEVICE.type != "cuda":
        return 0
    machine = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; micro-batches of "
        f"{options.tokens} tokens, hidden states of {options.width}."
    )
    text = page(rows, machine)
    print(text, flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "vocabulary.md").write_text(text, encoding="utf-8")
        (options.out / "vocabulary.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
