"""Losses by name, each with the units that it is a mean over (docs/which-mean.md)."""
