"""The proof: compare accumulation with the undivided batch, and name the cause of a difference."""

from wholebatch.verification.example_models import ZOO, Case
from wholebatch.verification.findings import MISTAKES, Finding
from wholebatch.verification.verdicts import LoopTrial, LoopVerdict, Verdict
from wholebatch.verification.verify_loop import verify_loop
from wholebatch.verification.verify_model import verify
from wholebatch.verification.watch_loop import Watch, watch

__all__ = [
    "MISTAKES",
    "ZOO",
    "Case",
    "Finding",
    "LoopTrial",
    "LoopVerdict",
    "Verdict",
    "Watch",
    "verify",
    "verify_loop",
    "watch",
]
