"""A window in a loop that is somebody else's: the laws of the adapters over torch, once."""

from wholebatch.integrations.host_window.adapter_options import Options
from wholebatch.integrations.host_window.books import Settled
from wholebatch.integrations.host_window.first_look import FirstLook
from wholebatch.integrations.host_window.host_gradients import Gradients, all_parameters
from wholebatch.integrations.host_window.host_ledger import Hosted
from wholebatch.integrations.host_window.host_ranks import Ranks, ranks_of
from wholebatch.integrations.host_window.total_or_mean import Given

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
