"""Every regular expression of the linter, with a text that it finds and one that it does not."""

from __future__ import annotations

import ast
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest

from wholebatch import lint

SOURCE = Path(lint.__file__).parent
EXAMPLES = {
    "check_files._TRAINS": ("loss.backward()", "backward pass"),
    "check_files._NOQA": ("x = 1  # noqa: WB101", "x = 1  # note"),
    "events._SCHEDULER": ("OneCycleLR", "reader"),
    "events._OPTIMIZER": ("opt_g", "option"),
    "events._SCALER": ("grad_scaler", "scaler_meter"),
    "events._ENGINE": ("model_engine", "engineer"),
    "events.MODEL_NAME": ("base_model", "save_model"),
    "events._RATE": ("lr", "closure"),
    "expressions.ACCUMULATION_NAME": ("args.grad_acc", "steps"),
    "expressions._SYMBOL_MARK": ("i@3", "a @ b"),
    "loop_windows._MICRO_NAME": ("micro_batches", "loader"),
    "loop_windows._MAY_WAIT": ("self.should_update()", "self.training"),
    "loop_windows._DEEPSPEED_ACCUMULATES": ("'gradient_accumulation_steps': 4", "gasoline"),
    "loss_origin.LOSS_NAME": ("F.mse(x)", "since"),
    "loss_origin._WEIGHT": ("loss_weight", "loss"),
    "loss_origin._DEVICES": ("dist.get_world_size()", "batch_size"),
    "window_boundary._LAST_NAME": ("len(loader)", "step"),
    "rule_base.RESCALED": ("p.grad /= n", "p.grad is None"),
    "wb101._SCALING_FACTOR": ("inv_steps", "loss_scale"),
    "wb101._TERM_WEIGHT": ("aux_coef", "1 - ratio"),
    "wb101._SUMS": ('reduction="sum"', 'reduction="mean"'),
    "wb101._WHOLE_BATCH": ("total_tokens=n", "labels=y"),
    "wb101._CLOCK": ("global_step", "loss"),
    "wb101._MODEL": ("self.model", "penalty"),
    "wb102._DEEPSPEED": ("import deepspeed", "deepspeed.backward(loss, scale_wrt_gas=False)"),
    "wb102._ENGINE_STEPS": ('"gradient_accumulation_steps": 1', "gradient_accumulation_steps = 1"),
    "wb103._LANGUAGE_MODEL": ("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
    "wb103._MASKING_COLLATOR": ("DataCollatorForSeq2Seq(tok)", "DataCollatorWithPadding(tok)"),
    "wb103._PACKED": ("packing=True", "packing=False"),
    "wb103._PADDING": ("tokenizer.pad_token_id", "index"),
    "wb103._MASK": ("attention_mask.sum()", "loss.sum()"),
    "wb103._EQUAL_COUNTS": ("mask_ratio=0.75", "mask"),
    "wb103._WHOLE_WINDOW": ("total_tokens", "tokens"),
    "wb103._SAMPLES": ("sample batch", "batch loader"),
    "wb106._UNSCALES_ITSELF": ("accelerator.clip_grad_norm_", "torch.nn.utils.clip_grad_norm_"),
    "wb116.LOADER_LENGTH": ("len(train_loader) * epochs", "len(train_loader) // accum"),
    "wb116.STEPS_TIMES_COUNT": ("max_steps * args.accum", "max_steps * epochs"),
    "wb111._HELD": ("with model.no_sync():", "torch.cuda.synchronize()"),
    "wb111._WRAPS": ("NativeDDP", "DataParallel"),
    "wb113._KNOWN_MODEL": ("resnet50", "vit_b_16"),
    "wb113._FROZEN": ("freeze_bn(model)", "model.train()"),
    "wb114._COUPLED_NAME": ("InfoNCE", "CrossEntropyLoss"),
    "wb114._CACHED": ("GradCache(model)", "cache"),
    "wb114._SIMILARITY": ("a @ b.T", "logits"),
    "wb114._DIAGONAL": ("torch.arange(n)", "labels"),
    "wb115._LOGS": ("set_postfix", "backward"),
    "wb115._KEEPS": ("loss_meter", "params"),
    "wb115._MATH": ("log_softmax", "log_metrics"),
    "source_files._MAGIC": ("%matplotlib inline", "x = 5 % 3"),
}


def patterns() -> dict[str, re.Pattern[str]]:
    """Return the compiled patterns by the module that makes them and their name."""
    found = {}
    for module in pkgutil.walk_packages(lint.__path__, "wholebatch.lint."):
        if module.name.endswith("__main__"):
            continue
        loaded = import_module(module.name)
        made = Path(str(loaded.__file__)).read_text(encoding="utf-8")
        own = module.name.rpartition(".")[2]
        own = own.partition("_")[0] if own.startswith("wb") else own
        found |= {
            f"{own}.{name}": value
            for name, value in vars(loaded).items()
            if isinstance(value, re.Pattern) and f"{name} = re.compile" in made
        }
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_pattern_finds_what_it_is_for(name: str) -> None:
    matching, other = EXAMPLES[name]
    pattern = patterns()[name]
    assert pattern.search(matching)
    assert not pattern.search(other)


def test_every_pattern_has_an_example_and_there_are_at_most_60() -> None:
    assert patterns().keys() == EXAMPLES.keys()
    calls = [
        node
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.")
    ]
    assert len([c for c in calls if ast.unparse(c.func) != "re.escape"]) <= 60
