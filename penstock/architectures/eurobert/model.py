"""EuroBERT (Boizard et al. 2025, arXiv:2503.05500): Llama's blocks with bidirectional attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.embedder import EmbedderModel
from penstock.architectures.llama.model import LlamaModel
from penstock.errors import ConfigError
from penstock.nn import ClassifierNames
from penstock.pipelines.core import PoolingType

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_POOLINGS: dict[str, PoolingType] = {"bos": "cls", "mean": "mean", "late": "mean"}


class EuroBertModel(EmbedderModel):
    """Reads the configuration of EuroBERT and builds its network."""

    decoder = LlamaModel
    classifier_names = ClassifierNames(dense="dense", activation="gelu", output="classifier")
    default_pooling = "mean"

    @property
    def classifier_pooling(self) -> PoolingType:
        kind = self.huggingface_config.text("classifier_pooling", "late")
        if kind not in _POOLINGS:
            raise ConfigError("classifier_pooling", f"{kind!r} is not known: use {', '.join(_POOLINGS)}")
        return _POOLINGS[kind]

    @property
    def pools_logits(self) -> bool:
        return self.huggingface_config.text("classifier_pooling", "late") == "late"

    @classmethod
    def is_causal(cls, huggingface_config: HuggingFaceConfig) -> bool:
        return False
