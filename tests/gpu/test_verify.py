"""The proof on a CUDA device: every precision, mode and policy, a 124 M model within a minute."""

from __future__ import annotations

import time
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional

import wholebatch as wb

Micro = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.mix(self.norm1(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    """With the sizes of the smallest GPT-2: 124 M parameters and an output layer of its own."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.read = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        logits: Tensor = self.read(self.norm(self.blocks(x)))
        return logits


def loss(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def texts(samples: int, length: int, vocabulary: int) -> Micro:
    """On the host; another number of labels counts in every sample."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (samples, length + 1), generator=generator)
    counted = torch.randint(length // 8, length + 1, (samples, 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.arange(length) >= counted, -100)
    return {"x": tokens[:, :-1].clone(), "y": labels}


def small() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(200, 64, 64, 4, 2).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def test_a_model_of_124_million_within_a_minute() -> None:
    torch.manual_seed(0)
    model = GPT(50304, 1024, 768, 12, 12).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    batch = texts(16, 1024, 50304)
    for precision in ("bf16", "full"):
        began = time.thread_time()  # It does not depend on how busy the machine is.
        verdict = wb.verify(
            model,
            loss,
            batch,
            micro_batch=3,
            optimizer=optimizer,
            precision=precision,
            clip_norm=1.0,
        )
        seconds = time.thread_time() - began
        print(f"124 M, {precision}: {seconds:.1f} s; {verdict}")
        assert verdict.same, str(verdict)
        assert verdict.samples == 16
        assert seconds < 60, f"{precision}: {seconds:.1f} s"


def test_every_execution_mode() -> None:
    for execute in ("auto", "eager", "compile", "graph"):
        model, optimizer = small()
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # Inductor warns about itself
            verdict = wb.verify(
                model,
                loss,
                texts(24, 64, 200),
                micro_batch=6,
                optimizer=optimizer,
                precision="bf16",
                execute=execute,
            )
        print(f"{execute}: {verdict.line}")
        assert verdict.same, f"{execute}: {verdict}"


def test_a_batch_that_does_not_fit_is_cut_down() -> None:
    """The undivided batch asks for more memory than the process may take; a part of it does not."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25)  # other tests may share the device
    per_sample = total // 4 // 40

    def hungry(model: nn.Module, micro: Micro) -> wb.Loss:
        held = torch.empty(per_sample * len(micro["y"]), dtype=torch.int8, device="cuda")
        found = loss(model, micro)
        del held
        return found

    model, optimizer = small()
    torch.cuda.empty_cache()
    batch = texts(64, 64, 200)
    verdict = wb.verify(model, hungry, batch, micro_batch=3, optimizer=optimizer, float64=False)
    print(verdict)
    assert verdict.same, str(verdict)
    assert 24 <= verdict.samples < 41
    assert any("does not fit in memory" in note for note in verdict.notes)
