"""Memory: what was used, what will be."""

from wholebatch.memory.batches import resize_batch
from wholebatch.memory.meter import CudaPeak, MemoryMeter, cuda_peak, reset_cuda_peak
from wholebatch.memory.predict import Prediction, predict_peak

__all__ = [
    "CudaPeak",
    "MemoryMeter",
    "Prediction",
    "cuda_peak",
    "predict_peak",
    "reset_cuda_peak",
    "resize_batch",
]
