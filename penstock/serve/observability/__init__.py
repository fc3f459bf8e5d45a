"""Metrics, tracing, logs and the worker watchdog."""
