"""XLM-RoBERTa (Conneau et al. 2020, arXiv:1911.02116): RoBERTa with a multilingual vocabulary.

The published checkpoints of Jina Embeddings v3 (Sturua et al. 2024, arXiv:2409.10173) have the same model
type, but a rotary embedding, other tensor names, and several task adapters (LoRA).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.architectures.jina_embeddings_v3.model import JinaEmbeddingsV3Model
from penstock.architectures.roberta.model import RobertaModel
from penstock.lora import Adapter, read_task_adapters
from penstock.nn import EncoderNames, Loader, PostNormSizes, RotaryConfig, TensorNames

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_ADAPTER_PATTERN = "*.parametrizations.weight.0.lora_?"
"""Pattern of the names of task adapter tensors."""


class XLMRobertaModel(RobertaModel):
    """Reads the configuration of XLM-RoBERTa and builds its network."""

    position_types = ("absolute", "rotary")
    ignored_weights = (*RobertaModel.ignored_weights, _ADAPTER_PATTERN)

    @classmethod
    def encoder_names(cls, config: HuggingFaceConfig) -> EncoderNames:
        return JinaEmbeddingsV3Model.names if _is_rotary(config) else cls.names

    @classmethod
    def tensor_names(cls, huggingface_config: HuggingFaceConfig) -> TensorNames:
        names = super().tensor_names(huggingface_config)
        return replace(names, other_tables=(*names.other_tables, _ADAPTER_PATTERN))

    @classmethod
    def sizes(cls, config: HuggingFaceConfig) -> PostNormSizes:
        if not _is_rotary(config):
            return super().sizes(config)
        sizes = super(RobertaModel, cls).sizes(config)  # positions start at 0, unlike RoBERTa's
        base = config.number("rotary_emb_base", 10000.0)
        positions = sizes.positions
        rotary = RotaryConfig(sizes.hidden // sizes.heads, base, "default", positions, positions)
        return replace(sizes, rotary=rotary)

    def task_adapters(self, loader: Loader) -> Mapping[str, Adapter]:
        model, config = self.pipeline_config.model, self.huggingface_config
        tasks = model.embedding_layout.tasks
        if not tasks:
            return {}
        names = self.encoder_names(config)
        return read_task_adapters(
            self.weights,
            loader.linears,
            [name for name in (names.tokens, names.token_types) if name is not None],
            tasks,
            path=str(model.checkpoint),
            alpha=config.number("lora_alpha", 1.0),
            dtype=loader.dtype,
        )


def _is_rotary(config: HuggingFaceConfig) -> bool:
    return config.text("position_embedding_type", "absolute") == "rotary"
