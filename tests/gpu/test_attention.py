"""Attention with a learnt bias: the kernels against float64, and a model that uses them."""

from __future__ import annotations

import unittest
import warnings

import torch
from torch import Tensor

import wholebatch as wb
from wholebatch.compile import biased_attention

DEVICE = torch.device("cuda")
CASES = ((512, 512, 64, 0.1), (83, 131, 32, 0.0), (1, 300, 128, 0.2))
"""Rows, columns, size of a head and dropout."""


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_this_device_has_it() -> None:
    assert biased_attention.can_fuse_attention(DEVICE)


def test_every_shape_is_as_near_to_float64_as_its_rounding() -> None:
    torch.manual_seed(0)
    one = torch.ones(1, 1, device=DEVICE, requires_grad=True)
    with warnings.catch_warnings():  # Autograd's thread warns at its first product.
        warnings.simplefilter("ignore")
        (one @ one).sum().backward()
    for rows, columns, size, dropout in CASES:
        for dtype, near in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
            shapes = (2, 3, rows, size), (2, 3, columns, size), (2, 3, columns, size)
            q, k, v = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in shapes)
            bias = torch.randn(1, 3, rows, columns, device=DEVICE).to(dtype).expand(2, -1, -1, -1)
            gradient = torch.randn(2, 3, rows, size, device=DEVICE).to(dtype)
            draw = torch.rand(1, device=DEVICE) if dropout else None
            found = biased_attention._operation()(gradient, q, k, v, bias, draw, dropout, 0.125)
            given = [one.double().requires_grad_() for one in (q, k, v, bias)]
            kept = biased_attention._kept(bias.double(), draw, dropout)
            shares = (given[0] @ given[1].mT * 0.125 + given[3]).softmax(-1) * kept
            out = shares @ given[2]
            wanted = [out, *torch.autograd.grad(out, given, gradient.double())]
            for place, (one, two) in enumerate(zip(found, wanted, strict=True)):
                assert _distance(one, two) <= near, (rows, columns, size, dropout, dtype, place)


def test_rows_that_are_masked_altogether_are_zero() -> None:
    q, k, v = (torch.randn(1, 1, 70, 64, device=DEVICE).bfloat16() for _ in range(3))
    bias = torch.zeros(1, 1, 70, 70, device=DEVICE).bfloat16()
    bias[:, :, 5] = float("-inf")
    found = biased_attention._operation()(q, q, k, v, bias, None, 0.0, 0.125)
    assert all(bool(one.isfinite().all()) for one in found)
    assert not found[0][:, :, 5].any()
    assert not found[1][:, :, 5].any()


def _trained(execute: str, dtype: torch.dtype) -> Tensor:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=64,
        d_kv=32,
        d_ff=128,
        num_layers=2,
        num_heads=2,
        use_cache=False,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = T5ForConditionalGeneration(config).to(DEVICE, dtype)
    train = wb.WholeBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, batch: wb.mean_loss(model(**batch).loss, batch["labels"].numel()),
        micro_batch=2,
        precision="bf16" if dtype is torch.float32 else "full",
        execute=execute,  # type: ignore[arg-type]
    )
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens = torch.randint(1, 64, (8, 96), generator=draw).to(DEVICE)
        train.step({"input_ids": tokens, "labels": tokens})
    if execute == "graph":
        executor = train._runner.executor
        assert executor.mode == "graph of compile", executor.notes.history
    return torch.cat([one.detach().double().flatten() for one in model.parameters()])


def test_a_t5_uses_them() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise unittest.SkipTest("needs transformers") from None
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.filterwarnings("error", "execute=")
        exact = _trained("eager", torch.float64)
        eager, graph = _trained("eager", torch.float32), _trained("graph", torch.float32)
    ours, theirs = _distance(graph, exact), _distance(eager, exact)
    print(f"  graph {ours:.2e} from float64, eager code {theirs:.2e}")
    assert ours <= 1.25 * theirs
