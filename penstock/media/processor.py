"""Runs the image processors of Hugging Face checkpoints, in this process or in separate processes.

transformers implements the image processors (with its Pillow back end) and imports torch. Therefore the
server runs them in separate processes (`ProcessorPool`). This also protects the server from decoders that
crash.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import (
    CheckpointError,
    InputError,
    MissingDependencyError,
    OverloadedError,
    PenstockError,
    RequestFailedError,
)
from penstock.media.decoding import decode_image
from penstock.media.family import Arrays

if TYPE_CHECKING:
    from PIL.Image import Image

_logger = logging.getLogger(__name__)
HEAD_SIZE = struct.Struct("<Q")
"""The first bytes of a message: the size of its head in bytes."""
_ERROR_CLASSES: dict[str, type[PenstockError]] = {
    kind.__name__: kind for kind in (InputError, CheckpointError, MissingDependencyError, RequestFailedError)
}


class ProcessorRequest(msgspec.Struct, array_like=True):
    """A request to prepare an image. The content of the image file follows as raw bytes."""

    num_bytes: int
    max_pixels: int
    options: dict[str, object]


class ArrayHeader(msgspec.Struct, array_like=True):
    """Describes an array of a reply. The raw bytes of all arrays follow the reply."""

    name: str
    dtype: str
    shape: list[int]


class ProcessorReply(msgspec.Struct, array_like=True):
    """The outputs of an image processor for one image, or an error."""

    arrays: list[ArrayHeader] = []
    size: tuple[int, int] = (0, 0)
    error: str | None = None
    message: str = ""


class ImageProcessor(Protocol):
    """Decodes images and converts them to the inputs of a vision encoder."""

    def process(
        self, data: bytes, options: Mapping[str, object], max_pixels: int
    ) -> tuple[Arrays, tuple[int, int]]:
        """Return the outputs of the processor for a list of one image, and the width and height of the image.

        Args:
            data: the content of an image file.
            options: keyword arguments of the processor.
            max_pixels: maximum of width times height.

        Raises:
            InputError: the image cannot be decoded, or the processor rejects it.
            PenstockError: the processor failed.
        """
        ...

    def start(self) -> None:
        """Load the processor, or start to load it in the background."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...


class LocalProcessor:
    """Runs the image processor of a checkpoint in this process. `start` or the first image loads it.

    Args:
        checkpoint: the folder of the checkpoint.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._processor: _HuggingFaceProcessor | None = None

    def process(
        self, data: bytes, options: Mapping[str, object], max_pixels: int
    ) -> tuple[Arrays, tuple[int, int]]:
        image = decode_image(data, max_pixels)
        processor = self._load()
        try:
            outputs = processor([image], return_tensors="np", **options)
        except Exception as error:
            raise InputError(f"the model's image processor does not accept the image: {error}") from error
        arrays = {name: np.asarray(value) for name, value in outputs.items()}
        return arrays, image.size

    def start(self) -> None:
        self._load()

    def close(self) -> None:
        pass

    def _load(self) -> _HuggingFaceProcessor:
        with self._lock:
            if self._processor is None:
                self._processor = _load_processor(self._checkpoint)
            return self._processor


class _HuggingFaceProcessor(Protocol):
    """An image processor of transformers."""

    def __call__(
        self, images: Sequence[Image], *, return_tensors: str, **options: object
    ) -> Mapping[str, npt.ArrayLike]: ...


def _load_processor(checkpoint: Path) -> _HuggingFaceProcessor:
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError("transformers", "vision", "preparing images") from error
    try:
        processor: _HuggingFaceProcessor = transformers.AutoImageProcessor.from_pretrained(
            str(checkpoint), backend="pil", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise CheckpointError(checkpoint, f"has no image processor that can be loaded: {error}") from error
    return processor


class ProcessorPool:
    """Runs the image processor of a checkpoint in separate processes.

    If a process crashes or exceeds the time limit, only its current image fails. A new process replaces it.

    Args:
        checkpoint: the folder of the checkpoint.
        num_processes: the number of processes. They are started by `start` or by the first images.
        timeout: maximum number of seconds for an image, including the time to wait for a process.
        module: the Python module that the processes run, see `penstock.media.process`.
    """

    def __init__(
        self, checkpoint: Path, num_processes: int, timeout: float, module: str = "penstock.media.process"
    ) -> None:
        self._timeout = timeout
        self._idle_processes: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._processes = [_Process([module, str(checkpoint)]) for _ in range(num_processes)]
        for process in self._processes:
            self._idle_processes.put(process)

    def process(
        self, data: bytes, options: Mapping[str, object], max_pixels: int
    ) -> tuple[Arrays, tuple[int, int]]:
        deadline = time.monotonic() + self._timeout
        try:
            process = self._idle_processes.get(timeout=self._timeout)
        except queue.Empty:
            raise OverloadedError(
                f"all image processes were busy for {self._timeout:g} s (--image-timeout): try again"
            ) from None
        try:
            return process.run(data, options, max_pixels, max(deadline - time.monotonic(), 0.001))
        finally:
            self._idle_processes.put(process)

    def start(self) -> None:
        for process in self._processes:
            process.start()

    def close(self) -> None:
        for process in self._processes:
            process.stop()


class _Process:
    """A process that runs the image processor. Only one thread at a time may use it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process. Does nothing if it is running, or after `stop`."""
        if self._is_closed or (self._process is not None and self._process.poll() is None):
            return
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # so that Ctrl-C reaches only the server, which then ends this process
        )

    def stop(self) -> None:
        """End the process."""
        self._is_closed = True
        self._kill()

    def run(
        self, data: bytes, options: Mapping[str, object], max_pixels: int, timeout: float
    ) -> tuple[Arrays, tuple[int, int]]:
        """Process one image within ``timeout`` seconds; see `ImageProcessor.process`."""
        self.start()
        timed_out = threading.Event()

        def kill_on_timeout() -> None:
            timed_out.set()
            self._kill()

        timer = threading.Timer(timeout, kill_on_timeout)
        timer.start()
        try:
            reply = self._exchange(ProcessorRequest(len(data), max_pixels, dict(options)), data)
        except PenstockError:
            raise
        except (OSError, EOFError, ValueError, AssertionError) as error:
            self._kill()
            if timed_out.is_set():
                raise RequestFailedError(
                    "the image was not prepared within the time limit (--image-timeout)"
                ) from None
            _logger.error("a process that prepares images has ended: %s", error)
            raise RequestFailedError("the process that prepared the image has ended") from None
        finally:
            timer.cancel()
        return reply

    def _exchange(self, request: ProcessorRequest, data: bytes) -> tuple[Arrays, tuple[int, int]]:
        process = self._process
        assert process is not None, "the process is closed"
        assert isinstance(process.stdin, BufferedWriter)
        assert isinstance(process.stdout, BufferedReader)
        write_message(process.stdin, msgspec.msgpack.encode(request), [data])
        reply = msgspec.msgpack.decode(read_head(process.stdout), type=ProcessorReply)
        if reply.error is not None:
            error_class = _ERROR_CLASSES[reply.error]
            error = error_class.__new__(error_class, reply.message)
            Exception.__init__(error, reply.message)
            raise error
        arrays = {}
        for header in reply.arrays:
            array = np.empty(header.shape, np.dtype(header.dtype))
            read_into(process.stdout, array.reshape(-1).view(np.uint8).data)
            arrays[header.name] = array
        return arrays, reply.size

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        process.wait()


def write_message(stream: BufferedWriter, head: bytes, parts: Sequence[bytes | memoryview]) -> None:
    """Write a message: the size of ``head``, then ``head``, then the raw bytes ``parts``."""
    stream.write(HEAD_SIZE.pack(len(head)) + head)
    for part in parts:
        stream.write(part)
    stream.flush()


def read_head(stream: BufferedReader) -> bytes:
    """Read the head of a message.

    Raises:
        EOFError: the stream has ended.
    """
    size = bytearray(HEAD_SIZE.size)
    read_into(stream, memoryview(size))
    head = bytearray(HEAD_SIZE.unpack(size)[0])
    read_into(stream, memoryview(head))
    return bytes(head)


def read_into(stream: BufferedReader, target: memoryview) -> None:
    """Fill a buffer from a stream.

    Raises:
        EOFError: the stream ended before the buffer was full.
    """
    while len(target):
        count = stream.readinto(target)
        if not count:
            raise EOFError("the stream has ended")
        target = target[count:]


def read_processor_config(checkpoint: Path) -> dict[str, object]:
    """Return ``processor_config.json`` and ``preprocessor_config.json`` of a checkpoint, merged.

    Values of ``preprocessor_config.json`` have precedence. A file may be missing. The values of a section
    ``image_processor`` are also at the top level of the result, unless the file has its own value there.

    Raises:
        CheckpointError: a file cannot be read, or is not a JSON object.
    """
    merged: dict[str, object] = {}
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = checkpoint / name
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise CheckpointError(path, f"is not readable as JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(path, f"must contain a JSON object, contains a {type(values).__name__}")
        image_values = values.get("image_processor")
        merged |= {**(image_values if isinstance(image_values, dict) else {}), **values}
    return merged
