"""Batches whose samples depend on each other."""

from wholebatch.coupled.batchnorm.policies import choose
from wholebatch.coupled.normalisation_layers import batchnorms

__all__ = ["batchnorms", "choose"]
