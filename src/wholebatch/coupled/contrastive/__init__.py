"""Losses that compare the samples of a batch, made exact in two passes."""
