"""Activations of waiting micro-batches, kept on the host while lock-step runs another."""
