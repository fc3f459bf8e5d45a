"""Reads the images of requests, and prepares requests with images in a separate thread pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar

from penstock.errors import InputError, OverloadedError
from penstock.media.sources import ImageSources
from penstock.text.chat_template import Message

if TYPE_CHECKING:
    from penstock.config import VisionConfig
    from penstock.serve.config import ServeConfig
    from penstock.serve.observability.metrics import Metrics

T = TypeVar("T")

_NUM_THREADS = 8
_MAX_ACTIVE_REQUESTS = 32
"""Maximum number of requests with images that are prepared concurrently. Bounds the memory for images."""


class ImageFields(TypedDict, total=False):
    """The fields of a `TokenGeneratorRequest` for the images of its messages. Empty without images."""

    images: list[bytes]
    image_details: list[str]


class ImageRequests:
    """Reads the images of requests, and prepares requests with images in a separate thread pool.

    A thread that prepares such a request waits for the processes that decode images, and for servers from
    which it downloads images. In a shared thread pool, these waits would delay requests without images.

    Args:
        config: the configuration of the server.
        vision: the limits on images.
        metrics: records the preparation time of each request.
    """

    def __init__(self, config: ServeConfig, vision: VisionConfig, metrics: Metrics) -> None:
        self._max_images = vision.max_images
        self._metrics = metrics
        self._sources = ImageSources(
            max_bytes=vision.max_bytes,
            timeout=vision.timeout,
            allow_urls=config.allow_image_urls,
            folder=None if config.image_dir is None else Path(config.image_dir),
        )
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="penstock-images")
        self._num_active = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function that prepares a request with images in the thread pool, and return its result.

        Raises:
            OverloadedError: too many requests with images are being prepared.
        """
        if self._num_active >= _MAX_ACTIVE_REQUESTS:
            raise OverloadedError(
                f"{self._num_active} other requests with images are being prepared: try again later",
                retry_after=5,
            )
        self._num_active += 1
        begin = time.perf_counter()
        future = asyncio.get_running_loop().run_in_executor(self._pool, function)
        future.add_done_callback(lambda ended_future: self._end(ended_future, begin))
        # Cancellation does not stop the function. The request counts as active until the function ends.
        return await asyncio.shield(future)

    def _end(self, ended_future: asyncio.Future[T], begin: float) -> None:
        self._num_active -= 1
        if not ended_future.cancelled():
            ended_future.exception()  # marks the exception as retrieved, so that asyncio does not log it
        self._metrics.images_prepared(time.perf_counter() - begin)

    def fields(self, messages: Sequence[Message]) -> ImageFields:
        """Return the encoded image files of messages and their ``detail`` values.

        Blocks while it reads files and URLs.

        Raises:
            InputError: there are too many images, or an image cannot be read.
        """
        image_parts = [
            (f"messages[{i}].content[{j}]", part["image_url"])
            for i, message in enumerate(messages)
            if isinstance(content := message.get("content"), list)
            for j, part in enumerate(content)
            if part["type"] == "image_url"
        ]
        if len(image_parts) > self._max_images:
            raise InputError(
                f"the request has {len(image_parts)} images, but the limit is {self._max_images} "
                "(--max-images-per-request)"
            )
        images = []
        for field_name, image in image_parts:
            try:
                images.append(self._sources.read(image["url"]))
            except InputError as error:
                raise InputError(f"{field_name}: {error}") from error
        details = [image.get("detail") or "auto" for _, image in image_parts]
        return {"images": images, "image_details": details} if images else {}

    def close(self) -> None:
        """Shut down the thread pool without waiting for its threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
