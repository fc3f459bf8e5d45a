"""Requests, contexts and responses: the types that the components of Penstock exchange.

These are the names of the page ``max.pipelines.core`` of Modular's MAX documentation, and additions:
``Grammar``, ``GrammarMatcher``, ``ImageMetadata``, ``image_digest``, ``Pipeline``, ``TokenBuffer``,
``RequestContext``, ``context_type``, ``VoicePrompt`` and the names for embeddings. Importing this package
loads numpy and msgspec, but neither torch nor transformers nor a library for grammars.
"""

from penstock.pipelines.core.context import TextContext
from penstock.pipelines.core.context_types import RequestContext, context_type
from penstock.pipelines.core.embeddings import (
    EMBEDDINGS_OUTPUTS,
    POOLING_TYPES,
    EmbeddingsContext,
    EmbeddingsContextBuilder,
    EmbeddingsGenerationRequest,
    EmbeddingsOutput,
    PoolingType,
    check_dimensions,
)
from penstock.pipelines.core.interfaces import (
    AudioGenerator,
    EmbeddingsGenerator,
    GrammarMatcher,
    InputContext,
    Pipeline,
    PipelineTokenizer,
    TokenGenerator,
)
from penstock.pipelines.core.requests import (
    AudioGenerationRequest,
    Grammar,
    TokenGeneratorRequest,
    TokenGeneratorRequestFunction,
    TokenGeneratorRequestMessage,
    TokenGeneratorRequestTool,
    TokenGeneratorResponseFormat,
)
from penstock.pipelines.core.responses import (
    AudioGenerationResponse,
    AudioGeneratorOutput,
    EmbeddingsResponse,
    LogProbabilities,
    SparseEmbedding,
    TextGenerationResponse,
    TextResponse,
)
from penstock.pipelines.core.sampling_params import SamplingParams
from penstock.pipelines.core.serialization import msgpack_numpy_decoder, msgpack_numpy_encoder
from penstock.pipelines.core.speech import TTSContext, VoicePrompt
from penstock.pipelines.core.status import PipelineTask, TextGenerationStatus
from penstock.pipelines.core.tokens import TokenBuffer
from penstock.pipelines.core.vision import ImageMetadata, TextAndVisionContext, image_digest

__all__ = [
    "EMBEDDINGS_OUTPUTS",
    "POOLING_TYPES",
    "AudioGenerationRequest",
    "AudioGenerationResponse",
    "AudioGenerator",
    "AudioGeneratorOutput",
    "EmbeddingsContext",
    "EmbeddingsContextBuilder",
    "EmbeddingsGenerationRequest",
    "EmbeddingsGenerator",
    "EmbeddingsOutput",
    "EmbeddingsResponse",
    "Grammar",
    "GrammarMatcher",
    "ImageMetadata",
    "InputContext",
    "LogProbabilities",
    "Pipeline",
    "PipelineTask",
    "PipelineTokenizer",
    "PoolingType",
    "RequestContext",
    "SamplingParams",
    "SparseEmbedding",
    "TTSContext",
    "TextAndVisionContext",
    "TextContext",
    "TextGenerationResponse",
    "TextGenerationStatus",
    "TextResponse",
    "TokenBuffer",
    "TokenGenerator",
    "TokenGeneratorRequest",
    "TokenGeneratorRequestFunction",
    "TokenGeneratorRequestMessage",
    "TokenGeneratorRequestTool",
    "TokenGeneratorResponseFormat",
    "VoicePrompt",
    "check_dimensions",
    "context_type",
    "image_digest",
    "msgpack_numpy_decoder",
    "msgpack_numpy_encoder",
]
