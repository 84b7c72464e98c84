"""What is particular to CUDA devices. CuPy is imported by the user, never here."""
