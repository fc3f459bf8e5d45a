"""The scheduler: selects the contexts of each step. It knows no HTTP and no tensors."""

from __future__ import annotations

from penstock.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
