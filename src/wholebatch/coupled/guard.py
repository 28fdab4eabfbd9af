"""No model whose samples depend on each other is trained in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wholebatch.coupled.audit import audit, audit_layers
from wholebatch.errors import UnsupportedError
from wholebatch.splitting.layout import BatchSize, Static

__all__ = ["Guard"]

_log = logging.getLogger("wholebatch")


class Guard:
    """Audits a model by type when it is made, and by the probe when a first batch is there.

    The probe runs the loss function on at most 8 samples, and at most three times as many as a
    micro-batch has, without a backward: three times to see
    which modules couple them and, in one process, four times to see whether the loss itself does.
    It is left out where every module is one of PyTorch's own, whose types say all; where the model
    is compiled, since hooks would compile it again; and where forwards run collectives of their
    own.
    """

    def __init__(self, model: nn.Module, *, probes: bool) -> None:
        for name, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise UnsupportedError(
                    f"{name!r} is lazy and has no weights yet: run one batch through the model "
                    "first"
                )
        self._model = model
        self.report = audit(model)
        modules = list(model.modules())
        compiled = any(type(module).__name__ == "OptimizedModule" for module in modules)
        self.pending = probes and not compiled and not all(map(_is_torchs_own, modules))
        for finding in self.report.findings:
            if finding.kind == "spectral":
                _log.warning("%s", finding)

    def look(
        self,
        batch: Any,
        forward: Callable[[Any, Any], Any],
        *,
        batch_size: BatchSize,
        static: Static,
        parts: int,
        summed: Callable[[float], float],
        alone: bool,
    ) -> None:
        """Refuse a model that couples samples by more than BatchNorm; once, all ranks together."""
        self.pending = False
        found: list[str] = []
        try:
            look = audit if alone else audit_layers
            made = look(
                self._model,
                batch,
                forward=forward,
                batch_size=batch_size,
                static=static,
                parts=parts,
            )
            found = [str(finding) for finding in made.beyond_batchnorm]
        except torch.OutOfMemoryError:
            _log.warning("no memory to probe the model for layers that couple samples")
        except Exception as error:
            # Most often it is the loss function's, and the step will raise it.
            _log.warning("the model could not be probed for layers that couple samples: %r", error)
        finally:
            torch.clear_autocast_cache()
            if torch.cuda.is_initialized():  # what comes now stays: not in the gaps of what was
                torch.cuda.empty_cache()
        _refuse(found, summed)

    def join(self, summed: Callable[[float], float]) -> None:
        """Take part in the other ranks' look, without a sample of one's own."""
        if self.pending:
            self.pending = False
            _refuse([], summed)


def _refuse(found: list[str], summed: Callable[[float], float]) -> None:
    if summed(float(len(found))):
        listed = "\n  ".join(found or ["(found on another rank)"])
        raise UnsupportedError(
            "the samples of a batch depend on each other here, so no micro-batch can give the "
            f"update of the whole batch:\n  {listed}\nWholeBatch(audit=False) trains it all the "
            "same: what was named is then computed of each micro-batch by itself"
        )


def _is_torchs_own(module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] == "torch"
