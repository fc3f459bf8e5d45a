"""`SpeechTokenizer`: converts speech requests to contexts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

import numpy as np

from penstock.errors import CheckpointError, InputError, UnsupportedFeatureError
from penstock.pipelines.core import AudioGenerationRequest, TTSContext, VoicePrompt
from penstock.text.phonemes import phonemize
from penstock.text.request_checks import check_token_ids_in_params, total_length
from penstock.text.sentences import split_text
from penstock.text.speech_format import SpeechDescription, SpeechFormat, format_name, speech_formats
from penstock.text.spoken_numbers import spoken_numbers
from penstock.text.token_ids import TokenIds, checked_prompt_ids
from penstock.text.tokenizer import TextTokenizer
from penstock.text.valid_unicode import valid_unicode


class VoiceFields(TypedDict, total=False):
    """The fields of an `AudioGenerationRequest` that select a voice: a name, or a recording to imitate."""

    voice: str
    audio_prompt_tokens: list[int]
    audio_prompt_transcription: str


class SpeechFields(VoiceFields, total=False):
    """The fields of an `AudioGenerationRequest` that all parts of a text share."""

    streaming: bool
    adapter: str | None
    cache_salt: str | None
    priority: int


def voice_fields(
    voice: str, configured_voices: Mapping[str, VoicePrompt], speech_format: SpeechFormat
) -> VoiceFields:
    """Return the fields of a request that select a voice.

    Args:
        voice: the name of a configured voice, or of a voice that the model was trained on.
        configured_voices: the configured voices.
        speech_format: the model's speech format.

    Raises:
        InputError: the voice is unknown. The message lists the known voices.
    """
    prompt = configured_voices.get(voice)
    if prompt is not None:
        return {
            "audio_prompt_tokens": list(prompt.codes),
            "audio_prompt_transcription": prompt.transcription,
        }
    if voice not in speech_format.voices:
        names = (
            ", ".join([*configured_voices, *speech_format.voices]) or "none: add one with --voice NAME=FILE"
        )
        raise InputError(f"voice {voice!r} is unknown: known are {names}")
    return {"voice": voice}


class SpeechTokenizer(TextTokenizer):
    """The tokenizer of a speech model with its speech format.

    Args:
        checkpoint: the checkpoint's folder.
        max_length: maximum number of tokens of prompt and speech together. None uses the checkpoint's limit.
        chat_template: a file that replaces the checkpoint's template.
        eos_token_ids: see `TextTokenizer`.
        special_tokens_in_content: see `TextTokenizer`.
        speech_format: name of the speech format; None detects it.

    Raises:
        CheckpointError: the checkpoint is not recognized as a speech model, lacks tokens of its format, or
            has a damaged file.
        ConfigError: the format is unknown, or ``chat_template`` cannot be read or is not a template.
        MissingDependencyError: see `TextTokenizer`.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        max_length: int | None = None,
        chat_template: str | None = None,
        eos_token_ids: Iterable[int] = (),
        special_tokens_in_content: bool = False,
        speech_format: str | None = None,
    ) -> None:
        super().__init__(
            checkpoint,
            max_length=max_length,
            chat_template=chat_template,
            eos_token_ids=eos_token_ids,
            special_tokens_in_content=special_tokens_in_content,
        )
        name = format_name(Path(checkpoint), speech_format)
        if name is None:
            raise CheckpointError(
                checkpoint,
                "is not recognized as a speech model: its vocabulary has no speech tokens. Give "
                f"--speech-format ({', '.join(speech_formats())}) or a speech_config.json",
            )
        description = SpeechDescription.read(Path(checkpoint))
        self.speech_format: SpeechFormat = speech_formats()[name](self, description)
        """The prompt and the speech tokens of the model."""

    async def new_speech_context(self, request: AudioGenerationRequest) -> TTSContext:
        """Run `build_speech_context` in a thread."""
        return await self._run_in_thread(lambda: self.build_speech_context(request))

    def split(self, text: str) -> list[str]:
        """Split a text into parts of at most `SpeechFormat.text_limit` characters, at sentences if possible.

        Before the split, numbers become words if ``speech_config.json`` sets ``numbers``.

        Raises:
            InputError: the text has no characters to speak.
        """
        speech_format = self.speech_format
        parts = split_text(
            self._speakable_text(text),
            speech_format.text_limit,
            at_each_sentence=speech_format.description.splits_sentences,
        )
        if not parts:
            raise InputError("the input is empty: it needs at least one character to speak")
        return parts

    def build_speech_context(self, request: AudioGenerationRequest) -> TTSContext:
        """Return the context of a request.

        ``prompt``, if set, replaces the prompt that the speech format builds from the other fields.
        ``audio_prompt_tokens`` are the flattened codes of whole frames.

        Raises:
            PromptTooLongError: the prompt leaves no room for speech.
            InputError: the request is invalid. The message contains the reason.
            UnsupportedFeatureError: the model does not support a parameter, or the model reads phonemes and
                espeak is not installed.
            RequestFailedError: espeak failed.
        """
        params = request.sampling_params
        if params.stop:
            raise UnsupportedFeatureError("stop", "stop strings cannot match speech: use stop_token_ids")
        check_token_ids_in_params(params, self.vocab_size)
        tokens = self._speech_prompt(request)
        prompt = request.prompt if request.prompt is not None else request.input
        end_token_ids = () if params.ignore_eos else (*self.speech_format.end_token_ids, *self._eos_token_ids)
        return TTSContext(
            np.array(request.audio_prompt_tokens, np.int32),
            prompt=prompt if isinstance(prompt, str) else tokens.tolist(),
            max_length=total_length(len(tokens), params, self.max_length),
            tokens=tokens,
            eos_token_ids={*end_token_ids, *(params.stop_token_ids or ())},
            ignore_eos=params.ignore_eos,
            sampling_params=params,
            request_id=request.id,
            model_name=request.model,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            priority=request.priority,
            streaming=request.streaming,
        )

    def _speech_prompt(self, request: AudioGenerationRequest) -> TokenIds:
        if isinstance(request.prompt, str):
            tokens = self.encode_text(request.prompt, limited=False)
        elif request.prompt is not None:
            tokens = checked_prompt_ids(request.prompt, self.vocab_size)
        else:
            tokens = self._format_prompt(request)
        if not len(tokens):
            raise InputError("the prompt is empty: it needs at least one token")
        return tokens

    def _format_prompt(self, request: AudioGenerationRequest) -> TokenIds:
        text = self._speakable_text(request.input or "").strip()
        if not text:
            raise InputError("the input is empty: it needs at least one character to speak")
        speech_format = self.speech_format
        voice = request.voice
        if voice is not None and speech_format.voices and voice not in speech_format.voices:
            raise InputError(f"voice {voice!r} is unknown: the model has {', '.join(speech_format.voices)}")
        self._check_length(text)
        transcription = self._speakable_text(request.audio_prompt_transcription).strip()
        if speech_format.needs_phonemes:
            language = speech_format.description.language
            text = phonemize(text, language)
            transcription = phonemize(transcription, language) if transcription else ""
        ids = speech_format.prompt(
            text, voice=voice, codes=request.audio_prompt_tokens, transcription=transcription
        )
        return checked_prompt_ids(ids, self.vocab_size)

    def _speakable_text(self, text: str) -> str:
        """Return valid Unicode text. Numbers become words if ``speech_config.json`` sets ``numbers``."""
        text = valid_unicode(text)
        return text if self.speech_format.description.numbers is None else spoken_numbers(text)
