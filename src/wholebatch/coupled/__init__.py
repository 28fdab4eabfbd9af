"""Batches whose samples depend on each other."""

from wholebatch.coupled.batchnorm.policies import choose
from wholebatch.coupled.normalisation_layers import batchnorms
from wholebatch.losses.coupled import Coupled

__all__ = ["Coupled", "batchnorms", "choose"]
