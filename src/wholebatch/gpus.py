"""GPUs by name: the memory that torch reports, and the peak speed of matrix products."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wholebatch.errors import OptionError


@dataclass(frozen=True)
class Gpu:
    """A GPU: its memory, and its peak speed in 16 bit (dense) and in fp32, without TF32."""

    name: str
    gib: float
    tflops_16: float
    tflops_32: float
    known_as: tuple[str, ...] = ()
    """Other names, as torch reports them."""

    @property
    def memory(self) -> int:
        """The bytes that torch reports; some of those on the box are the driver's."""
        return int(self.gib * 2**30)

    def tflops(self, *, sixteen_bit: bool) -> float:
        """Return the peak speed of a precision."""
        return self.tflops_16 if sixteen_bit else self.tflops_32


GPUS = (
    Gpu("T4", 14.7, 65, 8.1),
    Gpu("V100 16", 15.8, 125, 15.7, ("V100-SXM2-16GB",)),
    Gpu("L4", 22.0, 121, 30),
    Gpu("RTX 3090", 23.6, 71, 35.6),
    Gpu("RTX 4090", 23.6, 165, 82.6),
    Gpu("RTX 5090", 31.4, 210, 105),
    Gpu("V100 32", 31.7, 125, 15.7, ("V100-SXM2-32GB", "V100-SXM3-32GB")),
    Gpu("A100 40", 39.4, 312, 19.5, ("A100-SXM4-40GB", "A100-PCIE-40GB")),
    Gpu("L40S", 44.4, 362, 91.6),
    Gpu("H100 PCIe", 79.1, 756, 51),
    Gpu("A100 80", 79.1, 312, 19.5, ("A100-SXM4-80GB", "A100 80GB PCIe")),
    Gpu("H100", 79.1, 989, 67, ("H100 80GB HBM3",)),
    Gpu("H200", 139.8, 989, 67),
    Gpu("B200", 178.3, 2250, 75),
)
"""By memory, the smallest first."""


def find_gpu(text: str) -> Gpu:
    """Return the GPU of this name, however it is written.

    >>> find_gpu("rtx4090").name, find_gpu("NVIDIA H200").name, find_gpu("A100-80GB").name
    ('RTX 4090', 'H200', 'A100 80')
    >>> find_gpu("NVIDIA A100-SXM4-80GB").name, find_gpu("NVIDIA H100 80GB HBM3").name
    ('A100 80', 'H100')
    """

    def key(name: str) -> str:
        return re.sub(r"nvidia|geforce|tesla|rtx|gi?b|[^a-z0-9]", "", name.lower())

    for gpu in GPUS:
        if key(text) in map(key, (gpu.name, *gpu.known_as)):
            return gpu
    raise OptionError(f"{text}: must be one of {', '.join(gpu.name for gpu in GPUS)}")
