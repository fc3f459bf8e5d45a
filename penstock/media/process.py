"""The main function of an image process, which `penstock.media.processor` starts.

The process reads requests from standard input and writes replies to standard output, until standard input
ends or standard output is closed.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path

import msgspec
import numpy as np

from penstock.errors import CheckpointError, InputError, MissingDependencyError
from penstock.media.processor import (
    ArrayHeader,
    ImageProcessor,
    LocalProcessor,
    ProcessorReply,
    ProcessorRequest,
    read_head,
    read_into,
    write_message,
)

_NICENESS = 10
"""The process has a low priority, so that it does not delay the threads that compute steps."""


def main() -> None:
    """Serve requests with the image processor of the checkpoint in the first command line argument."""
    serve(LocalProcessor(Path(sys.argv[1])))


def serve(processor: ImageProcessor) -> None:
    """Serve requests with an image processor until standard input ends or standard output is closed."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # separates the output of libraries from the replies
    os.nice(_NICENESS)
    with suppress(Exception):  # the first image reports the same error
        processor.start()
    with suppress(EOFError, BrokenPipeError):
        while True:
            _answer(processor, requests, replies)


def _answer(processor: ImageProcessor, requests: BufferedReader, replies: BufferedWriter) -> None:
    request = msgspec.msgpack.decode(read_head(requests), type=ProcessorRequest)
    data = bytearray(request.num_bytes)
    read_into(requests, memoryview(data))
    arrays: list[np.ndarray] = []
    try:
        outputs, size = processor.process(bytes(data), request.options, request.max_pixels)
    except (InputError, CheckpointError, MissingDependencyError) as error:
        name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "penstock.errors")
        error_names = {"InputError", "CheckpointError", "MissingDependencyError"}
        reply = ProcessorReply(error=name if name in error_names else "InputError", message=str(error))
    except MemoryError:
        reply = ProcessorReply(
            error="RequestFailedError", message="there is not enough memory to prepare the image"
        )
    else:
        arrays = [np.ascontiguousarray(array) for array in outputs.values()]
        headers = [
            ArrayHeader(name, str(array.dtype), list(array.shape))
            for name, array in zip(outputs, arrays, strict=True)
        ]
        reply = ProcessorReply(headers, size)
    raw_arrays = [array.reshape(-1).view(np.uint8).data for array in arrays]
    write_message(replies, msgspec.msgpack.encode(reply), raw_arrays)


if __name__ == "__main__":
    main()
