"""Batches whose samples depend on each other."""

from wholebatch.coupled.audit import Audit, audit
from wholebatch.coupled.batchnorm.policies import Choice, Policy, choose, convert, groups_for
from wholebatch.coupled.causes import AuditFinding
from wholebatch.coupled.contrastive.losses import (
    Coupled,
    clip_loss,
    info_nce,
    siglip_loss,
    supcon_loss,
)
from wholebatch.coupled.moe import moe_loss
from wholebatch.coupled.normalisation_layers import batchnorms, tracked_instance_norms

__all__ = [
    "Audit",
    "AuditFinding",
    "Choice",
    "Coupled",
    "Policy",
    "audit",
    "batchnorms",
    "choose",
    "clip_loss",
    "convert",
    "groups_for",
    "info_nce",
    "moe_loss",
    "siglip_loss",
    "supcon_loss",
    "tracked_instance_norms",
]
