"""What happens around the steps: stop, log, evaluate, save. One file, one hook."""
