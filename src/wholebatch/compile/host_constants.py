"""Constants that a model makes on the host while the rest of the graph is on a device.

`torch.tensor(0.5, device=x.device)` is a number on the host and a copy from it. A CUDA graph cannot
record a copy from ordinary host memory, and a graph that is only launched copies it at every
micro-batch. So what the host computes from constants alone is computed once and kept on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from wholebatch.compile.constant_values import computed
from wholebatch.compile.fusion import drop_unused


def lift_host_constants(module: fx.GraphModule, device: torch.device) -> None:
    """Give operations on `device` their constants on it, not on the host.

    Host tensors that come from inputs or random generators stay where they are.
    """
    known: dict[fx.Node, Any] = {}
    lifted: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not _is_on(node, module, device.type):
            continue
        for source in node.all_input_nodes:
            if source not in lifted and _is_on(source, module, "cpu"):
                value = computed(source, module, known, any_size=True)
                if isinstance(value, Tensor):
                    constant = _constant(module, source, value.to(device), len(lifted))
                    lifted[source], known[constant] = constant, value
            if source in lifted:
                node.replace_input_with(source, lifted[source])
    if lifted:
        drop_unused(module.graph)
        module.recompile()


def _is_on(node: fx.Node, module: fx.GraphModule, kind: str) -> bool:
    value = node.meta.get("val")
    if node.op == "get_attr":
        value = getattr(module, str(node.target), None)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(item, Tensor) and item.device.type == kind for item in values)


def _constant(module: fx.GraphModule, node: fx.Node, value: Tensor, number: int) -> fx.Node:
    """Add a constant to the module, and return a node for it beside `node`."""
    name = f"_lifted_constant{number}"
    module.register_buffer(name, value, persistent=False)
    with module.graph.inserting_after(node):
        constant = module.graph.get_attr(name)
    values = (inner.meta.get("val") for inner in module.graph.nodes)
    mode = next((fake.fake_mode for fake in values if hasattr(fake, "fake_mode")), None)
    if mode is not None:
        constant.meta["val"] = mode.from_tensor(value)
    return constant
