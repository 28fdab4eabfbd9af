"""How far TRL's own update is from that of the undivided batch, and ours.

    python benchmarks/trl_updates.py

One update of a tiny Llama in float64, from 14 samples of uneven lengths: as one batch, and in four
batches of which the last is smaller. The undivided update is checked against TRL's own with one
batch, to 1e-5: TRL scores tokens in float32.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CI": "1"}
warnings.filterwarnings("ignore")

from transformers import LlamaForSequenceClassification  # noqa: E402

from tests.integrations import trl_training as runs  # noqa: E402
from wholebatch.integrations.transformers import exact  # noqa: E402

# The trainer, its options, and what its loss is a mean over.
ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "SFT, completions only": (
        "SFT",
        {"completion_only_loss": True, "learning_rate": 1.0},
        "tokens",
    ),
    "DPO": ("DPO", {}, "pairs"),
    "DPO, IPO": ("DPO", {"loss_type": "ipo"}, "pairs"),
    "reward model": ("Reward", {"center_rewards_coefficient": 0.1}, "pairs"),
    "KTO": ("KTO", {}, "samples, with a KL estimate"),
}


def update(name: str, make: Any, batches: int, options: dict[str, Any]) -> Any:
    """Return what one update adds to the weights."""
    kind: dict[str, Any] = {"SFT": runs.completions, **runs.TRAINERS}
    if name == "Reward":
        model = runs.llama(LlamaForSequenceClassification, num_labels=1)
    else:
        model = runs.llama()
    return runs.trained(kind[name](make, batches, model=runs.in_float64(model), **options))


def main() -> None:
    lines = [
        "| trainer | is a mean over | TRL's update is off by | `exact(…)` is off by |",
        "|---|---|---:|---:|",
    ]
    for title, (name, options, units) in ROWS.items():
        whole = update(name, exact, 1, options)
        theirs = runs.off(update(name, lambda kind: kind, 1, options), whole)
        assert theirs < 1e-5, f"{title}: {theirs} from TRL's own undivided batch"
        own = runs.off(update(name, lambda kind: kind, 4, options), whole)
        ours = runs.off(update(name, exact, 4, options), whole)
        rounding = 1e-12 if name == "SFT" else 1e-6  # TRL's own losses compute in float32
        assert ours <= rounding, f"{title}: {ours}"
        shown = f"{own:.0%}" if own > 0.01 else f"{own:.0e}"
        lines.append(f"| {title} | {units} | {shown} | {ours:.0e} |")
        print(lines[-1], flush=True)
    page = ROOT / "docs" / "integrations" / "transformers.md"
    text = page.read_text(encoding="utf-8")
    table = "\n".join(["<!-- trl: begin -->", *lines, "<!-- trl: end -->"])
    text = re.sub(r"<!-- trl: begin -->.*<!-- trl: end -->", lambda _: table, text, flags=re.S)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
