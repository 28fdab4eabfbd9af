"""The models, the peers and the tables of `benchmarks/gpu_speed.py`."""
