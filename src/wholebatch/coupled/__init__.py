"""Batches whose samples depend on each other."""

from wholebatch.coupled.audit import Audit, Finding, audit
from wholebatch.coupled.batchnorm import Choice, Policy, choose, convert, groups_for
from wholebatch.coupled.contrastive import (
    Coupled,
    clip_loss,
    info_nce,
    siglip_loss,
    supcon_loss,
)
from wholebatch.coupled.norms import batchnorms, tracked_instance_norms

__all__ = [
    "Audit",
    "Choice",
    "Coupled",
    "Finding",
    "Policy",
    "audit",
    "batchnorms",
    "choose",
    "clip_loss",
    "convert",
    "groups_for",
    "info_nce",
    "siglip_loss",
    "supcon_loss",
    "tracked_instance_norms",
]
