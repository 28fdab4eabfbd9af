"""A window in a loop that is somebody else's: the ledger of the adapters over torch."""

from wholebatch.integrations.host_window.host_gradients import GradientsIn
from wholebatch.integrations.host_window.host_windows import (
    AdapterOptions,
    FirstLook,
    HostLoss,
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
    "HostLoss",
    "HostWindows",
    "LoopWindows",
    "Settled",
    "attributes_restored",
    "refuse_shared_batches",
    "replaced_attributes",
]
