"""Who feeds a window its micro-batches, and in what order."""
