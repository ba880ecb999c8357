"""Kernels' launch specifications, one module a family. Nothing here needs a GPU library."""
