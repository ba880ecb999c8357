"""The GPU: kernels' specifications, compilation, memory, graphs and the engine."""
