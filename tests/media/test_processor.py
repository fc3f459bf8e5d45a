"""Processes that run image processors: equality with the local processor, crashes, time limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.vision_checkpoint import PROCESSOR, encode_image_file, random_picture

from penstock.errors import InputError, OverloadedError, RequestFailedError
from penstock.media.processor import LocalProcessor, ProcessorPool

MAX_PIXELS = 10_000


@pytest.fixture
def pool() -> Iterator[ProcessorPool]:
    pool = ProcessorPool(Path("any"), 1, 20, "support.fake_processor")
    yield pool
    pool.close()


def test_images_and_errors_are_returned_from_the_process(pool: ProcessorPool) -> None:
    images = [random_picture(seed, (30 + seed, 40)) for seed in range(6)]
    with ThreadPoolExecutor(3) as threads:
        result = list(
            threads.map(lambda image: pool.process(encode_image_file(image), {}, MAX_PIXELS), images)
        )
    for image, (arrays, size) in zip(images, result, strict=True):
        assert size == image.size
        assert np.array_equal(arrays["pixel_values"], np.asarray(image))
        assert arrays["grid"].tolist() == [40, 1]
    process = pool._processes[0]._process
    with pytest.raises(InputError, match="is not an image"):
        pool.process(b"?", {}, MAX_PIXELS)
    with pytest.raises(InputError, match=r"40 x 30 = 1200 pixels, but the limit is 10 "):
        pool.process(encode_image_file(random_picture()), {}, 10)
    assert pool._processes[0]._process is process


def test_a_crash_or_a_timeout_fails_only_its_image_and_a_busy_pool_refuses_images(
    pool: ProcessorPool,
) -> None:
    data = encode_image_file(random_picture())
    with pytest.raises(RequestFailedError, match="the process that prepared the image has ended"):
        pool.process(data, {"crash": True}, MAX_PIXELS)
    assert pool.process(data, {}, MAX_PIXELS)[1] == (40, 30)
    pool._timeout = 0.1
    with pytest.raises(RequestFailedError, match=r"not prepared within the time limit \(--image-timeout\)"):
        pool.process(data, {"seconds": 10}, MAX_PIXELS)
    pool._timeout = 60
    assert pool.process(data, {}, MAX_PIXELS)[1] == (40, 30)
    pool._timeout = 0.1
    pool._idle_processes.get()
    with pytest.raises(OverloadedError, match=r"all image processes were busy for 0.1 s"):
        pool.process(data, {}, MAX_PIXELS)


@pytest.mark.slow
def test_a_pool_returns_the_arrays_of_the_local_processor(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    data = encode_image_file(random_picture())
    expected, _ = LocalProcessor(tmp_path).process(data, {}, MAX_PIXELS)
    pool = ProcessorPool(tmp_path, 1, 60)
    processed_image, _ = pool.process(data, {}, MAX_PIXELS)
    pool.close()
    assert np.array_equal(processed_image["pixel_values"], expected["pixel_values"])
