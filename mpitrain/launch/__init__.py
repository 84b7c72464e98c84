"""The launcher: starts a job on this machine or on several hosts, relays its output, and waits for its end."""
