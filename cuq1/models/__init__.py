"""Models: from a config to a plan, a printable list of launches over named buffers."""
