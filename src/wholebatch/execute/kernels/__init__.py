"""Kernels in Triton, which comes with torch's CUDA builds: imported where a CUDA device asks."""
