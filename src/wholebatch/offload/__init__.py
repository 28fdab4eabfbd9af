"""Gradients and moments that leave the device, or are freed early, while a window is open."""

from wholebatch.offload.choose_store import GradientsOn, OptimizerOn, choose

__all__ = ["GradientsOn", "OptimizerOn", "choose"]
