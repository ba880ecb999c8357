"""The NumPy reference: the CPU engine, and the oracle of every kernel."""
