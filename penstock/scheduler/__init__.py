"""Who runs in which step: contexts in, batches out. No HTTP, no tensors."""

from __future__ import annotations

from penstock.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
