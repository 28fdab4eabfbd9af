"""The parts of benchmarks/does_it_matter.py."""
