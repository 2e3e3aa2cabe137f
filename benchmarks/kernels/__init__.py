"""The kernels, ours beside the public ones: `python -m benchmarks.kernels`, see `__main__`."""
