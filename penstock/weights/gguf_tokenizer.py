"""The tokenizer in a GGUF file, rebuilt for the `tokenizers` library.

Two kinds are read: byte-level BPE with its merges (``gpt2``), and SentencePiece's BPE by scores (``llama``),
whose merges follow from the scores. How text is split before merging is in the file by name alone; the names
known here are those whose pattern the models' own tokenizer files publish, and others are refused: a
near miss would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

_HINT = "put the model's own tokenizer.json beside the file"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
"""Control tokens that end a turn, for older files that do not say which one does."""


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """What a GGUF file says of its tokenizer."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # by the name that templates use: "eos_token" -> "</s>"
    templates: dict[str, str]  # Jinja text by name
    eos_token_ids: tuple[int, ...]


def read_gguf_tokenizer(path: Path, tokenizer: Tokenizer | None = None) -> GGUFTokenizer:
    """Reads the tokenizer of a GGUF file.

    Args:
        path: the file.
        tokenizer: the model's own, which nothing is then rebuilt for; its ids must be those of the file.

    Raises:
        CheckpointError: there is none, it is of a kind that cannot be rebuilt, damaged, or not the one given.
    """
    file = GGUFFile(path)
    tokens = _texts(file, "tokenizer.ggml.tokens")
    if tokenizer is not None:
        _check_same_tokens(path, tokens, tokenizer)
    return GGUFTokenizer(
        tokenizer or _tokenizer(file, tokens),
        dict(_special_tokens(file, tokens)),
        dict(_templates(file)),
        tuple(dict.fromkeys(_eos_token_ids(file, tokens))),
    )


def _check_same_tokens(path: Path, tokens: list[str], tokenizer: Tokenizer) -> None:
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        # A space and a word's mark of it stand for each other in tokens that a user defined.
        if token_id >= len(tokens) or tokens[token_id].replace("▁", " ") != token.replace("▁", " "):
            there = repr(tokens[token_id]) if token_id < len(tokens) else "nothing"
            raise CheckpointError(
                path.with_name("tokenizer.json"),
                f"is not the tokenizer of {path.name}: token {token_id} is {token!r} here and {there} there",
            )


def _tokenizer(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    whole = file.metadata.get("tokenizer.huggingface.json")
    if isinstance(whole, str):
        try:
            return Tokenizer.from_str(whole)
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(
                file.path, f"tokenizer.huggingface.json is no tokenizer: {error}"
            ) from error
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(file.path, f"its tokenizer is of kind {kind!r}, not gpt2 or llama: {_HINT}")
    types = file.array("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(file.path, f"has {len(tokens)} tokens, and types for {len(types)}")
    filled = {i for i, token in enumerate(tokens) if types[i] == _UNUSED and token == f"[PAD{i}]"}
    vocabulary = {token: i for i, token in enumerate(tokens) if i not in filled}
    if len(vocabulary) + len(filled) < len(tokens):
        raise CheckpointError(file.path, f"has a token twice: {_HINT}")
    build = _byte_level if kind == "gpt2" else _by_scores
    tokenizer = build(file, vocabulary, types)
    tokenizer.add_special_tokens(
        [_added(token) for token, i in vocabulary.items() if types[i] in (_CONTROL, _UNKNOWN)]
    )
    tokenizer.add_tokens([_added(token) for token, i in vocabulary.items() if types[i] == _USER_DEFINED])
    _add_ends(file, tokenizer, tokens)
    return tokenizer


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _byte_level(file: GGUFFile, vocabulary: Mapping[str, int], types: list[int]) -> Tokenizer:
    """BPE on bytes that are written as letters."""
    splitter = _splitter(file)
    merges = []
    for line in _texts(file, "tokenizer.ggml.merges", may_lack=True):
        # The first character may be the space itself in no vocabulary: it is written as a letter.
        left, _, right = line.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(file.path, f"has the merge {line!r}, of which some part is no token")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), merges, ignore_merges=splitter.ignore_merges))
    if splitter.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    split = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern == _DIGITS
        else pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in splitter.patterns
    ]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter.then_as_gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _by_scores(file: GGUFFile, vocabulary: Mapping[str, int], types: list[int]) -> Tokenizer:
    """SentencePiece's BPE: of all neighbours those are joined first whose piece scores highest."""
    scores = file.array("tokenizer.ggml.scores")
    if len(scores) != len(types):
        raise CheckpointError(file.path, f"has {len(types)} tokens, and scores for {len(scores)}")
    pieces = {token: i for token, i in vocabulary.items() if types[i] == _NORMAL}
    joined = [
        (-scores[i], -cut, token[:cut], token[cut:])
        for token, i in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    joined.sort()  # of the ways to make a piece, first the one that would be found first in a text
    unknown = next((token for token, i in vocabulary.items() if types[i] == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            dict(vocabulary),
            [(left, right) for _, _, left, right in joined],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    mark = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark]) if has_prefix else mark
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if has_prefix else back)
    return tokenizer


_DIGITS = "digits"
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitter:
    """How text is split into what merges happen in."""

    patterns: tuple[str, ...] = ()
    then_as_gpt2: bool = False
    ignore_merges: bool = False
    """Whether a split that is a token is one, whatever merges would make of it."""
    is_composed: bool = False
    """Whether text is brought to Unicode's composed form first."""
    adds_bos: bool = False
    """Whether a text starts with a token of its own where the file does not say."""


_LLAMA3 = _Splitter((_GPT4,), ignore_merges=True, adds_bos=True)
_QWEN2 = _Splitter((_GPT4.replace(r"\p{N}{1,3}", r"\p{N}"),), is_composed=True)
_DIGIT_BY_DIGIT = _Splitter((_DIGITS,), then_as_gpt2=True)
_SPLITTERS = {
    "gpt-2": _Splitter(then_as_gpt2=True),
    "gpt2": _Splitter(then_as_gpt2=True),
    "phi-2": _Splitter(then_as_gpt2=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
    "refact": _DIGIT_BY_DIGIT,
    "dbrx": _Splitter((_GPT4,)),
    "gpt-4o": _Splitter((_GPT4O,)),
    "tekken": _Splitter((_TEKKEN,), ignore_merges=True, adds_bos=True),
}


def _splitter(file: GGUFFile) -> _Splitter:
    name = file.metadata.get("tokenizer.ggml.pre")
    if name not in _SPLITTERS:
        raise CheckpointError(
            file.path,
            f"its tokenizer splits text in a way called {name!r} (known: {', '.join(_SPLITTERS)}): {_HINT}",
        )
    return _SPLITTERS[name]


def _add_ends(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """The tokens that every text starts and ends with."""
    is_spm = file.metadata.get("tokenizer.ggml.model") == "llama"
    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token")
    if adds_bos is None:
        adds_bos = is_spm or _splitter(file).adds_bos
    ends = {}
    if adds_bos:
        ends["bos"] = _token_id(file, tokens, "bos_token_id")
    if file.metadata.get("tokenizer.ggml.add_eos_token"):
        ends["eos"] = _token_id(file, tokens, "eos_token_id")
    known = {name: (tokens[i], i) for name, i in ends.items() if i is not None}
    if known:
        first, last = known.get("bos"), known.get("eos")
        template = [*([first[0]] if first else []), "$A", *([last[0]] if last else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=[*template, "$B:1"], special_tokens=list(dict(known.values()).items())
        )


def _token_id(file: GGUFFile, tokens: list[str], name: str) -> int | None:
    token_id = file.metadata.get(f"tokenizer.ggml.{name}")
    if token_id is None or token_id == 2**32 - 1:  # how some writers say none
        return None
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise CheckpointError(
            file.path,
            f"tokenizer.ggml.{name} must be below {len(tokens)}, the number of tokens, is {token_id!r}",
        )
    return token_id


def _special_tokens(file: GGUFFile, tokens: list[str]) -> Iterator[tuple[str, str]]:
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(file, tokens, f"{key}_token_id")
        if token_id is not None:
            yield f"{name}_token", tokens[token_id]


def _eos_token_ids(file: GGUFFile, tokens: list[str]) -> Iterator[int]:
    ends = [_token_id(file, tokens, f"{name}_token_id") for name in ("eos", "eot", "eom")]
    yield from (token_id for token_id in ends if token_id is not None)
    if ends[1] is None:
        types = file.array("tokenizer.ggml.token_type")
        yield from (
            token_id
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _CONTROL and token in _TURN_ENDS
        )


def _templates(file: GGUFFile) -> Iterator[tuple[str, str]]:
    default = file.metadata.get("tokenizer.chat_template")
    if isinstance(default, str):
        yield "default", default
    for name in file.array("tokenizer.chat_templates"):
        template = file.metadata.get(f"tokenizer.chat_template.{name}")
        if isinstance(template, str):
            yield str(name), template


def _texts(file: GGUFFile, key: str, *, may_lack: bool = False) -> list[str]:
    texts = file.array(key)
    if not texts and may_lack:
        return []
    if not texts or not isinstance(texts[0], str):  # the format has arrays of one type
        raise CheckpointError(file.path, f"has no {key}: {_HINT}")
    return texts
