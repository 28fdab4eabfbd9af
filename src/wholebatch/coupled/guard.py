"""No model whose micro-batches do not add up to the whole batch is trained in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.core.splitting.samples import readable_layout
from wholebatch.coupled.adds_up import AddsUp, Look
from wholebatch.coupled.audit import audit
from wholebatch.coupled.local_collectives import local_collectives
from wholebatch.distributed import Sync
from wholebatch.errors import UnsupportedError

__all__ = ["Guard"]

_log = logging.getLogger("wholebatch")

_TRIES = 8


class Guard:
    """Audits a model by type when it is made, and by a look at the first batch that is split.

    The look (see `AddsUp`) is left out where forwards run collectives of their own. A batch whose
    first samples have no units tells nothing; in one process the next one is looked at then.
    """

    def __init__(self, model: nn.Module, *, looks: bool) -> None:
        for name, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise UnsupportedError(
                    f"{name!r} is lazy and has no weights yet: run one batch through the model "
                    "first"
                )
        self._model = model
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
        micros: Sequence[Any],
        layout: Mapping[str, Any],
        *,
        outputs: bool,
        name: str,
        sync: Sync,
    ) -> None:
        """Refuse what does not add up; once, all ranks together.

        `layout` has `batch_size` and `static` of the batch, `micros` is what it is split into. The
        other options are those of `AddsUp.look`.
        """
        ghosts = tuple(f for f in audit(self._model).findings if f.kind == "ghost")
        samples = _samples(batch, micros, layout)
        made = Look()
        try:
            with local_collectives():
                made = AddsUp(self._model).look(run, **samples, outputs=outputs, name=name)
        except torch.OutOfMemoryError:
            _log.warning("no memory to look whether micro-batches add up to the whole batch")
        except Exception as error:
            # Most often it is the loss function's, and the step will raise it.
            _log.warning("no look whether micro-batches add up to the whole batch: %r", error)
        self._tries = self._tries - 1 if sync.ranks == 1 and not made.told else 0
        made = Look((*ghosts, *made.findings))
        made.refuse(elsewhere=bool(sync.sum([float(len(made.findings))])[0]))

    def join(self, sync: Sync) -> None:
        """Take part in the other ranks' look, without a sample of one's own."""
        if self.pending:
            self._tries = 0
            Look().refuse(elsewhere=bool(sync.sum([0.0])[0]))


def _samples(batch: Any, micros: Sequence[Any], layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the samples for a first look, and how many a micro-batch has.

    Those of the batch, unless micro-batches differ in size: made by a budget of tokens, the first
    one holds samples that belong together.
    """
    made = [readable_layout(micro, None, layout["static"]) for micro in micros]
    sizes = [1 if one is None else one.size for one in made]
    whole = readable_layout(batch, layout["batch_size"], layout["static"])
    if whole is not None and sum(sizes) != whole.size:
        # Few samples may read otherwise than many: three images as three parts of a batch.
        return {"batch": batch, "micro_batch": -(-whole.size // len(micros)), **layout}
    if len(set(sizes[:-1])) > 1 and sizes[0] > 1:
        return {"batch": micros[0], "micro_batch": sizes[0], "static": layout["static"]}
    return {"batch": batch, "micro_batch": sizes[0], **layout}
