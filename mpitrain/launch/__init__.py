"""Starting a job on this machine: which MPI is here, its mpiexec's dialect, its output, and its end."""
