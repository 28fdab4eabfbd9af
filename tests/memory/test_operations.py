"""The operations of attention are counted, whatever heads share their keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wholebatch.memory.operations import operation_counter

aten = torch.ops.aten


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_grouped_queries_cost_what_ungrouped_ones_do(heads: int) -> None:
    query = torch.empty(2, 4, 8, 16, device="meta", dtype=torch.bfloat16)
    key = torch.empty(2, heads, 8, 16, device="meta", dtype=torch.bfloat16)
    with operation_counter() as counter:
        out, *rest = aten._scaled_dot_product_flash_attention(query, key, key, is_causal=True)
    product = 2 * (2 * 4) * (8 * 16 * 8)  # of queries with keys, and of scores with values
    assert counter.get_total_flops() == 2 * product
    kept: list[Any] = [out, *rest[:5], 0.0, True, *rest[5:7]]
    with operation_counter() as counter:
        aten._scaled_dot_product_flash_attention_backward(out, query, key, key, *kept)
    assert counter.get_total_flops() == 5 * product
