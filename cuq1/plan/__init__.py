"""What a config costs and, for the device engine, which launches compute it."""
