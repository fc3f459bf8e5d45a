"""The host process: memory, container limits, signals, garbage collection, terminal output. Loads no torch."""
