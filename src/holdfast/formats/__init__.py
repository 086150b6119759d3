"""Foreign checkpoints in, exports out."""
