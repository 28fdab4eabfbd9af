"""Leave the device as it was found: a memory limit belongs to the process and outlives a test."""

from __future__ import annotations
