"""Qwen3.5: the encoder of Qwen3-VL without deepstack, and a decoder with linear attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from penstock.architectures.hybrid import HybridModel
from penstock.architectures.multimodal_rope import interleaved_axes
from penstock.architectures.qwen2_5_vl.model import QwenVisionModel
from penstock.architectures.qwen3_5_text.model import Qwen35TextModel
from penstock.architectures.qwen3_vl.vision import Qwen3Vision
from penstock.config import HuggingFaceConfig
from penstock.nn import Loader

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.kv_cache import KVCacheSpec


class Qwen35VisionModel(QwenVisionModel):
    """Reads the configuration of Qwen3.5 and builds its decoder and its image encoder."""

    supports_tensor_parallelism = False
    ignored_weights = (*QwenVisionModel.ignored_weights, "mtp.*")  # multi-token prediction
    text_family: ClassVar[type[HybridModel]] = Qwen35TextModel
    sections = (11, 11, 10)
    vision_tables = ("visual.pos_embed.weight",)
    vision_defaults: ClassVar[Mapping[str, object]] = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 3584,
    }

    @classmethod
    def axes(cls, sections: Sequence[int], pairs: int) -> tuple[int, ...]:
        return interleaved_axes(sections, pairs)

    @classmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        return cls.text_family.kv_spec(pipeline_config, cls.text_config(huggingface_config))

    @classmethod
    def load_encoder(cls, load: Loader, huggingface_config: HuggingFaceConfig) -> Qwen3Vision:
        hidden = cls.blueprint(huggingface_config).hidden
        return Qwen3Vision.load(load, "visual", cls.vision_config(huggingface_config), hidden)
