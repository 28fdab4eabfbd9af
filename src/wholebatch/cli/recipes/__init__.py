"""Recipes for `wholebatch train`: a Python file, or one of those embedded here."""
