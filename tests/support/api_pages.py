"""Pages of MAX's API reference as data: all public names with their parameters, methods and properties.

``CORE`` is the page of MAX 25.4, ``PIPELINE`` is the page of 25.1, and ``PIPELINE_MODEL`` is the page of
26.3, with ``max`` replaced by ``penstock``. A signature is written as on the page, without annotations and
``self``. Parameters that begin with an underscore are omitted. ``FACTORY`` is ``<factory>`` of a page. If two
pages show a name, the signature of the later page is used, as comments note.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Page:
    """A class or function as shown on a page."""

    signature: str | None = None
    """The signature of the constructor or function; None if the page shows none, as for an enum."""
    attributes: str = ""
    """Names of properties and attributes."""
    methods: dict[str, str] = field(default_factory=dict)
    """Signatures, with ``classmethod`` or ``async`` before the name, as on the page."""
    members: dict[str, str] = field(default_factory=dict)
    """The members of an enum."""
    keys: str = ""
    """The keys of a typed dictionary."""
    is_protocol: bool = False


class UnstatedDefault:
    """A default value that a page does not state."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


FACTORY = UnstatedDefault("<factory>")
OPTIONAL = UnstatedDefault("<any>")
"""The default of a parameter that the page of 26.3 requires. Calls of 25.1 omit the parameter."""


def parse(signature: str) -> list[inspect.Parameter]:
    """Return the parameters of a signature that is written as on a page."""
    from penstock.nn import ReturnHiddenStates
    from penstock.pipelines.core import SamplingParams, TextGenerationStatus

    names = {
        "FACTORY": FACTORY,
        "OPTIONAL": OPTIONAL,
        "ReturnHiddenStates": ReturnHiddenStates,
        "SamplingParams": SamplingParams,
        "TextGenerationStatus": TextGenerationStatus,
    }
    function: Any = eval(f"lambda {signature.removeprefix('(').removesuffix(')')}: None", names)
    return list(inspect.signature(function).parameters.values())


_SAMPLING = (
    "SamplingParams(top_k=1, top_p=1, min_p=0.0, temperature=1, frequency_penalty=0.0, presence_penalty=0.0,"
    " repetition_penalty=1.0, max_new_tokens=None, min_new_tokens=0, ignore_eos=False, stop=None,"
    " stop_token_ids=None, detokenize=True, seed=0)"
)
_TEXT_CONTEXT = (
    "*, prompt, max_length, tokens, eos_token_ids=FACTORY, eos_sequences=FACTORY, log_probabilities=None,"
    " log_probabilities_echo=False, ignore_eos=False, json_schema=None, sampling_params=FACTORY"
)
_CONTEXT_METHODS = {
    "assign_to_cache": "(cache_seq_id)",
    "bump_token_indices": "(start_idx=0, active_idx=0, end_idx=0, committed_idx=0)",
    "compute_num_available_steps": "(max_seq_len)",
    "get_min_token_logit_mask": "(num_steps)",
    "jump_ahead": "(new_token)",
    "outstanding_completion_tokens": "()",
    "reset": "()",
    "rollback": "(idx)",
    "set_draft_offset": "(idx)",
    "set_matcher": "(matcher)",
    "set_token_indices": "(start_idx=None, active_idx=None, end_idx=None, committed_idx=None)",
    "unassign_from_cache": "()",
    "update": "(new_token, log_probabilities=None)",
    "update_status": "(status)",
}
_CONTEXT_ATTRIBUTES = (
    "active_idx active_length all_tokens cache_seq_id committed_idx current_length end_idx eos_token_ids"
    " generated_tokens is_assigned_to_cache is_ce is_done is_initial_prompt json_schema log_probabilities"
    " log_probabilities_echo matcher max_length min_tokens next_tokens prompt_tokens sampling_params"
    " start_idx status tokens"
)

CORE = {
    "AudioGenerationRequest": Page(
        "(id, index, model, input=None, audio_prompt_tokens=FACTORY, audio_prompt_transcription='',"
        f" sampling_params={_SAMPLING}, prompt=None)",
        "audio_prompt_tokens audio_prompt_transcription id index input model prompt sampling_params",
    ),
    "AudioGenerationResponse": Page(
        "(final_status, audio=None)", "audio_data final_status has_audio_data is_done"
    ),
    "AudioGenerator": Page(
        attributes="decoder_sample_rate",
        methods={"next_chunk": "(batch, num_tokens)", "release": "(context)"},
        is_protocol=True,
    ),
    "AudioGeneratorOutput": Page("(audio_data, metadata, is_done)", "audio_data is_done metadata"),
    "EmbeddingsGenerator": Page(methods={"encode": "(batch)"}, is_protocol=True),
    "EmbeddingsResponse": Page("(embeddings)", "embeddings"),
    "InputContext": Page(attributes=_CONTEXT_ATTRIBUTES, methods=_CONTEXT_METHODS, is_protocol=True),
    "LogProbabilities": Page(
        "(token_log_probabilities, top_log_probabilities)", "token_log_probabilities top_log_probabilities"
    ),
    "PipelineTask": Page(
        members={
            "AUDIO_GENERATION": "audio_generation",
            "EMBEDDINGS_GENERATION": "embeddings_generation",
            "SPEECH_TOKEN_GENERATION": "speech_token_generation",
            "TEXT_GENERATION": "text_generation",
        }
    ),
    "PipelineTokenizer": Page(
        attributes="eos expects_content_wrapping",
        methods={
            "async decode": "(context, encoded, **kwargs)",
            "async encode": "(prompt, add_special_tokens)",
            "async new_context": "(request)",
        },
        is_protocol=True,
    ),
    "SamplingParams": Page(
        _SAMPLING.removeprefix("SamplingParams"),
        "detokenize frequency_penalty ignore_eos max_new_tokens min_new_tokens min_p presence_penalty"
        " repetition_penalty seed stop stop_token_ids temperature top_k top_p",
    ),
    "TTSContext": Page(
        f"(audio_prompt_tokens=FACTORY, prev_samples_beyond_offset=0, {_TEXT_CONTEXT})",
        "audio_generation_status audio_prompt_tokens block_counter decoded_index is_done"
        " prev_samples_beyond_offset speech_token_status speech_tokens status",
        {
            "has_undecoded_speech_tokens": "(exclude_last_n=0)",
            "next_speech_tokens": "(audio_chunk_size=None, buffer=None)",
            "set_decoded_index": "(idx)",
            "update_audio_generation_status": "(status)",
            "update_speech_token_status": "(status)",
            "update_speech_tokens": "(new_tokens)",
            "update_status": "(status)",
        },
    ),
    "TextAndVisionContext": Page(
        f"({_TEXT_CONTEXT}, pixel_values=FACTORY, extra_model_args=FACTORY)",
        "extra_model_args pixel_values",
        {"update": "(new_token, log_probabilities=None)"},
    ),
    "TextContext": Page(
        f"({_TEXT_CONTEXT})", f"{_CONTEXT_ATTRIBUTES} eos_sequences ignore_eos prompt", _CONTEXT_METHODS
    ),
    "TextGenerationResponse": Page(
        "(tokens, final_status)",
        "final_status is_done tokens",
        {"append_token": "(token)", "update_status": "(status)"},
    ),
    "TextGenerationStatus": Page(
        attributes="is_done",
        members={
            "ACTIVE": "active",
            "END_OF_SEQUENCE": "end_of_sequence",
            "MAXIMUM_LENGTH": "maximum_length",
        },
    ),
    "TextResponse": Page("(next_token, log_probabilities=None)", "log_probabilities next_token"),
    "TokenGenerator": Page(
        methods={"next_token": "(batch, num_steps)", "release": "(context)"}, is_protocol=True
    ),
    "TokenGeneratorRequest": Page(
        "(id, index, model_name, prompt=None, messages=None, images=None, tools=None, response_format=None,"
        " timestamp_ns=0, request_path='/', logprobs=0, echo=False, stop=None, chat_template_options=None,"
        f" sampling_params={_SAMPLING})",
        "chat_template_options echo id images index logprobs messages model_name prompt request_path"
        " response_format sampling_params stop timestamp_ns tools",
    ),
    "TokenGeneratorRequestFunction": Page(keys="description name parameters"),
    "TokenGeneratorRequestMessage": Page(keys="content role"),
    "TokenGeneratorRequestTool": Page(keys="function type"),
    "TokenGeneratorResponseFormat": Page(keys="json_schema type"),
    "msgpack_numpy_decoder": Page("(type_, copy=True)"),
    "msgpack_numpy_encoder": Page("()"),
}

PIPELINE_MODEL = Page(
    "(pipeline_config, session, devices=OPTIONAL, kv_cache_config=OPTIONAL, weights=OPTIONAL,"
    " adapter=OPTIONAL, return_logits=OPTIONAL, return_hidden_states=ReturnHiddenStates.NONE)",
    "dtype huggingface_config lora_manager signal_buffers",
    {
        "classmethod calculate_max_seq_len": "(pipeline_config, huggingface_config)",
        "compute_log_probabilities": (
            "(session, model_inputs, model_outputs, next_tokens, batch_top_n, batch_echo)"
        ),
        "classmethod estimate_activation_memory": "(pipeline_config, huggingface_config)",
        "classmethod estimate_weights_size": "(pipeline_config)",
        "execute": "(model_inputs)",
        "prepare_initial_token_inputs": "(replica_batches, kv_cache_inputs=None, return_n_logits=1)",
        "prepare_next_token_inputs": "(next_tokens, prev_model_inputs)",
    },
)

PIPELINE = {
    "KVCacheMixin": Page(
        methods={
            "estimate_kv_cache_size": "(available_cache_memory)",
            "load_kv_manager": "(session, available_cache_memory)",
        },
        is_protocol=True,
    ),
    # The first two parameters are on the page of 25.1, the others on the page of 26.3.
    "ModelOutputs": Page(
        "(next_token_logits=None, logits=None, logit_offsets=None, hidden_states=None)",
        "logits next_token_logits",
    ),
    # PIPELINE_MODEL has the methods that are on both pages. This method is only on the page of 25.1.
    "PipelineModel": Page(methods={"estimate_memory_footprint": "()"}),
    "TextGenerationPipeline": Page(
        "(pipeline_config, pipeline_model, eos_token_id)",
        methods={"next_token": "(batch, num_steps=1)", "release": "(context)"},
    ),
}

PAGES: dict[str, dict[str, Page]] = {
    "penstock.pipelines.core": CORE,
    "penstock.pipelines.text_generation": PIPELINE,
    "penstock.pipelines": {"PipelineModel": PIPELINE_MODEL},
}
