"""`GGUFKeys`: reads and checks the metadata of a model family in a GGUF file."""

from __future__ import annotations

from typing import cast

from penstock.errors import WeightsError
from penstock.weights.gguf import GGUFFile


class GGUFKeys:
    """The metadata of a GGUF file under the prefix of its model family.

    Keys are given without the prefix: ``block_count`` stands for ``llama.block_count``.
    """

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self._prefix = f"{architecture}."
        self._read: set[str] = set()

    def get(self, key: str) -> object:
        """Return the value of a key, or None if the key is missing."""
        self._read.add(key)
        return self.file.metadata.get(self._prefix + key)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0. Other values, and a missing key without default, are errors."""
        value = self.get(key) if self.get(key) is not None else default
        if value is None:
            raise self.missing_key(key)
        if type(value) is not int or value < 1:
            raise self.invalid_value(key, "must be a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0. Other values, and a missing key without default, are errors."""
        value = self.get(key) if self.get(key) is not None else default
        if value is None:
            raise self.missing_key(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.invalid_value(key, "must be a number above 0")
        return value

    def sliding_window(self) -> int | None:
        """Return the size of the sliding window, or None if it is missing or 0."""
        return self.count("attention.sliding_window") if self.get("attention.sliding_window") else None

    def has_layer_tensor(self, tensor: str) -> bool:
        """Return whether the first layer has a tensor, such as ``attn_q.bias``."""
        return f"blk.0.{tensor}" in self.file.tensors

    def num_rows(self, tensor: str) -> int:
        """Return the size of the first dim of a tensor. A missing tensor is an error."""
        if tensor not in self.file.tensors:
            raise WeightsError(self.file.path, f"has no tensor {tensor}")
        return self.file.tensors[tensor].shape[0]

    def array(self, key: str) -> list[object]:
        """Return the elements of the array under a key; empty if the key is missing."""
        self._read.add(key)
        return self.file.array(self._prefix + key)

    def unprefixed_numbers(self, key: str, count: int) -> list[float]:
        """Return the array of ``count`` numbers under a key without the family's prefix.

        An array of another length or with other elements is an error.
        """
        values = self.file.array(key)
        if len(values) != count or not all(type(value) in (int, float) for value in values):
            raise WeightsError(
                self.file.path, f"{key} must be an array of {count} numbers, was {values!r:.100}"
            )
        return [float(cast("float", value)) for value in values]

    def missing_key(self, key: str) -> WeightsError:
        """Return the error for a missing key."""
        return WeightsError(self.file.path, f"has no {self._prefix}{key}")

    def invalid_value(self, key: str, problem: str) -> WeightsError:
        """Return the error for an invalid value."""
        return WeightsError(self.file.path, f"{self._prefix}{key} {problem}, was {self.get(key)!r}")

    def unread_keys(self) -> list[str]:
        """Return the family's keys that were not read, except those without effect on the results."""
        keys = (key for key in self.file.metadata if key.startswith(self._prefix))
        handled_keys = self._read | _WITHOUT_EFFECT
        return sorted(key for key in keys if key.removeprefix(self._prefix) not in handled_keys)

    def check_supported(self) -> None:
        """Check that the file sets no key that requires computations without support in Penstock.

        Must be called after the configuration was read, because a key that was read counts as supported.

        Raises:
            WeightsError: a key of `_RESTRICTED_KEYS` is set but not supported for the family, or another key
                has an unsupported value.
        """
        for key in _RESTRICTED_KEYS:
            is_read = key in self._read or key in _SUPPORTED_BY.get(self._prefix, ())
            if not is_read and self.get(key):
                raise self.invalid_value(key, "is not supported")
        if self.get("attention.causal") is False:
            raise self.invalid_value(
                "attention.causal", "must be true: text generation needs causal attention"
            )
        if self.get("tensor_data_layout") not in (None, "reference", "Meta AI original pth"):
            raise self.invalid_value("tensor_data_layout", "is unknown")
        if self.count("attention.value_length", self.head_dim) != self.head_dim:
            raise self.invalid_value("attention.value_length", f"must be the head size, {self.head_dim}")

    @property
    def head_dim(self) -> int:
        """The size of an attention head, D."""
        num_heads = self.count("attention.head_count")
        return self.count("attention.key_length", max(1, self.count("embedding_length") // num_heads))


_RESTRICTED_KEYS = (
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "use_parallel_residual",
    "leading_dense_block_count",
    "expert_shared_count",
    "expert_group_count",
    "nextn_predict_layers",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "router_logit_softcapping",
)
"""Keys that require computations which the networks of most families do not implement."""
_SUPPORTED_BY = {
    "gptneox.": ("use_parallel_residual",),
    "stablelm.": ("use_parallel_residual",),
    "olmo.": ("attention.clamp_kqv",),
}
"""Prefix of a family -> keys of `_RESTRICTED_KEYS` that are supported for this family."""
_WITHOUT_EFFECT = {  # keys that do not affect the results
    "vocab_size",  # taken from the shape of the embedding table
    "rope.scaling.finetuned",
    "rope.dimension_count_swa",
    "attention.key_length_swa",
    "attention.value_length_swa",
}
