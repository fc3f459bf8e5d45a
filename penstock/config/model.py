"""`ModelConfig`: the checkpoint, the task, the encoding and the devices of a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.huggingface import HuggingFaceConfig
from penstock.config.settings import COUNT, FLAG, TEXT, Rule, check_fields, setting
from penstock.config.task import TASK_OPTIONS, detect_task
from penstock.driver import DeviceSpec
from penstock.errors import ConfigError
from penstock.kernels.encodings import ENCODINGS, encoding_named
from penstock.weights.checkpoint import Checkpoint, is_gguf, open_checkpoint
from penstock.weights.gguf_config import gguf_generation_config
from penstock.weights.hub import local_name, resolve_checkpoint
from penstock.weights.json_files import read_json_object
from penstock.weights.packed_file import PackedKey
from penstock.weights.safetensors import QuantizedHeader, TensorHeader

if TYPE_CHECKING:
    from penstock.pipelines.core import PipelineTask
    from penstock.text.sentence_transformers import SentenceTransformersLayout

MODEL_IMPLEMENTATIONS = ("auto", "penstock", "transformers")

FLOAT_ENCODINGS = ENCODINGS.float_names
"""Names of the encodings that store plain floats."""


def parse_devices(text: str) -> tuple[DeviceSpec, ...]:
    """Parse ``cpu``, ``gpu`` (the first one), ``gpu:1`` or ``gpu:0,1``.

    Raises:
        ConfigError: the text has another form, or names a device twice.
    """
    device_type, colon, index_list = text.strip().partition(":")
    indices = index_list.split(",") if colon else ["0"]
    are_integers = all(index.isdecimal() for index in indices)
    if not (device_type == "gpu" and are_integers) and not (device_type == "cpu" and not colon):
        raise ConfigError("devices", f"must be {_DEVICES.allowed_values}, was {text!r}")
    if len({int(index) for index in indices}) < len(indices):
        raise ConfigError("devices", f"{text!r} names a device twice")
    return tuple(DeviceSpec(int(index), device_type) for index in indices)


def parse_dimensions(text: str) -> tuple[int, ...]:
    """Parse a list of integers such as ``64,128,256``. Empty items are ignored.

    Raises:
        ConfigError: an item is not a whole number.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError("matryoshka_dimensions", f"must be {_DIMENSIONS.allowed_values}, was {text!r}")
    return tuple(int(part) for part in parts)


_DIMENSIONS = Rule(
    "whole numbers of at least 1, such as 64,128,256",
    lambda value: (
        isinstance(value, tuple)
        and all(isinstance(item, int) and not isinstance(item, bool) and item >= 1 for item in value)
    ),
)
_DEVICES = Rule(
    "cpu, gpu, gpu:1 or gpu:0,1",
    lambda value: (
        isinstance(value, tuple) and bool(value) and all(isinstance(device, DeviceSpec) for device in value)
    ),
)


def _is_encoding(name: str) -> bool:
    """Return True.

    Raises:
        ConfigError: no encoding has this name. This error of `encoding_named` is more precise than the error
            of a `Rule` whose check returns False.
    """
    encoding_named(name)
    return True


@cache
def _warn_encoding_fallback(encoding: str, requested_encoding: str, device: str) -> None:
    """Log that ``encoding`` replaces ``requested_encoding``. The function's cache drops repeated warnings."""
    logging.getLogger(__name__).warning(
        "%s weights run in %s on %s, which does not support %s: use --quantization-encoding float32 for full "
        "precision in twice the memory",
        requested_encoding,
        encoding,
        device,
        requested_encoding,
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The checkpoint, the task, the encoding and the devices of a model.

    Raises:
        ConfigError: a field has an invalid value.
    """

    model_path: str = setting(
        "demo",
        TEXT,
        "A checkpoint's folder, a GGUF file, an id on the Hugging Face hub, or demo, demo-voice or "
        "demo-vision for an included model.",
    )
    revision: str = setting("main", TEXT, "Branch, tag or commit of a model from the hub.")
    gguf_file: str | None = setting(
        None,
        TEXT,
        "GGUF file to load from a folder or a hub model: its name or a part of its name, such as Q4_K_M.",
    )
    quantization_encoding: str | None = setting(
        None,
        Rule("the name of an encoding", _is_encoding),
        f"Encoding of the weights: {', '.join(ENCODINGS.names[:-1])} or {ENCODINGS.names[-1]}; by default "
        "the encoding of the checkpoint.",
    )
    max_length: int | None = setting(
        None,
        COUNT,
        "Maximum length of prompt and output together, in tokens; by default the maximum that the model "
        "and the memory allow.",
    )
    devices: tuple[DeviceSpec, ...] = setting(
        (DeviceSpec.cpu(),), _DEVICES, "Devices to run on: cpu, gpu, gpu:1 or gpu:0,1.", parse=parse_devices
    )
    kernels: str | None = setting(
        None,
        TEXT,
        "Kernel back end: cpu, cuda or reference; by default the fastest back end for the device.",
    )
    chat_template: str | None = setting(
        None, TEXT, "Jinja chat template file to use instead of the checkpoint's template."
    )
    special_tokens_in_content: bool = setting(
        False,
        FLAG,
        "Encode special tokens such as <|im_end|> in messages of users and tools as special tokens; by "
        "default they are encoded as text.",
    )
    served_model_name: str | None = setting(
        None,
        TEXT,
        "Model name in the API; by default the name of the model's folder or GGUF file, or the model's id on "
        "the hub.",
    )

    task: str = setting(
        "auto",
        Rule(
            f"one of {', '.join(TASK_OPTIONS)}",
            lambda value: value in TASK_OPTIONS,
            TASK_OPTIONS,
            convert_text=lambda text: text.replace("_", "-"),
        ),
        "Task of the model. auto detects it from modules.json and 1_Pooling, then from architectures in "
        "config.json, from speech_config.json and from speech tokens in the vocabulary.",
    )
    model_impl: str = setting(
        "auto",
        Rule(
            f"one of {', '.join(MODEL_IMPLEMENTATIONS)}",
            lambda value: value in MODEL_IMPLEMENTATIONS,
            MODEL_IMPLEMENTATIONS,
        ),
        "Implementation of the network: penstock or transformers. A module of transformers runs with the "
        "attention and the KV cache of Penstock. auto uses transformers for model types that Penstock does "
        "not implement.",
    )
    trust_remote_code: bool = setting(
        False,
        FLAG,
        "Run the Python code of the checkpoint, if the model runs on transformers and needs this code.",
    )
    matryoshka_dimensions: tuple[int, ...] = setting(
        (),
        _DIMENSIONS,
        "Lengths to which requests may cut dense embeddings, such as 64,128,256; by default the lengths that "
        "the checkpoint's config.json allows.",
        parse=parse_dimensions,
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @cached_property
    def pipeline_task(self) -> PipelineTask:
        """The task that the model is loaded for: ``task``, or the detected task if it is ``auto``.

        Raises:
            CheckpointError: the checkpoint's files are missing or malformed.
            ConfigError: ``speech_config.json`` names an unknown speech format.
        """
        if self.task == "auto":
            return detect_task(self.checkpoint, self.huggingface_config)
        from penstock.pipelines.core import PipelineTask

        return PipelineTask(self.task.replace("-", "_"))

    @property
    def trained_dimensions(self) -> tuple[int, ...] | None:
        """The lengths to which a dense embedding may be cut, besides its full length; None allows any length.

        The setting ``matryoshka_dimensions`` overrides the list of the same name in ``config.json``. If there
        is neither, the result is None for ``"is_matryoshka": true`` in ``config.json``, otherwise empty.

        Raises:
            CheckpointError: ``config.json`` is missing or malformed.
        """
        if self.matryoshka_dimensions:
            return self.matryoshka_dimensions
        listed_dimensions = self.huggingface_config.get("matryoshka_dimensions")
        if isinstance(listed_dimensions, list | tuple):
            return tuple(item for item in listed_dimensions if isinstance(item, int))
        return None if self.huggingface_config.get("is_matryoshka") is True else ()

    @cached_property
    def name(self) -> str:
        """The model name in requests and responses."""
        return self.served_model_name or local_name(self.model_path)

    @cached_property
    def checkpoint(self) -> Path:
        """The checkpoint's folder or GGUF file, located or downloaded on first use.

        Raises:
            CheckpointError: the checkpoint does not exist or cannot be loaded.
        """
        return resolve_checkpoint(self.model_path, self.revision, self.gguf_file)

    @cached_property
    def huggingface_config(self) -> HuggingFaceConfig:
        """The checkpoint's ``config.json``, or its equivalent from the metadata of a GGUF file.

        Raises:
            CheckpointError: the configuration is missing or malformed.
        """
        return HuggingFaceConfig.from_checkpoint(self.checkpoint)

    @cached_property
    def generation_config(self) -> dict[str, object]:
        """The checkpoint's ``generation_config.json``, or its equivalent from a GGUF file; empty if missing.

        Raises:
            CheckpointError: the file is malformed.
        """
        if is_gguf(self.checkpoint):
            return gguf_generation_config(self.checkpoint)
        path = self.checkpoint / "generation_config.json"
        return read_json_object(path) if path.exists() else {}

    @cached_property
    def embedding_layout(self) -> SentenceTransformersLayout:
        """The computation of embeddings from hidden states, read from the checkpoint's folder.

        Raises:
            CheckpointError: a file is malformed, or a module or an option is not supported.
        """
        from penstock.text.sentence_transformers import read_layout  # loads numpy

        return read_layout(self.checkpoint)

    @cached_property
    def encoding(self) -> str:
        """The encoding of the weights: ``quantization_encoding``, or by default the checkpoint's.

        If the device does not support it, a supported encoding replaces it, with a warning.

        Raises:
            CheckpointError: the checkpoint is missing or malformed.
            ConfigError: no encoding is configured, and the checkpoint's weights have an unknown type or an
                unknown quantization.
        """
        requested_encoding = self.quantization_encoding or self._stored_encoding()
        encoding = encoding_named(requested_encoding).on_device(self.devices[0].device_type)
        if encoding != requested_encoding:
            _warn_encoding_fallback(encoding, requested_encoding, str(self.devices[0]))
        return encoding

    @property
    def keeps_stored_layers(self) -> bool:
        """Whether each layer keeps the encoding or the float type in which the checkpoint stores it.

        True for formats of quantized checkpoints (GPTQ, GGUF, ...) unless ``quantization_encoding`` is set.

        Raises:
            CheckpointError: the checkpoint is missing or malformed.
            ConfigError: its weights are quantized in a way that no format reads.
        """
        return self.quantization_encoding is None and self.opened_checkpoint.format.keeps_floats

    def _stored_encoding(self) -> str:
        opened = self.opened_checkpoint
        stored_encoding = opened.format.model_encoding(opened.headers)
        if stored_encoding is not None:
            return stored_encoding
        stored_encoding = self._stored_type()
        if stored_encoding not in FLOAT_ENCODINGS:
            raise ConfigError(
                "quantization_encoding",
                f"must be one of {', '.join(ENCODINGS.names)}: the checkpoint is stored in {stored_encoding}",
            )
        return stored_encoding

    @cached_property
    def opened_checkpoint(self) -> Checkpoint:
        """The checkpoint's format and headers.

        Raises:
            WeightsError: its files are missing or damaged.
            ConfigError: its weights are quantized in a way that no format reads.
        """
        return open_checkpoint(self.checkpoint)

    @property
    def tensor_headers(self) -> Mapping[str, TensorHeader]:
        """Name -> header (shape and type) of every tensor of the checkpoint. No tensor is read.

        Raises:
            WeightsError: its files are missing or damaged.
            ConfigError: its weights are quantized in a way that no format reads.
        """
        return self.opened_checkpoint.headers

    @property
    def packed_key(self) -> PackedKey:
        """The key under which the packed weights of this model are stored.

        Raises:
            CheckpointError: the checkpoint is missing or malformed.
            ConfigError: the checkpoint's weights have an unknown type or an unknown quantization.
        """
        return PackedKey(
            checkpoint=self.checkpoint,
            encoding=self.encoding,
            tensor_files=tuple({header.file for header in self.tensor_headers.values()}),
            config=json.dumps(self.huggingface_config.to_dict(), sort_keys=True, default=str),
        )

    def _stored_type(self) -> str:
        """Return the dtype that ``config.json`` declares, or the type of the largest unquantized tensor.

        If there is neither, the result is ``no tensors``.
        """
        config = self.huggingface_config
        declared_type = config.get("dtype") or config.section("text_config").get("dtype")
        if declared_type:
            return str(declared_type).removeprefix("torch.")
        # Unquantized tensors determine the type of the activations. uint8 tensors contain quantized weights.
        headers = [
            header
            for header in self.tensor_headers.values()
            if header.type_name != "U8" and not isinstance(header, QuantizedHeader)
        ]
        largest_header = max(headers, key=lambda header: header.num_bytes, default=None)
        if largest_header is None:
            return "no tensors"
        return largest_header.dtype.value if largest_header.dtype else largest_header.type_name
