"""msgpack with numpy arrays, the format of contexts and responses between processes.

    >>> import numpy as np
    >>> encode, decode = msgpack_numpy_encoder(), msgpack_numpy_decoder(np.ndarray)
    >>> decode(encode(np.arange(3))).tolist()
    [0, 1, 2]

An array is a map ``{"__np__": True, "data": bytes in C order, "shape": [...], "dtype": name}``. It is decoded
to an array if the target type is ``ndarray``. Other types that msgpack does not support raise ``TypeError``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_origin

import msgspec
import numpy as np


def msgpack_numpy_encoder() -> Callable[[object], bytes]:
    """Return a function that encodes objects to bytes. The function is not thread-safe."""
    return msgspec.msgpack.Encoder(enc_hook=_encode_array).encode


def msgpack_numpy_decoder(type_: Any, copy: bool = True) -> Callable[[bytes], Any]:
    """Return a function that decodes bytes into ``type_``.

    With ``copy`` the arrays own their memory and are writable. Without it they are read-only views of the
    bytes, except the ``tokens`` of a context, which are always writable.
    """
    return msgspec.msgpack.Decoder(type_, dec_hook=partial(_decode_array, copy=copy)).decode


def _encode_array(value: object) -> dict[str, object]:
    if not isinstance(value, np.ndarray):
        hint = "; convert it with .item()" if isinstance(value, np.generic) else ""
        raise TypeError(f"cannot encode {type(value).__module__}.{type(value).__qualname__}{hint}")
    if value.dtype.hasobject or value.dtype.kind == "V":
        raise TypeError(f"cannot encode an array of dtype {value.dtype}: only plain numbers and strings")
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return {"__np__": True, "data": raw.data, "shape": value.shape, "dtype": str(value.dtype)}


def _decode_array(type_: Any, value: Any, *, copy: bool) -> Any:
    if (get_origin(type_) or type_) is not np.ndarray:
        raise TypeError(f"cannot decode {type_}: only numpy arrays are added to msgpack's types")
    if not isinstance(value, dict) or "__np__" not in value:
        raise ValueError("expected an encoded numpy array")
    array = np.frombuffer(value["data"], dtype=np.dtype(value["dtype"])).reshape(value["shape"])
    return array.copy() if copy else array
