"""What the ranks of a check's jobs run: sent as text to the job's Python, so it imports nothing of ours."""
