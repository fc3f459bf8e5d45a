"""Qwen3.5: the encoder of Qwen3-VL without deepstack, and a decoder with linear attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from penstock.architectures.hybrid import HybridModel
from penstock.architectures.qwen3_5_text.model import Qwen35TextModel
from penstock.architectures.qwen3_vl.model import Qwen3EncoderModel
from penstock.config import HuggingFaceConfig

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.kv_cache import KVCacheSpec


class Qwen35VisionModel(Qwen3EncoderModel):
    """Reads the configuration of Qwen3.5 and builds its decoder and its image encoder."""

    supports_tensor_parallelism = False
    ignored_weights = (*Qwen3EncoderModel.ignored_weights, "mtp.*")  # multi-token prediction
    text_family: ClassVar[type[HybridModel]] = Qwen35TextModel
    sections = (11, 11, 10)

    @classmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        return cls.text_family.kv_spec(pipeline_config, cls.text_config(huggingface_config))
