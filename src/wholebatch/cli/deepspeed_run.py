"""`--parallel deepspeed`: the recipe's model in a DeepSpeed engine, ZeRO 0 to 3.

DeepSpeed writes the state of model and optimizer itself, every rank its part; the rest of a
checkpoint is as elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wholebatch.cli.parallel_ranks import Crew
from wholebatch.cli.run_settings import Config
from wholebatch.core.safe_loading import load_tensors
from wholebatch.errors import MissingExtraError, StateError

__all__ = ["Zero"]


class Zero:
    """A DeepSpeed engine around a model, and how it is saved."""

    writes = True

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, crew: Crew
    ) -> None:
        if crew.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        try:
            import deepspeed  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise MissingExtraError("deepspeed", "deepspeed", "--parallel deepspeed") from error
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,  # counted by the window, not by the engine
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": config.zero},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "gradient_clipping": 0.0,
                "steps_per_print": 2**31,
            },
        )
        self.about = {"name": "deepspeed", "zero": config.zero, "ranks": crew.ranks}

    def write(self, folder: Path) -> None:
        """All ranks, into this folder."""
        self.engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)

    def gathered(self) -> dict[str, Any]:
        raise AssertionError("DeepSpeed writes its own files")

    def load(self, state: dict[str, Any]) -> None:
        """From the folder that all ranks have written."""
        path = Path(state["path"])
        with _loads_without_code(self.engine):
            loaded, _ = self.engine.load_checkpoint(str(path.parent), tag=path.name)
        if loaded is None:
            raise StateError(f"{path}: DeepSpeed finds no state of this rank in it")


@contextmanager
def _loads_without_code(engine: Any) -> Iterator[None]:
    """Let DeepSpeed read its files as we read ours: it would run whatever their pickles ask for."""
    from deepspeed.runtime.fp16.loss_scaler import (  # type: ignore[import-untyped, unused-ignore]
        DynamicLossScaler,
        LossScaler,
    )
    from deepspeed.runtime.zero.config import (  # type: ignore[import-untyped, unused-ignore]
        ZeroStageEnum,
    )
    from deepspeed.utils.tensor_fragment import (  # type: ignore[import-untyped, unused-ignore]
        fragment_address,
    )

    known = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
    reader = engine.checkpoint_engine
    reader.load = lambda path, map_location=None: load_tensors(Path(path), also=known)
    try:
        yield
    finally:
        del reader.load  # the class's own
