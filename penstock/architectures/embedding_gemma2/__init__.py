"""EmbeddingGemma 2 for text inputs only; images, videos and audio are refused."""

from __future__ import annotations

from penstock.architectures.embedding_gemma2_text import tiny_config as text_config
from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests, with placeholder tokens of images and audio."""
    text = {key: value for key, value in text_config().items() if key != "architectures"}
    return {
        "architectures": ["EmbeddingGemma2Model"],
        "model_type": "embedding_gemma2",
        "image_token_id": 2,
        "audio_token_id": 1,
        "text_config": text,
        "vision_config": None,
        "audio_config": None,
    }


ARCHITECTURE = SupportedArchitecture(
    name="embedding_gemma2",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:EmbeddingGemma2Model",
    example_repo_ids=("google/embeddinggemma-2",),
    tiny_config=tiny_config,
)
