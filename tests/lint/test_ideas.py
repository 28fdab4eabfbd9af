"""What the sets AH and AI taught: one idea in several spellings, each with a right twin."""

from __future__ import annotations

import textwrap

import pytest

from wholebatch.lint import Settings, lint_source

RULES_ONLY = Settings(select=("WB1",))


def codes(source: str) -> set[str]:
    return {f.code for f in lint_source(textwrap.dedent(source), settings=RULES_ONLY)}


@pytest.mark.parametrize(("loop", "found"), [("rollouts", False), ("batches", True)])
def test_a_backward_of_its_own_for_each_sample(loop: str, found: bool) -> None:
    source = f"""
        def train(actor, optimizer, accum, prompts):
            for prompt in prompts:
                for _ in range(accum):
                    {loop} = play(actor, prompt)
                    for i, (ids, mask) in enumerate({loop}):
                        loss = (actor(ids) * mask).sum() / mask.sum()
                        (loss / (len({loop}) * accum)).backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    assert ("WB103" in codes(source)) is found


@pytest.mark.parametrize("plugin", [", deepspeed_plugin=plugin", ""])
def test_deepspeed_counts_its_windows_over_epochs(plugin: str) -> None:
    source = f"""
        plugin = DeepSpeedPlugin(gradient_accumulation_steps=accum)
        accelerator = Accelerator(mixed_precision="bf16"{plugin})
        for epoch in range(epochs):
            for step, batch in enumerate(loader):
                accelerator.backward(model(batch).mean() / accum)
                if (step + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    """
    assert ("WB109" in codes(source)) is (plugin == "")


@pytest.mark.parametrize("accum", ["gradient_accumulation_steps=k", ""])
def test_one_of_two_accelerators_is_told_its_number(accum: str) -> None:
    source = f"""
        def train(loader, model, optimizer, k):
            try:
                accelerator = Accelerator(deepspeed_plugin=plugin)
            except ImportError:
                accelerator = Accelerator({accum})
            for batch in loader:
                optimizer.zero_grad()
                accelerator.backward(model(batch).mean())
                optimizer.step()
    """
    assert ("WB119" in codes(source)) is (accum != "")


@pytest.mark.parametrize(("name", "found"), [("acc_steps", True), ("words", False)])
def test_a_number_of_micro_batches_that_each_batch_decides(name: str, found: bool) -> None:
    source = f"""
        def train(model, optimizer, scaler, loader, epochs):
            for epoch in range(epochs):
                for i, (x, lengths) in enumerate(loader):
                    {name} = max(1, int(lengths.float().mean().item() / 64))
                    loss = model(x).mean() / {name}
                    scaler.scale(loss).backward()
                    if (i + 1) % {name} == 0:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
    """
    reported = codes(source)
    assert ("WB106" in reported) is found
    assert ("WB109" in reported) is found
