"""The proof: the undivided batch beside its accumulation, and why they differ where they do."""

from wholebatch.proof.loop import verify_loop
from wholebatch.proof.loop_verdict import LoopVerdict, Trial
from wholebatch.proof.mistakes import MISTAKES
from wholebatch.proof.prove import verify
from wholebatch.proof.verdict import Cause, Verdict
from wholebatch.proof.zoo import ZOO, Case

__all__ = [
    "MISTAKES",
    "ZOO",
    "Case",
    "Cause",
    "LoopVerdict",
    "Trial",
    "Verdict",
    "verify",
    "verify_loop",
]
