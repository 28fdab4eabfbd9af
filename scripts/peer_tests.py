"""Run the accumulation tests of Transformers and Lightning through our doors.

    python scripts/peer_tests.py transformers CLONE    # a clone of huggingface/transformers
    python scripts/peer_tests.py lightning CLONE       # a clone of Lightning-AI/pytorch-lightning

The clones bring the tests; the packages are those that are installed. Every test runs twice: as it
is, and with `exact(Trainer)` in place of `Trainer`, or with the callback `ExactAccumulation` in
every Lightning Trainer. The table shows both outcomes. Models, tokenizers and texts that the tests
would download are replaced by small ones made here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

DOOR = "WHOLEBATCH_PEER_DOOR"
TESTS = {
    "transformers": (
        ".",
        ["tests/trainer/test_trainer.py", "tests/trainer/test_trainer_checkpointing.py"],
        "accumul",
    ),
    "lightning": (
        "tests",
        [
            f"tests_pytorch/{name}.py"
            for name in (
                "callbacks/test_gradient_accumulation_scheduler",
                "callbacks/test_throughput_monitor",
                "core/test_lightning_optimizer",
                "loops/optimization/test_automatic_loop",
                "loops/test_loops",
                "loops/test_training_epoch_loop",
                "trainer/flags/test_val_check_interval",
                "trainer/optimization/test_backward_calls",
                "trainer/optimization/test_manual_optimization",
                "trainer/properties/test_estimated_stepping_batches",
                "trainer/test_trainer",
            )
        ],
        "accum or loop_state_on_exception or exceed_data_length",
    ),
}
"""Folder, files and `-k` expression of each package's tests of accumulation."""


# ------------------------------------------------- the plugin, inside of pytest


def pytest_configure() -> None:
    """Open the door that the environment names, before any test is imported."""
    host, _, ours = os.environ.get(DOOR, "").partition("/")
    if host == "transformers":
        work_offline()
    if host == "transformers" and ours:
        import transformers

        from wholebatch.integrations.transformers import exact

        trainer = exact(transformers.Trainer)
        for module in (transformers, transformers.trainer):
            setattr(module, "Trainer", trainer)  # noqa: B010 - mypy: it replaces a class
    if host == "lightning" and ours:
        add_callback()


def add_callback() -> None:
    """Add `ExactAccumulation` to every Lightning Trainer; the tests' losses are sample means."""
    import lightning.pytorch as pl

    from wholebatch.integrations.lightning import ExactAccumulation

    before = pl.Trainer.__init__

    def with_windows(self: Any, *args: Any, callbacks: Any = None, **kwargs: Any) -> None:
        given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
        before(self, *args, callbacks=[*given, ExactAccumulation(len)], **kwargs)

    setattr(pl.Trainer, "__init__", with_windows)  # noqa: B010


def work_offline() -> None:
    """Let `from_pretrained` and `load_dataset` return a tiny Llama, its tokenizer and texts."""
    import datasets
    import tokenizers
    import torch
    import transformers

    words = {word: place for place, word in enumerate(["<end>", *"abcdefghijklmnopqrstuvwxyz"])}

    def tokenizer(*_: Any, **__: Any) -> Any:
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")

    def model(*_: Any, **__: Any) -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=len(words),
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
            )
        )

    def texts(*_: Any, **__: Any) -> Any:
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 24, (200,), generator=draw).tolist()
        letters = [torch.randint(97, 123, (length,), generator=draw).tolist() for length in lengths]
        return datasets.Dataset.from_dict({"text": [" ".join(map(chr, one)) for one in letters]})

    for owner, name, made in (
        (transformers.AutoTokenizer, "from_pretrained", tokenizer),
        (transformers.AutoModelForCausalLM, "from_pretrained", model),
        (datasets, "load_dataset", texts),
    ):
        setattr(owner, name, made)


# ------------------------------------------------------------- both runs, beside


def outcomes(host: str, clone: Path, door: str) -> dict[str, str]:
    """Run the tests in a process of their own; return the outcome of each by its name."""
    folder, files, chosen = TESTS[host]
    here = Path(__file__).resolve().parent
    place = clone / folder
    environment = {
        **os.environ,
        DOOR: f"{host}/{door}" if door else f"{host}/",
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "src"), str(place)]),
    }
    command = [sys.executable, "-m", "pytest", "-p", "peer_tests", "-v", "-k", chosen, *files]
    command += ["-p", "no:cacheprovider", "--tb=short", "-W", "ignore", "-o", "addopts="]
    ran = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    found = dict(re.findall(r"^(\S+::\S.*?) (PASSED|FAILED|SKIPPED|ERROR)", ran.stdout, re.M))
    if not found:
        raise SystemExit(ran.stdout[-3000:] + ran.stderr[-2000:])
    for problem in re.findall(r"^E +(.*)", ran.stdout, re.M):
        print(f"   {door or 'alone'}: {problem[:160]}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("host", choices=sorted(TESTS))
    parser.add_argument("clone", type=Path)
    options = parser.parse_args()
    alone = outcomes(options.host, options.clone, "")
    ours = outcomes(options.host, options.clone, "ours")
    print(f"| test of {options.host} | alone | through our door |", "|---|---|---|", sep="\n")
    for name in sorted({*alone, *ours}):
        both = (alone.get(name, "not run"), ours.get(name, "not run"))
        print(f"| `{name.split('/')[-1]}` | {both[0].lower()} | {both[1].lower()} |")
    same = sum(alone.get(name) == ours.get(name) for name in alone)
    print(f"\n{same} of {len(alone)} have the same outcome.")


if __name__ == "__main__":
    main()
