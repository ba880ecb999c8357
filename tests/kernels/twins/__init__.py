"""What kernels must compute, in NumPy: independent of how the kernels are built."""
