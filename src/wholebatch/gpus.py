"""GPUs by name: the memory that torch reports, and the peak speed of matrix products."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wholebatch.errors import OptionError


@dataclass(frozen=True)
class Gpu:
    """A GPU: its memory, and its peak speed in 16 bit (dense) and in fp32."""

    name: str
    gib: float
    tflops_16: float
    tflops_32: float

    @property
    def memory(self) -> int:
        """The bytes that torch reports; some of those on the box are the driver's."""
        return int(self.gib * 2**30)


GPUS = (
    Gpu("T4", 14.7, 65, 8.1),
    Gpu("L4", 22.0, 121, 30),
    Gpu("RTX 3090", 23.6, 71, 35.6),
    Gpu("RTX 4090", 23.6, 165, 82.6),
    Gpu("A100 40", 39.4, 312, 19.5),
    Gpu("A100 80", 79.1, 312, 19.5),
    Gpu("H100", 79.1, 989, 67),
    Gpu("H200", 139.8, 989, 67),
)
"""By memory, the smallest first."""


def find_gpu(text: str) -> Gpu:
    """Return the GPU of this name, however it is written.

    >>> find_gpu("rtx4090").name, find_gpu("NVIDIA H200").name, find_gpu("A100-80GB").name
    ('RTX 4090', 'H200', 'A100 80')
    """

    def key(name: str) -> str:
        return re.sub(r"nvidia|geforce|tesla|rtx|gi?b|[^a-z0-9]", "", name.lower())

    matches = [gpu for gpu in GPUS if key(gpu.name) == key(text)]
    if not matches:
        raise OptionError(f"{text}: must be one of {', '.join(gpu.name for gpu in GPUS)}")
    return matches[0]
