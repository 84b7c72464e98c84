"""Computes the sample-weighted means of gradients over ranks."""
