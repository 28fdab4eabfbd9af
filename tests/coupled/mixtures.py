"""Tiny mixtures of experts of Transformers, computed in float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Batch = dict[str, Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,  # large: its gradient must count
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


class InFloat64(TorchDispatchMode):
    """Turn the casts to float32 in a model's code into casts to float64, in backwards too.

    Routers and norms of Transformers compute in float32, whatever the model's dtype.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("dtype") is torch.float32:
            given["dtype"] = torch.float64
        return func(*args, **given)


def mixture(kind: str, **more: Any) -> nn.Module:
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    config._experts_implementation = "eager"  # torch has no grouped product in float64
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    with torch.no_grad():
        for name, one in model.named_parameters():  # experts that are clearly not balanced
            if "gate.weight" in name or "router" in name:
                one.mul_(20.0)
    return model.train()


def texts(number: int = 9, length: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 50, (number, length), generator=generator)
    sizes = torch.randint(3, length + 1, (number,), generator=generator)
    mask = (torch.arange(length) < sizes[:, None]).long()
    ids = ids * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 2:4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def undivided(model: Any, batch: Batch) -> tuple[float, list[Tensor]]:
    """The loss that the model itself makes of the whole batch, and its gradient."""
    model.zero_grad()
    with InFloat64():
        loss = model(**batch).loss
        loss.backward()
    made = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    model.zero_grad()
    return float(loss.detach()), [one.clone() for one in made]


def trained(kind: type[Any], model: Any, batch: Batch, folder: str, **options: Any) -> list[Tensor]:
    """The gradient of the first update that a trainer makes of this batch, by SGD."""
    from transformers import TrainingArguments

    rows = [{name: leaf[i] for name, leaf in batch.items()} for i in range(len(batch["labels"]))]
    before = [p.detach().clone() for p in model.parameters()]
    given: dict[str, Any] = {
        "output_dir": folder,
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
    }
    args = TrainingArguments(**{**given, **options})
    with InFloat64():
        kind(model=model, args=args, train_dataset=rows).train()
    return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
