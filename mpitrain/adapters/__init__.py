"""Adapters connect the Trainer to a framework. Nothing is imported until it is needed."""
