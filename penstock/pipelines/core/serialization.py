"""msgpack with numpy arrays, the format of contexts and responses between processes.

    >>> import numpy as np
    >>> encode, decode = msgpack_numpy_encoder(), msgpack_numpy_decoder(np.ndarray)
    >>> decode(encode(np.arange(3))).tolist()
    [0, 1, 2]

An array is encoded as a map ``{"__np__": True, "data": bytes in C order, "shape": [...], "dtype": name}``.
The map is decoded to an array if the target type is ``ndarray``. Other types that msgspec does not support,
such as numpy scalars, raise ``TypeError``. `frames_encoder` encodes large arrays as separate frames. The map
of such an array has ``frame``, the index of its frame, instead of ``data``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, get_origin

import msgspec
import numpy as np
import numpy.typing as npt


def msgpack_numpy_encoder() -> Callable[[object], bytes]:
    """Return a function that encodes objects to bytes. The function is not thread-safe."""
    return msgspec.msgpack.Encoder(enc_hook=_encode_array).encode


def msgpack_numpy_decoder(type_: object, copy: bool = True) -> Callable[[bytes], Any]:
    """Return a function that decodes bytes into ``type_``.

    With ``copy`` the arrays own their memory and are writable. Otherwise they are read-only views of the
    bytes. Exceptions are the tokens and speech tokens of a context, which are always writable copies.
    """
    return msgspec.msgpack.Decoder(type_, dec_hook=partial(_decode_array, copy=copy)).decode


Frame: TypeAlias = bytes | memoryview
MIN_FRAME_BYTES = 64 * 1024
"""Arrays of at least this size become separate frames, see `frames_encoder`."""


def frames_encoder() -> Callable[[object], list[Frame]]:
    """Return a function that encodes objects to frames: the msgpack body, then the bytes of large arrays.

    An array of at least `MIN_FRAME_BYTES` becomes one frame, even if the same object occurs several times.
    The function is not thread-safe.
    """
    frames: list[Frame] = []
    indices: dict[int, int] = {}

    def encode_array(value: object) -> dict[str, object]:
        if not isinstance(value, np.ndarray) or value.nbytes < MIN_FRAME_BYTES:
            return _encode_array(value)
        index = indices.get(id(value))
        if index is None:
            index = indices[id(value)] = len(frames)
            frames.append(_raw_bytes(value))
        return {"__np__": True, "frame": index, "shape": value.shape, "dtype": str(value.dtype)}

    encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)

    def encode(value: object) -> list[Frame]:
        frames.clear()
        indices.clear()
        body = encoder.encode(value)
        return [body, *frames]

    return encode


def frames_decoder(type_: object) -> Callable[[Sequence[bytes]], Any]:
    """Return a function that decodes the frames of `frames_encoder` into ``type_``. Arrays are writable.

    The function is not thread-safe.
    """
    arrays: dict[int, npt.NDArray[np.generic]] = {}
    frames: list[bytes] = []

    def decode_array(type_: type, value: object) -> npt.NDArray[np.generic]:
        if not isinstance(value, dict) or "frame" not in value:
            return _decode_array(type_, value, copy=True)
        index = value["frame"]
        if index not in arrays:
            flat = np.frombuffer(frames[index], dtype=np.dtype(value["dtype"]))
            arrays[index] = flat.reshape(value["shape"]).copy()
        return arrays[index]

    decoder = msgspec.msgpack.Decoder(type_, dec_hook=decode_array)

    def decode(encoded_frames: Sequence[bytes]) -> Any:
        body, *frames[:] = encoded_frames
        try:
            return decoder.decode(body)
        finally:
            frames.clear()
            arrays.clear()

    return decode


def _encode_array(value: object) -> dict[str, object]:
    if not isinstance(value, np.ndarray):
        hint = "; convert it with .item()" if isinstance(value, np.generic) else ""
        raise TypeError(f"cannot encode {type(value).__module__}.{type(value).__qualname__}{hint}")
    return {"__np__": True, "data": _raw_bytes(value), "shape": value.shape, "dtype": str(value.dtype)}


def _raw_bytes(array: npt.NDArray[np.generic]) -> memoryview:
    if array.dtype.hasobject or array.dtype.kind == "V":
        raise TypeError(f"cannot encode an array of dtype {array.dtype}: only plain numbers and strings")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _decode_array(type_: type, value: object, *, copy: bool) -> npt.NDArray[np.generic]:
    if (get_origin(type_) or type_) is not np.ndarray:
        raise TypeError(f"cannot decode {type_}: only numpy arrays are added to msgpack's types")
    if not isinstance(value, dict) or "__np__" not in value:
        raise ValueError("expected an encoded numpy array")
    array = np.frombuffer(value["data"], dtype=np.dtype(value["dtype"])).reshape(value["shape"])
    return array.copy() if copy else array
