"""A window in a loop that is somebody else's: the laws of the adapters over torch, once."""

from wholebatch.hosted.books import Settled
from wholebatch.hosted.first_look import FirstLook
from wholebatch.hosted.given import Given
from wholebatch.hosted.gradients import Gradients, all_parameters
from wholebatch.hosted.ledger import Hosted
from wholebatch.hosted.options import Options
from wholebatch.hosted.ranks import Ranks, ranks_of

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
