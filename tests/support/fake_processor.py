"""A fake image processor that runs in a processor process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.media.decoding import decode_image
from penstock.media.process import serve


class FakeProcessor:
    """A processor that returns the decoded pixels.

    The option ``crash`` ends its process. The option ``seconds`` delays the result.
    """

    def process(
        self, data: bytes, options: Mapping[str, Any], max_pixels: int
    ) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
        if options.get("crash"):
            os._exit(3)
        time.sleep(options.get("seconds", 0))
        image = decode_image(data, max_pixels)
        print("a library prints")
        pixels = np.asarray(image)
        return {"pixel_values": pixels, "grid": np.array([pixels.shape[0], 1])}, image.size

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(FakeProcessor())
