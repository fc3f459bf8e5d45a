"""The host process: memory, container limits, signals, garbage collection, progress bars. No torch."""
