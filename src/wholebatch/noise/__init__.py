"""The gradient noise scale, measured on micro-batches that are computed anyway."""

from wholebatch.noise.estimate import Estimator, NoiseScale, Observation
from wholebatch.noise.probe import Noise, Probe, check_noise

__all__ = ["Estimator", "Noise", "NoiseScale", "Observation", "Probe", "check_noise"]
