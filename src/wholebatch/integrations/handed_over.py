"""What the adapters over torch share."""

from __future__ import annotations

from typing import Any

from wholebatch.errors import UnsupportedError


def refuse_shared_batches(accelerator: Any, host: str) -> None:
    """Refuse an Accelerator whose ranks share batches, so that units would be counted twice."""
    parallel = getattr(accelerator, "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        if parallel is not None and getattr(parallel, f"{name}_size", 1) > 1:
            raise UnsupportedError(
                f"{host} with {name}_size={getattr(parallel, f'{name}_size')}: units would be "
                "counted more than once over ranks that share a batch; use data parallelism alone"
            )
