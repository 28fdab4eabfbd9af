"""The output of a run: metrics files, TensorBoard events, the terminal."""
