"""No model whose micro-batches do not add up to the whole batch is trained in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.coupled.adds_up import AddsUp, Look
from wholebatch.coupled.audit import audit
from wholebatch.errors import UnsupportedError
from wholebatch.splitting.layout import readable_layout

__all__ = ["Guard", "samples_to_look_at"]

_log = logging.getLogger("wholebatch")

_TRIES = 8


class Guard:
    """Audits a model by type when it is made, and by a look at the first batch that is split.

    The look (see `AddsUp`) is left out where forwards run collectives of their own. A batch whose
    first samples have no units tells nothing; in one process the next one is looked at then. `off`
    is how a user of this door trains what was refused.
    """

    def __init__(
        self, model: nn.Module, *, looks: bool, off: str = "WholeBatch(audit=False)"
    ) -> None:
        for name, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise UnsupportedError(
                    f"{name!r} is lazy and has no weights yet: run one batch through the model "
                    "first"
                )
        self._model = model
        self._off = off
        self.report = audit(model)
        self._tries = _TRIES if looks else 0
        for finding in self.report.findings:
            if finding.kind == "spectral":
                _log.warning("%s", finding)

    @property
    def pending(self) -> bool:
        """True if the first look is still to come."""
        return self._tries > 0

    def look(
        self,
        run: Callable[[Any], Any],
        batch: Any,
        *,
        summed: Callable[[float], float],
        alone: bool = True,
        **options: Any,
    ) -> None:
        """Refuse what does not add up; once, all ranks together.

        `summed(number)` adds up a number over the ranks, `alone` says that there is one. The other
        options are those of `AddsUp.look`.
        """
        ghosts = tuple(f for f in audit(self._model).findings if f.kind == "ghost")
        made = Look()
        try:
            made = AddsUp(self._model).look(run, batch, **options)
        except torch.OutOfMemoryError:
            _log.warning("no memory to look whether micro-batches add up to the whole batch")
        except Exception as error:
            # Most often it is the loss function's, and the step will raise it.
            _log.warning("no look whether micro-batches add up to the whole batch: %r", error)
        self._tries = self._tries - 1 if alone and not made.told else 0
        made = Look((*ghosts, *made.findings))
        made.refuse(self._off, elsewhere=bool(summed(float(len(made.findings)))))

    def join(self, summed: Callable[[float], float]) -> None:
        """Take part in the other ranks' look, without a sample of one's own."""
        if self.pending:
            self._tries = 0
            Look().refuse(self._off, elsewhere=bool(summed(0.0)))


def samples_to_look_at(
    batch: Any, micros: Sequence[Any], layout: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the samples for a first look, and how many a micro-batch has.

    Those of the batch, unless micro-batches differ in size: made by a budget of tokens, the first
    one holds samples that belong together.
    """
    made = [readable_layout(micro, None, layout["static"]) for micro in micros]
    sizes = [1 if one is None else one.size for one in made]
    if len(set(sizes[:-1])) > 1 and sizes[0] > 1:
        return {"batch": micros[0], "micro_batch": sizes[0], "static": layout["static"]}
    return {"batch": batch, "micro_batch": sizes[0], **layout}
