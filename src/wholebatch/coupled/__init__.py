"""Batches whose samples depend on each other."""

from wholebatch.coupled.batchnorm.policies import choose
from wholebatch.coupled.contrastive.losses import Coupled
from wholebatch.coupled.normalisation_layers import batchnorms

__all__ = ["Coupled", "batchnorms", "choose"]
