"""Batches whose samples depend on each other."""

from wholebatch.coupled.audit import Audit, Finding, audit, batchnorms, tracked_instance_norms
from wholebatch.coupled.batchnorm import Choice, Policy, choose, convert, groups_for

__all__ = [
    "Audit",
    "Choice",
    "Finding",
    "Policy",
    "audit",
    "batchnorms",
    "choose",
    "convert",
    "groups_for",
    "tracked_instance_norms",
]
