"""`TransformersModel`: runs the transformers module of a family that Penstock does not implement.

The module calls `paged_attention` for attention and computes all other operations itself. Steps run eagerly.
The module must call the attention interface of transformers in each layer, pass the keyword arguments of a
forward to this interface, and read its positions from ``position_ids``. Modules with recurrent layers,
encoders, positions that depend on the whole batch, or quantized weights are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.architectures.decoder import DecoderModel, Network, kv_dtype
from penstock.architectures.model import ModelInputs
from penstock.architectures.transformers_attention import ATTENTION_NAME, STEP_ARGUMENT, ModuleStep, register
from penstock.config import upper_bounded_default
from penstock.errors import ConfigError, UnsupportedFeatureError
from penstock.kernels import Ops, SamplingInputs, StepInputs, encoding_named
from penstock.kv_cache import KVCacheSpec, KVGroup
from penstock.nn import Loader, ReturnHiddenStates
from penstock.weights.lazy_packing import LazyPacking

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from penstock.config import HuggingFaceConfig, PipelineConfig

_logger = logging.getLogger(__name__)
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True, slots=True)
class ModuleNetwork:
    """A transformers module, including its head."""

    module: nn.Module
    spec: KVCacheSpec
    is_length_dependent: bool = False

    def logits(self, tokens: Tensor, step: StepInputs, rows: Tensor) -> Tensor:
        """Return the logits ``[R, V]`` of the rows ``rows [R]`` of ``tokens [T]``.

        Raises:
            UnsupportedFeatureError: a layer has not called the attention interface exactly once.
        """
        module_step = ModuleStep(step, self.spec)
        outputs = self.module(
            tokens[None],
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=rows,
            **{STEP_ARGUMENT: module_step},
        )
        if sorted(module_step.calls) != list(range(self.spec.num_layers)):
            raise UnsupportedFeatureError(
                type(self.module).__name__,
                f"only its layers {sorted(module_step.calls)} of {self.spec.num_layers} called the attention "
                "interface",
            )
        logits: Tensor = outputs.logits[0]
        return logits

    def head(self, x: Tensor, step: StepInputs) -> Tensor:
        """Raise ``NotImplementedError``: `logits` runs the module, which applies its head itself."""
        raise NotImplementedError

    def __call__(
        self, tokens: Tensor, step: StepInputs, input_embeds: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Raise ``NotImplementedError``: `logits` runs the module."""
        raise NotImplementedError


class TransformersModel(DecoderModel):
    """Runs the transformers module of a family for which Penstock has no network."""

    network: ModuleNetwork

    @classmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        _check_support(pipeline_config)
        config = _module_config(pipeline_config)
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        dtype = kv_dtype(pipeline_config)
        layers_by_window: dict[tuple[int | None, bool], list[int]] = {}
        for layer, window in enumerate(_windows(config)):
            layers_by_window.setdefault(window, []).append(layer)
        return KVCacheSpec(
            tuple(
                KVGroup(tuple(layers), kv_heads, head_dim, dtype, window, is_chunked)
                for (window, is_chunked), layers in layers_by_window.items()
            )
        )

    @classmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        longest = huggingface_config.integer("max_position_embeddings")
        return upper_bounded_default(longest, pipeline_config.model.max_length)

    @classmethod
    def estimate_weights_size(cls, pipeline_config: PipelineConfig) -> int:
        size = encoding_named(pipeline_config.model.encoding).compute_dtype.size_in_bytes
        return sum(header.num_elements for header in pipeline_config.model.tensor_headers.values()) * size

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> Network:
        raise ConfigError(
            "model_impl", "transformers loads the weights of its module: they cannot be checked and packed"
        )

    def _load_network(self) -> ModuleNetwork:
        if self.return_hidden_states is not ReturnHiddenStates.NONE:
            raise UnsupportedFeatureError("hidden states", "the module of transformers returns logits only")
        register()
        from transformers import AutoModelForCausalLM

        self.lazy_packing = LazyPacking([], self.session.reservations)
        model, spec = self.pipeline_config.model, self.kv_cache_spec
        assert spec is not None
        _logger.warning(
            "%s runs on its transformers implementation, eagerly: Penstock does not implement it",
            self.huggingface_config.model_type,
        )
        try:
            module: nn.Module = AutoModelForCausalLM.from_pretrained(
                model.checkpoint,
                config=_module_config(self.pipeline_config),
                dtype=self.dtype.to_torch(),
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=model.trust_remote_code,
                local_files_only=True,
            )
        except ValueError as problem:  # such as code that does not use the attention interface
            raise ConfigError("model_impl", f"transformers cannot load the module: {problem}") from problem
        network = ModuleNetwork(module.eval().to(self.torch_device), spec)
        with torch.inference_mode():
            check_positions(network, self.session.ops, self.torch_device)
        return network

    def _run_compiled(self, model_inputs: ModelInputs) -> tuple[Tensor, ...] | None:
        if self.session.graphs is not None:
            self.session.graphs.skip("the module of transformers runs eagerly")
        return None

    def execute_steps(
        self, model_inputs: ModelInputs, sampling: SamplingInputs, uniforms: Tensor, stop_ids: Tensor
    ) -> Tensor | None:
        return None

    def _run_eagerly(self, model_inputs: ModelInputs, ops: Ops) -> tuple[Tensor, ...]:
        step = StepInputs(ops, model_inputs.positions, model_inputs.row_offsets, model_inputs.kv)
        return (self.network.logits(model_inputs.tokens, step, model_inputs.logit_rows),)


def check_positions(network: ModuleNetwork, ops: Ops, device: torch.device) -> None:
    """Check that a module computes the sequences of a batch separately, and reads ``position_ids``.

    Raises:
        UnsupportedFeatureError: results depend on the batch, or the module ignores ``position_ids``.
    """
    name = type(network.module).__name__

    def logits(*sequences: Sequence[int]) -> Tensor:  # positions of each sequence -> [T, V]
        row_offsets = torch.tensor([0, *map(len, sequences)]).cumsum(0).int().to(device)
        positions = torch.tensor([position for sequence in sequences for position in sequence], device=device)
        tokens = torch.arange(len(positions), device=device).flip(0) + 1
        rows = torch.arange(len(positions), device=device)
        return network.logits(tokens, StepInputs(ops, positions, row_offsets), rows).float()

    # The tokens count down to 1, so the last sequence has the tokens 4, 3, 2, 1 in each call.
    single, shifted = logits([0, 1, 2, 3]), logits([0, 1, 2, 9])
    batched = logits([0, 1, 2], [0, 1, 2, 3])[3:]
    tolerance = (0.02 if network.module.dtype == torch.float32 else 0.2) * float(single.std())
    if float((single - batched).abs().max()) > tolerance:
        raise UnsupportedFeatureError(name, "its results for a sequence depend on the rest of the batch")
    if torch.equal(single[-1], shifted[-1]):
        raise UnsupportedFeatureError(name, "it does not read position_ids")


def _module_config(pipeline_config: PipelineConfig) -> PreTrainedConfig:
    """Return the configuration of the module.

    Raises:
        ConfigError: transformers cannot read the configuration, or the checkpoint needs its own Python code
            and ``trust_remote_code`` is not set.
    """
    from transformers import AutoConfig

    model = pipeline_config.model
    path = Path(model.checkpoint)
    has_code = model.huggingface_config.get("auto_map") is not None
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except (ValueError, KeyError, OSError) as problem:
        if has_code and not model.trust_remote_code:
            raise ConfigError(
                "trust_remote_code",
                f"{model.huggingface_config.model_type} needs the Python code of its checkpoint: read it, "
                "then pass --trust-remote-code",
            ) from problem
        raise ConfigError("model_impl", f"transformers cannot read {path}: {problem}") from problem
    return config


def _check_support(pipeline_config: PipelineConfig) -> None:
    """Refuse settings that `TransformersModel` does not support and modules that it cannot run.

    Raises:
        ConfigError: the message names the setting, or the property of the module.
    """
    if pipeline_config.lora.is_enabled:
        raise ConfigError("enable_lora", "adapters cannot be applied to the module of transformers")
    if pipeline_config.deterministic:
        raise ConfigError("deterministic", "the results of the module of transformers depend on the batch")
    config = _module_config(pipeline_config)
    problem = _config_problem(config) or _class_problem(config, pipeline_config)
    if problem:
        raise ConfigError("model_impl", f"{config.model_type} cannot run through transformers: {problem}")


def _config_problem(config: PreTrainedConfig) -> str | None:
    """Return the reason why a configuration cannot run; None if it can."""
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if (
        getattr(config, "vision_config", None) is not None
        or getattr(config, "audio_config", None) is not None
    ):
        return "it reads images or audio"
    unknown = set(getattr(config, "layer_types", None) or ()) - {_FULL, _SLIDING, _CHUNKED}
    if unknown:
        return f"it has layers of {', '.join(sorted(unknown))}"
    ropes = getattr(config, "rope_parameters", None) or {}
    sections = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    unsupported = {section.get("rope_type") for section in sections} & {"dynamic", "longrope"}
    if unsupported:
        return f"positions of rope type {unsupported.pop()} depend on the longest sequence of a batch"
    missing = [
        key
        for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        if not isinstance(getattr(config, key, None), int)
    ]
    return f"its configuration has no {', '.join(missing)}" if missing else None


def _class_problem(config: PreTrainedConfig, pipeline_config: PipelineConfig) -> str | None:
    """Return the reason why the class of a module cannot run; None if it can."""
    from transformers import AutoModelForCausalLM

    if not AutoModelForCausalLM._model_mapping.get(type(config), None):
        return None if pipeline_config.model.trust_remote_code else "it generates no text"
    module_class: object = AutoModelForCausalLM._model_mapping[type(config)]
    if getattr(module_class, "_is_stateful", False):
        return "it has recurrent layers"
    if not getattr(module_class, "_supports_attention_backend", False):
        return "it does not call the attention interface"
    return None


def _windows(config: PreTrainedConfig) -> list[tuple[int | None, bool]]:  # [L]
    """Return for each layer its window or chunk size, and whether attention is chunked.

    Raises:
        ConfigError: ``layer_types`` contradicts the number of layers, or a window or chunk size is missing.
    """
    layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None) or None
    types = getattr(config, "layer_types", None)
    if types is None:
        return [(window, False)] * layers
    windows_by_type = {
        _FULL: (None, False),
        _SLIDING: (window, False),
        _CHUNKED: (getattr(config, "attention_chunk_size", None), True),
    }
    if len(types) != layers or any(windows_by_type[kind][0] is None for kind in types if kind != _FULL):
        raise ConfigError("layer_types", f"{types!r} does not fit {layers} layers and window {window!r}")
    return [windows_by_type[kind] for kind in types]
