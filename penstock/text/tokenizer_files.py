"""Reads the tokenizer files of a checkpoint: vocabulary, special tokens, templates, end-of-sequence ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.pre_tokenizers import Metaspace

from penstock.errors import CheckpointError, MissingDependencyError
from penstock.text.chat_template import find_templates
from penstock.weights.checkpoint import is_gguf
from penstock.weights.gguf_config import gguf_config
from penstock.weights.gguf_tokenizer import read_gguf_tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SLOW_TOKENIZER_FILES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "tiktoken.model")
_NO_LIMIT = 10**9  # a model_max_length from this value on means no limit; transformers writes 10**30


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of a checkpoint, with its special tokens, templates and maximum length."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # name in templates -> text: "eos_token" -> "</s>"
    templates: dict[str, str]  # name -> Jinja text
    eos_token_ids: tuple[int, ...]  # the first is `TextTokenizer.eos`
    origin: Path | str  # for error messages
    vocab_size: int  # from config.json or the GGUF metadata; otherwise of the tokenizer
    max_length: int | None


def read_tokenizer_files(checkpoint: Path) -> TokenizerFiles:
    """Read the tokenizer of a checkpoint folder or of a GGUF file.

    If the folder of a GGUF file has ``tokenizer.json``, the tokenizer, special tokens and templates of the
    folder override those of the GGUF file. The end-of-sequence ids of both are used.

    Raises:
        CheckpointError: the tokenizer is missing, damaged or not convertible, or a JSON file is invalid.
        MissingDependencyError: the tokenizer has an older format and transformers is not installed.
    """
    return _read_gguf(checkpoint) if is_gguf(checkpoint) else _read_folder(checkpoint)


def _read_gguf(path: Path) -> TokenizerFiles:
    folder = _read_folder(path.parent) if (path.parent / "tokenizer.json").is_file() else None
    gguf = read_gguf_tokenizer(path, folder.tokenizer if folder else None)
    config = gguf_config(path)
    gguf.tokenizer.no_truncation()
    gguf.tokenizer.no_padding()
    return TokenizerFiles(
        origin=path,
        tokenizer=gguf.tokenizer,
        special_tokens=gguf.special_tokens | (folder.special_tokens if folder else {}),
        templates=gguf.templates | (folder.templates if folder else {}),
        eos_token_ids=tuple(dict.fromkeys((*(folder.eos_token_ids if folder else ()), *gguf.eos_token_ids))),
        vocab_size=cast(int, config["vocab_size"]),
        max_length=cast("int | None", config.get("max_position_embeddings", config.get("n_positions"))),
    )


def _read_folder(checkpoint: Path) -> TokenizerFiles:
    settings = _read_object(checkpoint / "tokenizer_config.json")
    settings = {**settings, **_read_object(checkpoint / "special_tokens_map.json")}
    model_config = _read_object(checkpoint / "config.json")
    text_model = model_config.get("text_config")  # in multimodal models
    if isinstance(text_model, dict):
        model_config = {**text_model, **model_config}
    special_tokens = dict(_named_tokens(settings))
    if (checkpoint / "tokenizer.json").is_file():
        tokenizer = _load_fast(checkpoint / "tokenizer.json")
        try:
            _add_missing_tokens(tokenizer, settings, special_tokens)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = "its added or special tokens do not have the form of tokens"
            raise CheckpointError(checkpoint / "tokenizer_config.json", message) from error
        _apply_prefix_space_settings(tokenizer, settings)
    else:
        tokenizer = _convert_slow(checkpoint)
    # tokenizer.json may contain settings from training. Truncation would cut prompts without an error, and
    # padding would lengthen prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TokenizerFiles(
        origin=checkpoint,
        tokenizer=tokenizer,
        special_tokens=special_tokens,
        templates=find_templates(checkpoint, settings),
        eos_token_ids=tuple(
            dict.fromkeys(_eos_token_ids(checkpoint, tokenizer, special_tokens, model_config))
        ),
        vocab_size=_positive_integer(checkpoint, model_config, "vocab_size")
        or max(tokenizer.get_vocab().values(), default=-1) + 1,
        max_length=_positive_integer(checkpoint, model_config, "max_position_embeddings")
        or _length_limit(settings.get("model_max_length")),
    )


def _read_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file; empty if the file does not exist."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, f"must contain a JSON object, contains a {type(value).__name__}")
    return value


def _load_fast(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself for all errors
        raise CheckpointError(path, f"is not a tokenizer: {error}") from error


def _convert_slow(checkpoint: Path) -> Tokenizer:
    if not any((checkpoint / name).is_file() for name in _SLOW_TOKENIZER_FILES):
        raise CheckpointError(checkpoint, "has no tokenizer.json, and no older tokenizer to convert")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        purpose = f"{checkpoint}: a tokenizer without tokenizer.json"
        raise MissingDependencyError("transformers", "slow-tokenizers", purpose) from error
    try:
        with _log_disabled("transformers"):
            tokenizer = AutoTokenizer.from_pretrained(str(checkpoint), use_fast=True).backend_tokenizer
    except Exception as error:  # the converters raise exceptions of many types
        raise CheckpointError(checkpoint, f"the tokenizer cannot be converted: {error}") from error
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


@contextmanager
def _log_disabled(library: str) -> Iterator[None]:
    """Context manager that hides the log records of a library below CRITICAL.

    The records repeat the messages of the library's exceptions.
    """
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _named_tokens(settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    extra_special_tokens = settings.get("extra_special_tokens")
    extra_tokens = extra_special_tokens.items() if isinstance(extra_special_tokens, dict) else ()
    for name, token in [*((name, settings.get(name)) for name in _NAMED_TOKENS), *extra_tokens]:
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            yield name, text


def _add_missing_tokens(
    tokenizer: Tokenizer, settings: Mapping[str, object], special_tokens: Mapping[str, str]
) -> None:
    """Add the tokens of ``settings`` that the tokenizer lacks, and mark the special tokens as special."""
    added_tokens = cast("dict[str, dict[str, object]]", settings.get("added_tokens_decoder", {}))
    for _, token in sorted(added_tokens.items(), key=lambda item: int(item[0])):
        flags = {
            name: bool(token.get(name))
            for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        tokenizer.add_tokens([AddedToken(str(token["content"]), **flags)])
    token_lists = [settings.get("additional_special_tokens"), settings.get("extra_special_tokens")]
    configured_tokens = [
        *special_tokens.values(),
        *(token for tokens in token_lists if isinstance(tokens, list) for token in tokens),
    ]
    special_texts = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    texts = [token["content"] if isinstance(token, dict) else token for token in configured_tokens]
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in texts if text not in special_texts]
    )


def _apply_prefix_space_settings(tokenizer: Tokenizer, settings: Mapping[str, object]) -> None:
    """Set where a Llama tokenizer inserts a leading space, by the settings of tokenizer_config.json.

    tokenizer.json inserts a space before every text between special tokens. Without ``legacy: true`` only the
    first text gets a space, and with ``add_prefix_space: false`` no text.
    """
    if settings.get("tokenizer_class") not in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return
    # Only a normalizer that prepends "▁", replaces spaces by "▁" and changes nothing else is replaced.
    normalizer = tokenizer.normalizer
    if (
        normalizer is None
        or tokenizer.pre_tokenizer is not None
        or normalizer.normalize_str("ﬁ  x") != "▁ﬁ▁▁x"
    ):
        return
    scheme = "always" if settings.get("legacy") else "first"
    if settings.get("add_prefix_space") is False:
        scheme = "never"
        # The decoder of the file strips the first space. If the tokenizer inserts no space, this space
        # belongs to the text.
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = Metaspace(replacement="▁", prepend_scheme=scheme, split=False)


def _eos_token_ids(
    checkpoint: Path,
    tokenizer: Tokenizer,
    special_tokens: Mapping[str, str],
    model_config: Mapping[str, object],
) -> Iterator[int]:
    token_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    if token_id is not None:
        yield token_id
    generation_config = checkpoint / "generation_config.json"
    for path, value in (
        (generation_config, _read_object(generation_config).get("eos_token_id")),
        (checkpoint / "config.json", _config_value(model_config, "eos_token_id")),
    ):
        for eos_id in value if isinstance(value, list) else [value]:
            if type(eos_id) is int:
                yield eos_id
            elif eos_id is not None:
                raise CheckpointError(
                    path, f"eos_token_id must be a token id or a list of them, is {value!r}"
                )


def _config_value(model_config: Mapping[str, object], key: str) -> object:
    """Return a value of config.json, or of its ``text_config`` (in multimodal models)."""
    text = model_config.get("text_config")
    nested_value = text.get(key) if isinstance(text, dict) else None
    return model_config.get(key, nested_value)


def _positive_integer(checkpoint: Path, model_config: Mapping[str, object], key: str) -> int | None:
    value = _config_value(model_config, key)
    if value is not None and (type(value) is not int or value < 1):
        message = f"{key} must be a whole number of at least 1, was {value!r}"
        raise CheckpointError(checkpoint / "config.json", message)
    return value


def _length_limit(length: object) -> int | None:
    """Return ``model_max_length`` as an integer; None if it is no positive number or means no limit."""
    return int(length) if isinstance(length, int | float) and 0 < length < _NO_LIMIT else None
