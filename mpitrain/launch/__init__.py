"""Starting a job, on this machine or over several hosts: which mpiexec, its dialect, its output, and its end."""
