"""`EncoderCache`: the embedding rows of encoded images, keyed by content, within a byte budget."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor


class EncoderCache:
    """An LRU cache of the embedding rows of encoded images.

    Args:
        max_bytes: the maximum size of all cached rows in bytes; 0 disables the cache.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_encoded = 0
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()

    def get(self, image_hash: bytes | None) -> Tensor | None:
        """Return the cached embedding rows of an image and count a hit; None if they are not cached."""
        rows = None if image_hash is None else self._rows.get(image_hash)
        if rows is not None and image_hash is not None:
            self._rows.move_to_end(image_hash)
            self.num_hits += 1
        return rows

    def put(self, image_hash: bytes | None, rows: Tensor) -> None:
        """Count an encoded image and cache its rows. Evicts least recently used images over ``max_bytes``.

        The rows are not cached if ``image_hash`` is None or already cached, or if they alone exceed
        ``max_bytes``.
        """
        self.num_encoded += 1
        if image_hash is None or image_hash in self._rows or rows.nbytes > self.max_bytes:
            return
        if rows.untyped_storage().nbytes() > rows.nbytes:  # a view would keep the rows of its whole batch
            rows = rows.clone()
        self._rows[image_hash] = rows
        self.num_bytes += rows.nbytes
        while self.num_bytes > self.max_bytes:
            _, evicted_rows = self._rows.popitem(last=False)
            self.num_bytes -= evicted_rows.nbytes
