"""Compiles the Triton kernels for GPUs that need not be here, and reads what became of them."""
