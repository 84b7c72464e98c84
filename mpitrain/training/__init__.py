"""The training loop and what it needs: optimizers, learning-rate schedules, data, checkpoints, metrics."""
