"""Rebuilds the tokenizer of a GGUF file with the `tokenizers` library.

If the file contains a ``tokenizer.json`` (metadata ``tokenizer.huggingface.json``), this tokenizer is used.
Otherwise, three kinds are supported: byte-level BPE with a list of merges (``gpt2``), and SentencePiece BPE
with a list of merges (``gemma4``) or with scores (``llama``), from which the merges are derived. A ``gpt2``
file contains the name of the pre-tokenizer but not its pattern. A name is supported if the published
tokenizer files of a model contain its pattern. Other names are errors, because a similar pattern would
silently produce wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from penstock.errors import CheckpointError
from penstock.weights.gguf import GGUFFile

_HINT = "put the model's tokenizer.json in the same folder"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # token types
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
"""Control tokens that end a turn, for older files that do not set ``eot_token_id``."""
_GEMMA4_TURN_ENDS = ("<turn|>", "<|tool_response>")
"""Tokens that end a turn of Gemma 4. Files list at most one, and their types are not always control.
"""


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """The tokenizer of a GGUF file, with its special tokens and templates."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # name in chat templates -> token, such as "eos_token" -> "</s>"
    templates: dict[str, str]  # chat templates: name -> Jinja text
    eos_token_ids: tuple[int, ...]


def read_gguf_tokenizer(path: Path, tokenizer: Tokenizer | None = None) -> GGUFTokenizer:
    """Return the tokenizer of a GGUF file.

    Args:
        path: the GGUF file.
        tokenizer: a tokenizer to use instead of rebuilding one. Each of its tokens must have the same id in
            the file. In this comparison, SentencePiece's ``▁`` (U+2581) equals a space.

    Raises:
        CheckpointError: the file has no tokenizer, its tokenizer is unsupported or damaged, or the tokens
            of ``tokenizer`` differ.
    """
    file = GGUFFile(path)
    tokens = _read_strings(file, "tokenizer.ggml.tokens")
    if tokenizer is not None:
        _check_same_tokens(path, tokens, tokenizer)
    return GGUFTokenizer(
        tokenizer or _build_tokenizer(file, tokens),
        dict(_special_tokens(file, tokens)),
        dict(_templates(file)),
        tuple(dict.fromkeys(_eos_token_ids(file, tokens))),
    )


def _check_same_tokens(path: Path, tokens: list[str], tokenizer: Tokenizer) -> None:
    """Raise a `CheckpointError` unless each token of ``tokenizer`` has the same id in ``tokens``."""
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        # In user-defined tokens, a space is stored either as a space or as SentencePiece's mark for it.
        if token_id >= len(tokens) or tokens[token_id].replace("▁", " ") != token.replace("▁", " "):
            file_token = repr(tokens[token_id]) if token_id < len(tokens) else "missing"
            raise CheckpointError(
                path.with_name("tokenizer.json"),
                f"is not the tokenizer of {path.name}: token {token_id} is {token!r}, but {file_token} in "
                "the GGUF file",
            )


def _build_tokenizer(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    tokenizer_json = file.metadata.get("tokenizer.huggingface.json")
    if isinstance(tokenizer_json, str):
        try:
            return Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises Exception itself for all errors
            raise CheckpointError(
                file.path, f"tokenizer.huggingface.json cannot be read as a tokenizer: {error}"
            ) from error
    model = file.metadata.get("tokenizer.ggml.model")
    if model not in _BUILDERS:
        raise CheckpointError(
            file.path,
            f"has a tokenizer of the unsupported kind {model!r} (supported: {', '.join(_BUILDERS)}): {_HINT}",
        )
    types = _read_numbers(file, "tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(file.path, f"has {len(tokens)} tokens, but types for {len(types)}")
    padding_ids = {i for i, token in enumerate(tokens) if types[i] == _UNUSED and token == f"[PAD{i}]"}
    vocabulary = {token: i for i, token in enumerate(tokens) if i not in padding_ids}
    if len(vocabulary) + len(padding_ids) < len(tokens):
        raise CheckpointError(file.path, f"has a token twice: {_HINT}")
    tokenizer = _BUILDERS[str(model)](file, vocabulary, types)
    tokenizer.add_special_tokens(
        [_added_token(token) for token, i in vocabulary.items() if types[i] in (_CONTROL, _UNKNOWN)]
    )
    tokenizer.add_tokens(
        [_added_token(token) for token, i in vocabulary.items() if types[i] == _USER_DEFINED]
    )
    _add_bos_and_eos(file, tokenizer, tokens)
    return tokenizer


def _added_token(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _read_merges(file: GGUFFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a file, in order.

    Raises:
        CheckpointError: the parts or the result of a merge are not tokens.
    """
    merges = []
    for line in _read_strings(file, "tokenizer.ggml.merges", is_optional=True):
        # Tokens contain no space: the vocabulary has another character for it. So the first space separates
        # the two tokens.
        left, _, right = line.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(
                file.path, f"has the merge {line!r}, but its parts or its result are not tokens"
            )
        merges.append((left, right))
    return merges


def _byte_level(file: GGUFFile, vocabulary: Mapping[str, int], types: Sequence[float]) -> Tokenizer:
    """Return a byte-level BPE tokenizer, which represents each byte by a printable character."""
    splitter = _splitter(file)
    merges = _read_merges(file, vocabulary)
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), merges, ignore_merges=splitter.ignore_merges))
    if splitter.uses_nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern == _DIGITS
        else pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in splitter.patterns
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter.uses_gpt2_pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, vocabulary: Mapping[str, int], types: Sequence[float]) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer, which merges the adjacent pair with the highest score first."""
    scores = _read_numbers(file, "tokenizer.ggml.scores")
    if len(scores) != len(types):
        raise CheckpointError(file.path, f"has {len(types)} tokens, but scores for {len(scores)}")
    pieces = {token: i for token, i in vocabulary.items() if types[i] == _NORMAL}
    merges = [
        (-scores[token_id], -left_length, token[:left_length], token[left_length:])
        for token, token_id in pieces.items()
        for left_length in range(1, len(token))
        if token[:left_length] in pieces and token[left_length:] in pieces
    ]
    merges.sort()  # by descending score; merges to the same token by descending length of the left part
    adds_prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    return _piece_tokenizer(vocabulary, types, [(left, right) for _, _, left, right in merges], adds_prefix)


def _sentencepiece_with_merges(
    file: GGUFFile, vocabulary: Mapping[str, int], types: Sequence[float]
) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer whose merges are listed in the file, as in Gemma 4."""
    adds_prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", False))
    return _piece_tokenizer(vocabulary, types, _read_merges(file, vocabulary), adds_prefix)


def _piece_tokenizer(
    vocabulary: Mapping[str, int],
    types: Sequence[float],
    merges: Sequence[tuple[str, str]],
    adds_prefix: bool,
) -> Tokenizer:
    """Return a BPE tokenizer that represents a space by ``▁`` and unknown characters by bytes.

    With ``adds_prefix``, a space is added before the text.
    """
    unknown_token = next((token for token, i in vocabulary.items() if types[i] == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(dict(vocabulary), list(merges), unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if adds_prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_prefix else steps)
    return tokenizer


_BUILDERS: Mapping[str, Callable[[GGUFFile, Mapping[str, int], Sequence[float]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _sentencepiece_with_merges,
}
"""``tokenizer.ggml.model`` -> function that builds the tokenizer from tokens and token types."""

_DIGITS = "digits"  # instead of a pattern: each digit is a word
_GPT4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitter:
    """How a pre-tokenizer splits text into words before merges are applied."""

    patterns: tuple[str, ...] = ()
    uses_gpt2_pattern: bool = False
    """Whether the results of ``patterns`` are split further by GPT-2's pattern."""
    ignore_merges: bool = False
    """Whether a word that is in the vocabulary becomes one token without applying merges."""
    uses_nfc: bool = False
    """Whether text is normalized to NFC first."""
    adds_bos: bool = False
    """Whether BOS is added if the file does not set ``add_bos_token``."""


_LLAMA3 = _Splitter((_GPT4_PATTERN,), ignore_merges=True, adds_bos=True)
_QWEN2 = _Splitter((_GPT4_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),), uses_nfc=True)
_DIGIT_BY_DIGIT = _Splitter((_DIGITS,), uses_gpt2_pattern=True)
_SPLITTERS = {
    "gpt-2": _Splitter(uses_gpt2_pattern=True),
    "gpt2": _Splitter(uses_gpt2_pattern=True),
    "phi-2": _Splitter(uses_gpt2_pattern=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
    "refact": _DIGIT_BY_DIGIT,
    "dbrx": _Splitter((_GPT4_PATTERN,)),
    "gpt-4o": _Splitter((_GPT4O_PATTERN,)),
    "tekken": _Splitter((_TEKKEN_PATTERN,), ignore_merges=True, adds_bos=True),
}


def _splitter(file: GGUFFile) -> _Splitter:
    name = file.metadata.get("tokenizer.ggml.pre")
    if name not in _SPLITTERS:
        raise CheckpointError(
            file.path,
            f"has the unknown pre-tokenizer {name!r} (known: {', '.join(_SPLITTERS)}): {_HINT}",
        )
    return _SPLITTERS[name]


def _add_bos_and_eos(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Configure the tokenizer to add the BOS and EOS tokens that the file requests.

    If the file does not set ``add_bos_token``, BOS is added for ``llama``, and for ``gpt2`` if the
    pre-tokenizer has `_Splitter.adds_bos`. For ``gemma4``, BOS is always added.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token")
    if adds_bos is None:
        adds_bos = kind != "gpt2" or _splitter(file).adds_bos
    if kind == "gemma4":  # older files set false, but the models need BOS
        adds_bos = True
    token_ids = {}
    if adds_bos:
        token_ids["bos"] = _token_id(file, tokens, "bos_token_id")
    if file.metadata.get("tokenizer.ggml.add_eos_token"):
        token_ids["eos"] = _token_id(file, tokens, "eos_token_id")
    tokens_and_ids = {name: (tokens[i], i) for name, i in token_ids.items() if i is not None}
    if tokens_and_ids:
        bos, eos = tokens_and_ids.get("bos"), tokens_and_ids.get("eos")
        template = [*([bos[0]] if bos else []), "$A", *([eos[0]] if eos else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template,
            pair=[*template, "$B:1"],
            special_tokens=list(dict(tokens_and_ids.values()).items()),
        )


def _token_id(file: GGUFFile, tokens: list[str], name: str) -> int | None:
    """Return the token id under ``tokenizer.ggml.<name>``; None if the key is missing or names no token."""
    token_id = file.metadata.get(f"tokenizer.ggml.{name}")
    # Some programs write 2**32 - 1 for a token that does not exist.
    if token_id is None or token_id == 2**32 - 1:
        return None
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise CheckpointError(
            file.path,
            f"tokenizer.ggml.{name} must be a whole number from 0 to {len(tokens) - 1}; it is {token_id!r}",
        )
    return token_id


def _special_tokens(file: GGUFFile, tokens: list[str]) -> Iterator[tuple[str, str]]:
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(file, tokens, f"{key}_token_id")
        if token_id is not None:
            yield f"{name}_token", tokens[token_id]


def _eos_token_ids(file: GGUFFile, tokens: list[str]) -> Iterator[int]:
    eos, eot, eom = (_token_id(file, tokens, f"{name}_token_id") for name in ("eos", "eot", "eom"))
    yield from (token_id for token_id in (eos, eot, eom) if token_id is not None)
    if file.metadata.get("tokenizer.ggml.model") == "gemma4":
        yield from (token_id for token_id, token in enumerate(tokens) if token in _GEMMA4_TURN_ENDS)
    if eot is None:
        types = _read_numbers(file, "tokenizer.ggml.token_type")
        yield from (
            token_id
            for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=False))
            if token_type == _CONTROL and token in _TURN_ENDS
        )


def _templates(file: GGUFFile) -> Iterator[tuple[str, str]]:
    default = file.metadata.get("tokenizer.chat_template")
    if isinstance(default, str):
        yield "default", default
    for name in file.array("tokenizer.chat_templates"):
        template = file.metadata.get(f"tokenizer.chat_template.{name}")
        if isinstance(template, str):
            yield str(name), template


def _read_strings(file: GGUFFile, key: str, *, is_optional: bool = False) -> list[str]:
    elements = file.array(key)
    texts = [element for element in elements if isinstance(element, str)]
    if len(texts) < len(elements) or (not texts and not is_optional):
        raise CheckpointError(file.path, f"has no {key}: {_HINT}")
    return texts


def _read_numbers(file: GGUFFile, key: str) -> list[float]:
    return [number for number in file.array(key) if isinstance(number, int | float)]
