"""Programs for the ranks of a check's jobs. They go to the job's Python as text, so they import nothing of ours."""
