"""A window in a loop that is somebody else's: the laws of the adapters over torch, once."""

from wholebatch.integrations.host_window.first_look import FirstLook
from wholebatch.integrations.host_window.host_gradients import (
    Gradients,
    Ranks,
    all_parameters,
    ranks_of,
)
from wholebatch.integrations.host_window.host_ledger import Given, Hosted, Options, Settled

__all__ = [
    "FirstLook",
    "Given",
    "Gradients",
    "Hosted",
    "Options",
    "Ranks",
    "Settled",
    "all_parameters",
    "ranks_of",
]
