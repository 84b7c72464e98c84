"""From gradients to their sample-weighted mean over ranks."""
