"""A window in a loop that is somebody else's: what the adapters over torch share."""

from wholebatch.integrations.host_window.host_gradients import GradientsIn
from wholebatch.integrations.host_window.host_windows import (
    AdapterOptions,
    FirstLook,
    HostWindows,
    LoopWindows,
    Settled,
    attributes_restored,
    refuse_shared_batches,
    replaced_attributes,
)

__all__ = [
    "AdapterOptions",
    "FirstLook",
    "GradientsIn",
    "HostWindows",
    "LoopWindows",
    "Settled",
    "attributes_restored",
    "refuse_shared_batches",
    "replaced_attributes",
]
