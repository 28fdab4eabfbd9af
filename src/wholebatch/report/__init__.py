"""What a run leaves behind and shows: metrics files, TensorBoard events, the terminal."""
