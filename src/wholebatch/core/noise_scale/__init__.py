"""The gradient noise scale, measured on micro-batches that are computed anyway."""

from wholebatch.core.noise_scale.critical_batch import Estimator, NoiseScale, Observation
from wholebatch.core.noise_scale.sampled_windows import Noise, Probe, check_noise

__all__ = ["Estimator", "Noise", "NoiseScale", "Observation", "Probe", "check_noise"]
