"""Hooks: what happens around the steps, such as stop, log, evaluate, save. One file, one hook."""
