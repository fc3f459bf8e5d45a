"""`ThreadTokenizers`: one copy of a tokenizer per thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property

from tokenizers import Tokenizer


class ThreadTokenizers:
    """Provides a separate copy of a tokenizer for each thread.

    The thread that creates this object gets the original tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._original_tokenizer = tokenizer
        self._is_original_taken = False
        self._lock = threading.Lock()
        self._local = _ThreadLocal(self._take)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the calling thread."""
        return self._local.tokenizer

    def _take(self) -> Tokenizer:
        with self._lock:
            if self._is_original_taken:
                return Tokenizer.from_str(self._serialized_tokenizer)
            self._is_original_taken = True
            return self._original_tokenizer

    @cached_property
    def _serialized_tokenizer(self) -> str:
        return self._original_tokenizer.to_str()


class _ThreadLocal(threading.local):
    """Thread-local storage.

    Python runs the constructor in the thread that creates the object, and once in each other thread that
    reads ``tokenizer``.
    """

    def __init__(self, take: Callable[[], Tokenizer]) -> None:
        self.tokenizer = take()
