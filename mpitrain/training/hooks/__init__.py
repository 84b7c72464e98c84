"""Hooks: actions around the steps, such as stopping, logging, evaluating and saving. One file, one hook."""
