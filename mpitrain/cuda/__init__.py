"""Everything that is specific to CUDA devices. The user imports CuPy; this module does not."""
