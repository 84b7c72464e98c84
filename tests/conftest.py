"""Being here, it puts this folder on sys.path: every test may `from jobs import run_command`."""
