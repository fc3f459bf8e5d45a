"""`VisionLanguageModel`: a decoder with an image encoder, both read from one checkpoint."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from penstock.architectures.decoder import Network
from penstock.architectures.registry import PIPELINE_REGISTRY
from penstock.architectures.transformer import TransformerModel
from penstock.architectures.vision import VisionModel
from penstock.config import HuggingFaceConfig
from penstock.errors import ConfigError
from penstock.kernels import GraphCache, StepInputs, encoding_named
from penstock.nn import Blueprint, Loader, TensorNames
from penstock.nn.vision import EncoderRunner
from penstock.pipelines.core import ImageMetadata

if TYPE_CHECKING:
    from penstock.config import PipelineConfig
    from penstock.kernels import PackedLinear
    from penstock.nn import BlockParts, LoadBlock

_WIDEST_ROWS_PER_PATCH = 6
"""Maximum memory of the vision tower per patch, in rows as wide as the widest layer. For the memory plan."""

MAX_ENCODER_GRAPHS = 8
"""Maximum number of image shapes for which a graph of the encoder is kept."""


class ImageEncoder(Protocol):
    """The computation from images to embeddings: a vision tower and a projection."""

    def __call__(self, images: Sequence[ImageMetadata], run: EncoderRunner) -> list[Tensor]:
        """Return the embeddings ``[embedding_rows, W]`` of each image; see `VisionModel.encode_images`."""
        ...


@dataclass(frozen=True, slots=True)
class VisionLanguageNetwork:
    """A decoder and an image encoder."""

    text: Network
    encoder: ImageEncoder

    @property
    def head(self) -> Callable[[Tensor, StepInputs], Tensor]:
        """The output head of the decoder, ``[R, E] -> [R, V]``."""
        return self.text.head

    @property
    def is_length_dependent(self) -> bool:
        """Whether keys of the decoder depend on the length of the sequence."""
        return self.text.is_length_dependent

    def __call__(
        self, tokens: Tensor, step: StepInputs, input_embeds: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``tokens [T]`` -> hidden states ``[T, E]`` before and after the final norm."""
        return self.text(tokens, step, input_embeds)


class VisionLanguageModel(VisionModel, TransformerModel):
    """A decoder of another family with an image encoder.

    `weights_adapter` maps the tensor names of the decoder to the names of the decoder's own family. A
    subclass reads the encoder (`load_encoder`) and defines `encoder_rows` and `max_image_rows`.
    """

    network: VisionLanguageNetwork
    encoder_graphs: GraphCache | None = None
    """The graphs of the encoder; None before the first image, or if operations run eagerly."""
    text_defaults: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """For each model type of a decoder: transformers' defaults of keys missing in ``text_config``."""
    vision_defaults: ClassVar[Mapping[str, object]] = {}
    """transformers' defaults of keys missing in ``vision_config``."""
    vision_tables: ClassVar[tuple[str, ...]] = ()
    """Patterns of encoder matrices that are not linear layers, such as learned positions."""

    @classmethod
    @abstractmethod
    def load_encoder(cls, load: Loader, huggingface_config: HuggingFaceConfig) -> ImageEncoder:
        """Read the image encoder from a checkpoint."""

    @classmethod
    def vision_config(cls, huggingface_config: HuggingFaceConfig) -> HuggingFaceConfig:
        """Return the configuration of the vision tower."""
        section = huggingface_config.section("vision_config").to_dict()
        return HuggingFaceConfig({**cls.vision_defaults, **section}, "config.json: vision_config")

    @classmethod
    def widest_layer(cls, huggingface_config: HuggingFaceConfig) -> int:
        """Return the largest input or output size of a layer of the encoder."""
        vision = cls.vision_config(huggingface_config)
        return max(3 * vision.integer("hidden_size"), vision.integer("intermediate_size"))

    @classmethod
    def tensor_names(cls, huggingface_config: HuggingFaceConfig) -> TensorNames:
        names = cls.blueprint(huggingface_config).names
        return replace(names, other_tables=names.other_tables + cls.vision_tables)

    @classmethod
    def text_config(cls, huggingface_config: HuggingFaceConfig) -> HuggingFaceConfig:
        """Return the configuration of the decoder."""
        section = huggingface_config.section("text_config")
        model_type = section.text("model_type", "llama")
        tied_values: dict[str, object] = {}
        if huggingface_config.flag("tie_word_embeddings"):
            tied_values = {"tie_word_embeddings": True}
        defaults = {"model_type": model_type, **cls.text_defaults.get(model_type, {})}
        values = {**defaults, **section.to_dict(), **tied_values}
        return HuggingFaceConfig(values, "config.json: text_config")

    @classmethod
    def text_model(cls, text_config: HuggingFaceConfig) -> type[TransformerModel]:
        """Return the class of the decoder.

        Raises:
            UnknownArchitectureError: the type is unknown.
            ConfigError: the family cannot be the decoder of a vision model.
        """
        name = text_config.text("model_type")
        record = PIPELINE_REGISTRY.retrieve_architecture(text_config, "text_config")
        model = record.load_pipeline_model()
        if not issubclass(model, TransformerModel) or model.weights_adapter is not None:
            raise ConfigError("text_config.model_type", f"{name!r} cannot be the decoder of a vision model")
        return model

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        text = cls.text_config(huggingface_config)
        return cls.text_model(text).blueprint(text)

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        text = cls.text_config(huggingface_config)
        return cls.text_model(text).parts(load, blueprint, text)

    @classmethod
    def block(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig, parts: BlockParts
    ) -> LoadBlock:
        text = cls.text_config(huggingface_config)
        return cls.text_model(text).block(load, blueprint, text, parts)

    @classmethod
    def build(
        cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int
    ) -> VisionLanguageNetwork:
        text = super().build(load, huggingface_config, max_length)
        return VisionLanguageNetwork(text, cls.load_encoder(load, huggingface_config))

    def adapted_layers(self, loader: Loader) -> Mapping[str, PackedLinear]:
        """Return the layers of the decoder only: requests with different adapters share image embeddings."""
        names = self.tensor_names(self.pipeline_config.model.huggingface_config)
        return {
            name: layer
            for name, layer in loader.linears.items()
            if name.startswith(names.prefix) or name == names.head
        }

    @property
    def rename_adapter_tensor(self) -> Callable[[str], str | None] | None:
        return type(self).weights_adapter

    def encode_images(self, images: Sequence[ImageMetadata]) -> list[Tensor]:
        self.session.check_process()
        is_small = sum(map(self.encoder_rows, images)) <= self.max_encoder_rows
        graphs = self._find_encoder_graphs() if is_small and not self.lazy_packing.num_pending else None
        return self.network.encoder(images, EncoderRunner(self.session.ops, graphs))

    def _find_encoder_graphs(self) -> GraphCache | None:
        """Return the graphs of the encoder; None if operations run eagerly.

        Creates them if there are none for the compiler of the session.
        """
        graphs = self.session.graphs
        if graphs is None or self.session.ranks is not None:
            return None
        if self.encoder_graphs is None or self.encoder_graphs.compiler is not graphs.compiler:
            row_size = self.encoder_row_size(self.pipeline_config, self.huggingface_config)
            self.encoder_graphs = GraphCache(
                graphs.compiler,
                max_graphs=MAX_ENCODER_GRAPHS,
                max_bytes=self.max_encoder_rows * row_size,
                pads_columns=False,
            )
        return self.encoder_graphs

    @classmethod
    def encoder_row_size(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> int:
        size = encoding_named(pipeline_config.model.encoding).compute_dtype.size_in_bytes
        return _WIDEST_ROWS_PER_PATCH * cls.widest_layer(huggingface_config) * size
