"""The scheduler: selects the contexts of each step. It depends on neither HTTP nor torch."""

from __future__ import annotations

from typing import Any, TypeAlias

from penstock.scheduler.overlap import OverlappedScheduler
from penstock.scheduler.scheduler import Scheduler

AnyScheduler: TypeAlias = Scheduler[Any, Any]
"""A scheduler of contexts of any task."""

__all__ = ["AnyScheduler", "OverlappedScheduler", "Scheduler"]
