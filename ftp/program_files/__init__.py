"""Programs as plain data: written to files, read back without tracing or planning."""
