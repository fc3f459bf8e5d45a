"""`SpeechFormat`: the speech tokens and the prompts of a family of speech models.

`penstock.text.speech_formats` has one module per format.

A format defines the prompt for a text to speak, and the token of each code of an audio codec. A checkpoint
may have a ``speech_config.json`` next to its ``config.json`` (see `SpeechDescription`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from penstock.errors import CheckpointError, ConfigError, InputError
from penstock.host.discovery import modules_in
from penstock.text.spoken_numbers import LANGUAGES as NUMBER_LANGUAGES
from penstock.weights.json_files import read_json_object

if TYPE_CHECKING:
    from penstock.text.tokenizer import TextTokenizer

_FORMATS_PACKAGE = "penstock.text.speech_formats"
_DESCRIPTION_FILE = "speech_config.json"


@dataclass(frozen=True, kw_only=True)
class SpeechDescription:
    """The contents of ``speech_config.json``; all keys are optional."""

    format: str | None = None
    """The name of the speech format. By default it is detected from ``tokenizer.json``."""
    codec: str | None = None
    """The codec: a folder, relative to the checkpoint, or an id on the Hugging Face hub."""
    codes_per_frame: int | None = None
    """Number of codes per frame, if it differs from the default of the format."""
    codebook_size: int | None = None
    """Number of codes per codebook, if it differs from the default of the format."""
    phonemes: bool | None = None
    """Whether the model reads phonemes instead of letters. The format defines the default."""
    language: str = "en-us"
    """The language of the phonemes, by its name in espeak-ng."""
    numbers: str | None = None
    """The language of the words that replace numbers in a text. If None, numbers are not replaced."""
    max_characters: int | None = None
    """Maximum number of characters of a text, if it differs from the default of the format.

    Longer texts are split at sentences.
    """
    splits_sentences: bool = False
    """Whether each sentence is a separate request, for models that were trained on single sentences."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Default sampling parameters, which override the defaults of the format."""
    voices: tuple[str, ...] | None = None
    """Names of the voices that the model was trained on, if they differ from the default of the format."""

    @classmethod
    def read(cls, checkpoint: Path) -> SpeechDescription:
        """Return the description of a checkpoint; without a file, a description with the default values.

        Raises:
            CheckpointError: the file is not a JSON object, or has an unknown key, a value of a wrong type, or
                an unsupported language for ``numbers``.
        """
        path = checkpoint / _DESCRIPTION_FILE
        if not path.is_file():
            return cls()
        values: dict[str, Any] = read_json_object(path)  # the types of the values are checked below
        known_keys = {field.name for field in fields(cls)}
        for name in values:
            if name not in known_keys:
                raise CheckpointError(
                    path, f"has the unknown key {name!r}: known are {', '.join(known_keys)}"
                )
        for name, type_ in _VALUE_TYPES.items():
            if values.get(name) is not None and not isinstance(values[name], type_):
                raise CheckpointError(path, f"{name} must be of type {type_.__name__}: {values[name]!r}")
        if values.get("numbers") not in (None, *NUMBER_LANGUAGES):
            known_languages = ", ".join(NUMBER_LANGUAGES)
            raise CheckpointError(path, f"numbers must be one of {known_languages}: {values['numbers']!r}")
        if values.get("voices") is not None:
            values["voices"] = tuple(str(voice) for voice in values["voices"])
        return cls(**{name: value for name, value in values.items() if value is not None})


_VALUE_TYPES: Mapping[str, type] = {
    "format": str,
    "codec": str,
    "codes_per_frame": int,
    "codebook_size": int,
    "phonemes": bool,
    "language": str,
    "numbers": str,
    "max_characters": int,
    "splits_sentences": bool,
    "sampling": dict,
    "voices": list,
}


class SpeechCodes:
    """The mapping between the codes of an audio codec and tokens.

    Args:
        token_ids: ``[codes per frame, codebook size]``. The element ``[position, code]`` is the token id of
            ``code`` at ``position`` in a frame.
    """

    def __init__(self, token_ids: npt.NDArray[np.int64]) -> None:
        self.codes_per_frame, self.codebook_size = token_ids.shape
        self._token_ids = token_ids
        num_ids = int(token_ids.max()) + 1
        self._code = np.full(num_ids, -1, np.int32)  # token id -> code; -1 if the token represents no code
        self._position = np.full(num_ids, -1, np.int8)  # token id -> position of the code in a frame
        self._code[token_ids] = np.arange(self.codebook_size, dtype=np.int32)
        self._position[token_ids] = np.arange(self.codes_per_frame, dtype=np.int8)[:, None]

    def token_ids(self, codes: Sequence[int] | npt.NDArray[np.integer]) -> list[int]:
        """Return the tokens of flattened codes, which must be whole frames.

        Raises:
            InputError: the codes are not a flat list of integers, their number is not a multiple of
                ``codes_per_frame``, or a code is out of range.
        """
        flat_codes = np.asarray(codes)
        if flat_codes.ndim != 1 or (flat_codes.size and not np.issubdtype(flat_codes.dtype, np.integer)):
            raise InputError(f"speech codes must be a list of integers: got shape {list(flat_codes.shape)}")
        if flat_codes.size % self.codes_per_frame:
            raise InputError(
                f"{flat_codes.size} speech codes are not a whole number of frames: "
                f"a frame has {self.codes_per_frame}"
            )
        if flat_codes.size and not 0 <= int(flat_codes.min()) <= int(flat_codes.max()) < self.codebook_size:
            raise InputError(
                f"speech codes must be from 0 to {self.codebook_size - 1}, "
                f"were from {int(flat_codes.min())} to {int(flat_codes.max())}"
            )
        positions = np.arange(flat_codes.size) % self.codes_per_frame
        ids: list[int] = self._token_ids[positions, flat_codes.astype(np.int64)].tolist()
        return ids

    def parse(self, tokens: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int32], int, int]:
        """Return the codes of the whole frames in generated tokens.

        Tokens that represent no code are dropped. If a code has the wrong position, the incomplete frame
        before it is dropped, and the next frame begins at the next code of position 0, which can be this
        code. An incomplete frame at the end is not parsed.

        Args:
            tokens: the generated tokens that earlier calls have not parsed.

        Returns:
            (flattened codes, number of parsed tokens, number of dropped tokens among the parsed tokens).
        """
        codes: list[int] = []
        frame: list[int] = []
        num_parsed = 0
        for index, token in enumerate(tokens.tolist()):
            is_code = 0 <= token < self._code.size and self._position[token] >= 0
            if is_code and self._position[token] != len(frame):
                frame.clear()
                num_parsed = index
                is_code = self._position[token] == 0
            if is_code:
                frame.append(int(self._code[token]))
                if len(frame) == self.codes_per_frame:
                    codes += frame
                    frame.clear()
                    num_parsed = index + 1
            elif not frame:
                num_parsed = index + 1
        return np.array(codes, np.int32), num_parsed, num_parsed - len(codes)


class SpeechFormat(ABC):
    """The prompt and the tokens of a family of speech models.

    Args:
        tokenizer: the tokenizer of the checkpoint.
        description: the checkpoint's ``speech_config.json``.

    Raises:
        CheckpointError: the tokenizer lacks a token for a code.
    """

    name: ClassVar[str]
    """The name of the format and of its module."""
    marker: ClassVar[str]
    """The text of a token. A checkpoint whose ``tokenizer.json`` contains it has this format by default."""
    default_codec: ClassVar[str]
    """The id of the default codec on the Hugging Face hub."""
    reads_phonemes: ClassVar[bool] = False
    """Whether models read phonemes, unless ``speech_config.json`` sets ``phonemes``."""
    sampling: ClassVar[Mapping[str, float]] = {}
    """Defaults of sampling parameters."""
    max_characters: ClassVar[int]
    """Default of ``max_characters`` in ``speech_config.json``."""
    default_voices: ClassVar[tuple[str, ...]] = ()
    """Default of ``voices`` in ``speech_config.json``."""

    def __init__(self, tokenizer: TextTokenizer, description: SpeechDescription) -> None:
        self.description = description
        self._tokenizer = tokenizer
        self.codes = SpeechCodes(self.code_tokens())

    @abstractmethod
    def code_tokens(self) -> npt.NDArray[np.int64]:
        """Return the token ids of all codes, ``[codes per frame, codebook size]`` (see `SpeechCodes`)."""

    @property
    @abstractmethod
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the speech."""

    @abstractmethod
    def prompt(self, text: str, *, voice: str | None, codes: Sequence[int], transcription: str) -> list[int]:
        """Return the tokens of a prompt.

        Args:
            text: the text to speak, letters or phonemes.
            voice: the name of a voice that the model was trained on; None for no name.
            codes: flattened codes of a recording whose voice is imitated; empty for none.
            transcription: the transcription of ``codes``.

        Raises:
            InputError: an argument is invalid, missing or not supported by the format.
        """

    @property
    def voices(self) -> tuple[str, ...]:
        """The names of the voices that the model was trained on."""
        voice_names = self.description.voices
        return self.default_voices if voice_names is None else voice_names

    @property
    def needs_phonemes(self) -> bool:
        """Whether the model reads phonemes instead of letters."""
        description_value = self.description.phonemes
        return self.reads_phonemes if description_value is None else description_value

    @property
    def text_limit(self) -> int:
        """Maximum number of characters of a text; longer texts are split at sentences."""
        return self.description.max_characters or self.max_characters

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """The sampling parameters that apply if neither the request nor generation_config.json sets them."""
        return {**self.sampling, **self.description.sampling}

    def token_id(self, text: str) -> int:
        """Return the id of a token.

        Raises:
            CheckpointError: the vocabulary has no such token.
        """
        token_id = self._tokenizer.backend.token_to_id(text)
        if token_id is None:
            raise CheckpointError(
                "tokenizer.json", f"has no token {text!r}, which the speech format {self.name!r} needs"
            )
        return token_id

    def numbered_token_ids(self, pattern: str, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the ids of ``count`` tokens with consecutive numbers in their texts.

        ``pattern`` is the text of the tokens, such as ``<|speech_{}|>``, and ``first`` is the first number.

        If the ids of the first and the last token are ``count - 1`` apart, the ids are assumed to be
        consecutive, and the tokens between are not looked up.

        Raises:
            CheckpointError: the vocabulary lacks one of the tokens that are looked up.
        """
        begin, end = self.token_id(pattern.format(first)), self.token_id(pattern.format(first + count - 1))
        if end - begin == count - 1:
            return np.arange(begin, end + 1, dtype=np.int64)
        return np.array([self.token_id(pattern.format(first + i)) for i in range(count)], np.int64)


@cache
def speech_formats() -> Mapping[str, type[SpeechFormat]]:
    """Return name -> class of all speech formats, sorted by name."""
    formats = {module.FORMAT.name: module.FORMAT for module in modules_in(_FORMATS_PACKAGE)}
    return dict(sorted(formats.items()))


def format_name(checkpoint: Path, configured_name: str | None = None) -> str | None:
    """Return the name of a checkpoint's speech format; None if no format is configured or detected.

    Args:
        checkpoint: the checkpoint's folder, or a GGUF file. The format of a GGUF file is not detected.
        configured_name: the value of ``--speech-format``. It overrides ``speech_config.json``, which
            overrides the detection by the vocabulary.

    Raises:
        ConfigError: the name is unknown.
        CheckpointError: ``speech_config.json`` is malformed.
    """
    formats = speech_formats()
    name = configured_name or SpeechDescription.read(checkpoint).format
    if name is not None:
        if name not in formats:
            raise ConfigError("speech_format", f"must be one of {', '.join(formats)}, was {name!r}")
        return name
    vocabulary = checkpoint / "tokenizer.json"
    if not vocabulary.is_file():
        return None
    content = vocabulary.read_bytes()
    return next(
        (candidate for candidate in formats if f'"{formats[candidate].marker}"'.encode() in content),
        None,
    )


def is_speech_checkpoint(checkpoint: Path) -> bool:
    """Return whether a checkpoint has a ``speech_config.json`` or a detected speech format."""
    return (checkpoint / _DESCRIPTION_FILE).is_file() or format_name(checkpoint) is not None
