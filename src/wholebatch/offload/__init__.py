"""Where a window's gradients go, and how they reach the update."""

from wholebatch.core.device_store import DeviceStore
from wholebatch.core.gradient_store import Store, refuse_stray
from wholebatch.offload.choose_store import GradientsOn, OptimizerOn, choose

__all__ = ["DeviceStore", "GradientsOn", "OptimizerOn", "Store", "choose", "refuse_stray"]
