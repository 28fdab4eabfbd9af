"""Where a window's gradients go, and how they reach the update."""

from wholebatch.gradients.choose import GradientsOn, OptimizerOn, choose
from wholebatch.gradients.device import DeviceStore
from wholebatch.gradients.store import Store, refuse_stray

__all__ = ["DeviceStore", "GradientsOn", "OptimizerOn", "Store", "choose", "refuse_stray"]
