"""Small models for the tests of execute/, and how to run them as traced without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb
from tests.support import measured, mlp, samples, sgd
from wholebatch.compile.gradient_buffers import Gradients
from wholebatch.compile.graph_inputs import Key, take_apart
from wholebatch.compile.graph_rewrite import Rewritten, rewrite
from wholebatch.compile.guards import GuardSet
from wholebatch.compile.joint_graph import Prepared
from wholebatch.compile.symbolic_sizes import differing
from wholebatch.compile.trace import Traced, trace
from wholebatch.window.autocast import Precision

Micro = dict[str, Tensor]


class Tagger(nn.Module):
    """Tied embedding with a padding row, LayerNorm, attention, and a layer that is not used."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.drop = nn.Dropout(dropout)
        self.read = nn.Linear(8, 11, bias=False)
        self.read.weight = self.embed.weight
        self.spare = nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))
        self.seen: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        with torch.no_grad():
            self.seen.add_(x.sum((0, 1)))
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
        logits: Tensor = self.read(self.drop(x + mixed[:, 0]))
        return logits


def dropping() -> nn.Module:
    """Drops half of its 64 inputs, and weighs the rest."""
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))


def total(model: nn.Module, micro: Tensor) -> wb.Loss:
    """The sum of what a model gives."""
    return wb.Loss(model(micro).sum(), len(micro))


def tagged(number: int, length: int = 6) -> Micro:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 11, (number, length), generator=generator)
    labels = torch.randint(0, 11, (number, length), generator=generator)
    counted = torch.randint(1, length, (number, 1), generator=generator)
    return {"x": tokens, "y": labels.masked_fill(torch.arange(length) >= counted, -100)}


def loss(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def mean_of_tokens(model: nn.Module, micro: Micro) -> Tensor:
    return functional.cross_entropy(model(micro["x"]).flatten(0, -2), micro["y"].flatten())


def traced(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> wb.WholeBatch:
    """A WholeBatch whose graphs run as traced: the compiler takes too long for most tests."""
    options = {"loss": loss, "micro_batch": 4, "execute": "compile", **options}
    train = measured(model, optimizer or sgd(model), **{"noise": None, **options})
    train._runner.executor._plan.compiles = False
    return train


def mode_of(train: wb.WholeBatch) -> str:
    return train._runner.executor.mode


def steps_of(train: wb.WholeBatch) -> dict[Key, Prepared]:
    """The graphs that are in use, by the kind of micro-batch."""
    kinds = train._runner.executor.kinds.by_key
    return {
        key: slot.ready
        for key, kind in kinds.items()
        for slot in kind.slots
        if slot.ready is not None
    }


__all__ = [
    "Micro",
    "Tagger",
    "loss",
    "mean_of_tokens",
    "mlp",
    "mode_of",
    "samples",
    "steps_of",
    "tagged",
    "trace_of",
    "traced",
]


def trace_of(
    model: nn.Module,
    function: Callable[[Any, Any], Any],
    micro: Any,
    precision: Precision,
    *others: Key,
) -> Traced:
    """The graph of a micro-step; with keys of other kinds, of the sizes that differ."""
    inputs = take_apart(micro)
    places = differing(inputs, others) if others else ()
    with torch.enable_grad(), precision.forward():
        guards = GuardSet(function, model, inputs, open_places=places)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return trace(guards.program, precision.forward, model, trained, inputs)


def run_rewritten(
    model: nn.Module,
    function: Callable[[Any, Any], wb.Loss],
    precision: Precision,
    *,
    held: float = 0.0,
) -> tuple[Rewritten, list[Tensor], list[Tensor]]:
    """The rewritten graph of a micro-step, what it returns, and what it has added to the buffers.

    These have `held` in them before; the seed is a quarter.
    """
    micro = tagged(5)
    inputs = take_apart(micro)
    written = trace_of(model, function, micro, precision)
    trained = [parameter.detach() for parameter in written.trained]
    gradients = Gradients(written.trained)
    buffers = gradients.of(written.used)
    rewritten = rewrite(written, len(trained), [buffer.dtype for buffer in buffers])
    torch._foreach_add_(buffers, held)
    casts = [trained[index].to(dtype) for index, dtype in rewritten.casts]
    others = [other.clone() for other in written.others]
    seed = torch.tensor(0.25).to(written.form.dtypes[0])
    with torch.no_grad():
        read = [[*casts, *buffers][place] for place in rewritten.read]
        outputs = rewritten.graph(*trained, *others, *inputs.tensors, seed, *read)
    return rewritten, list(outputs), [buffer - held for buffer in buffers]
