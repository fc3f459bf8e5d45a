"""Tokenizers from GGUF metadata equal the original tokenizers. Invalid metadata is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from support.gguf_files import (
    add_metadata,
    read_sentencepiece,
    sentencepiece_metadata,
    tokenizer_metadata,
    write_and_close,
)
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from penstock.errors import CheckpointError
from penstock.pipelines import TextTokenizer
from penstock.text.tokenizer_files import read_tokenizer_files
from penstock.weights.gguf_tokenizer import read_gguf_tokenizer
from penstock.weights.hub import resolve_checkpoint

TEXTS = [
    "Hello world",
    "  two spaces,  and two more",
    "tabs\tand\nnewlines\n\n\n",
    "don't I'll THEY'RE",
    "1234567 89",
    "déjà vu ﬁ Å A\u030a e\u0301",
    "日本語テキスト",
    "😀 emoji 👩‍👩‍👧",
    "<|endoftext|>x<|im_start|>user\nhi<|im_end|><tool_call>{}</tool_call>",
    "",
    "   ",
    "a" * 50,
    "\r\n\r\n x",
    "x = {'a': [1, 2, 3]}  # c",
    "\u00a0nbsp ▁literal",
    "\x00\x01\x7f",
]


def write_gguf_file(folder: Path, metadata: dict[str, Any]) -> Path:
    """Write a GGUF file with a minimal model and the tokenizer of ``metadata``."""
    writer = GGUFWriter(folder / "m.gguf", "llama")
    sizes = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
    sizes["attention.head_count"] = 1
    add_metadata(writer, {f"llama.{key}": value for key, value in sizes.items()})
    writer.add_layer_norm_rms_eps(1e-5)
    add_metadata(writer, metadata)
    num_tokens = len(metadata.get("tokenizer.ggml.tokens", [0]))
    writer.add_tensor("token_embd.weight", np.zeros((num_tokens, 32), np.float32))
    write_and_close(writer)
    return folder / "m.gguf"


def assert_tokenizers_are_equal(actual: Tokenizer, reference: Tokenizer) -> None:
    for text in TEXTS:
        ids = reference.encode(text).ids
        assert actual.encode(text).ids == ids, text
        for skip in (True, False):
            assert actual.decode(ids, skip_special_tokens=skip) == reference.decode(
                ids, skip_special_tokens=skip
            )


def read_demo_tokenizer() -> dict[str, Any]:
    """Return tokenizer.json of the demo model with the pre-tokenizer of GPT-2."""
    tokenizer: dict[str, Any] = json.loads((resolve_checkpoint("demo") / "tokenizer.json").read_text())
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return tokenizer | {"pre_tokenizer": split}


def test_a_byte_level_tokenizer_equals_the_original(tmp_path: Path) -> None:
    tokenizer = read_demo_tokenizer()
    gguf_tokenizer = read_gguf_tokenizer(write_gguf_file(tmp_path, tokenizer_metadata(tokenizer, "gpt-2")))
    assert_tokenizers_are_equal(gguf_tokenizer.tokenizer, Tokenizer.from_str(json.dumps(tokenizer)))


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_published_byte_level_tokenizers_equal_the_originals(
    tmp_path: Path, shared_data: Path, name: str
) -> None:
    original_tokenizer = read_tokenizer_files(shared_data / "tokenizers" / name).tokenizer
    pre_tokenizer_name = {"gpt2": "gpt-2", "qwen3": "qwen2"}[name]
    vocabulary_size = {"gpt2": 50257, "qwen3": 151936}[name]
    file = write_gguf_file(
        tmp_path,
        tokenizer_metadata(json.loads(original_tokenizer.to_str()), pre_tokenizer_name, size=vocabulary_size),
    )
    assert_tokenizers_are_equal(read_gguf_tokenizer(file).tokenizer, original_tokenizer)


@pytest.mark.parametrize("name", ["llama2xs", "stories260K"])
def test_published_sentencepiece_models_equal_the_originals(
    tmp_path: Path, shared_data: Path, name: str
) -> None:
    folder = shared_data / "models" / name
    file = write_gguf_file(tmp_path, sentencepiece_metadata(read_sentencepiece(folder / "tokenizer.model")))
    gguf_tokenizer = read_gguf_tokenizer(file)
    assert_tokenizers_are_equal(gguf_tokenizer.tokenizer, Tokenizer.from_file(str(folder / "tokenizer.json")))
    assert gguf_tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert gguf_tokenizer.eos_token_ids == (2,)


def test_a_published_vocabulary_with_scores_equals_the_original(tmp_path: Path, shared_data: Path) -> None:
    """The scores are derived from the order of the merges in TinyLlama's tokenizer.json."""
    path = shared_data / "tokenizers" / "tinyllama" / "tokenizer.json"
    model = json.loads(path.read_text())["model"]
    scores: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        left_piece, right_piece = merge if isinstance(merge, list) else merge.split(" ")
        scores.setdefault(left_piece + right_piece, -float(rank))
    pieces = [(piece, scores.get(piece, -1e6)) for piece in sorted(model["vocab"], key=model["vocab"].get)]
    file = write_gguf_file(tmp_path, sentencepiece_metadata(pieces))
    assert_tokenizers_are_equal(read_gguf_tokenizer(file).tokenizer, Tokenizer.from_file(str(path)))


PIECES = [
    ("<unk>", 0.0),
    ("<s>", 0.0),
    ("</s>", 0.0),
    *((f"<0x{byte:02X}>", 0.0) for byte in range(256)),
    *((piece, -float(rank)) for rank, piece in enumerate(["▁a", "ab", "abc", "bc", "▁", "a", "b", "c"])),
]


def test_a_sentencepiece_tokenizer_with_merges_equals_the_original(tmp_path: Path) -> None:
    """Gemma 4's files list the merges. The scores contradict them and are not used."""
    merges = [("b", "c"), ("▁", "a"), ("a", "bc"), ("\n", "\n"), ("▁a", "bc")]
    vocabulary = {piece: index for index, (piece, _) in enumerate(PIECES)}
    for piece in ("\n", "\n\n", "▁abc", "<|turn>"):
        vocabulary[piece] = len(vocabulary)
    original_tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    original_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    original_tokenizer.decoder = decoders.Sequence(steps)
    original_tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|turn>"])
    original_tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=["<s>", "$A", "$B:1"], special_tokens=[("<s>", vocabulary["<s>"])]
    )
    metadata = sentencepiece_metadata([(piece, -float(index)) for piece, index in vocabulary.items()])
    metadata["tokenizer.ggml.token_type"][-1] = int(TokenType.CONTROL)
    metadata |= {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.add_bos_token": False,  # in older files; the models need BOS
    }
    gguf_tokenizer = read_gguf_tokenizer(write_gguf_file(tmp_path, metadata)).tokenizer
    assert_tokenizers_are_equal(gguf_tokenizer, original_tokenizer)
    assert gguf_tokenizer.encode("abc abc\n\n<|turn>é").tokens == [
        *("<s>", "abc", "▁abc", "\n\n", "<|turn>", "<0xC3>", "<0xA9>")
    ]


@pytest.mark.parametrize("eot", [None, 4])
def test_the_turn_ends_of_gemma_4_end_an_output_whatever_their_types(tmp_path: Path, eot: int | None) -> None:
    pieces = ["<unk>", "<s>", "</s>", "<|tool_response>", "<turn|>", "a"]
    metadata = sentencepiece_metadata([(piece, 0.0) for piece in pieces])
    metadata["tokenizer.ggml.model"] = "gemma4"
    if eot is not None:
        metadata["tokenizer.ggml.eot_token_id"] = eot
    assert set(read_gguf_tokenizer(write_gguf_file(tmp_path, metadata)).eos_token_ids) == {2, 3, 4}


class TestScores:
    """Tests of a small SentencePiece tokenizer with scores."""

    def encode(self, folder: Path, text: str, **settings: Any) -> list[str]:
        metadata = sentencepiece_metadata(PIECES) | {
            f"tokenizer.ggml.{key}": value for key, value in settings.items()
        }
        gguf_tokenizer = read_gguf_tokenizer(write_gguf_file(folder, metadata)).tokenizer
        assert gguf_tokenizer.decode(gguf_tokenizer.encode(text).ids) == text
        return gguf_tokenizer.encode(text).tokens

    def test_the_pair_with_the_highest_score_is_merged_first(self, tmp_path: Path) -> None:
        assert self.encode(tmp_path, "abc") == ["<s>", "▁a", "bc"]

    def test_without_add_space_prefix_no_space_is_added(self, tmp_path: Path) -> None:
        assert self.encode(tmp_path, "abc", add_space_prefix=False) == ["<s>", "abc"]
        assert self.encode(tmp_path, " a", add_space_prefix=False) == ["<s>", "▁a"]

    def test_special_tokens_in_a_text_are_recognized(self, tmp_path: Path) -> None:
        metadata = sentencepiece_metadata(PIECES)
        gguf_tokenizer = read_gguf_tokenizer(write_gguf_file(tmp_path, metadata)).tokenizer
        assert gguf_tokenizer.encode("<unk></s>").tokens == ["<s>", "<unk>", "</s>"]
        assert gguf_tokenizer.decode([1, 0, 2]) == ""

    def test_unknown_characters_are_encoded_as_bytes(self, tmp_path: Path) -> None:
        assert self.encode(tmp_path, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({"add_bos_token": False}, ["▁a"]),
            ({"add_eos_token": True}, ["<s>", "▁a", "</s>"]),
            ({"add_bos_token": False, "add_eos_token": True}, ["▁a", "</s>"]),
        ],
    )
    def test_settings_of_the_file_determine_bos_and_eos_tokens(
        self, tmp_path: Path, settings: dict[str, bool], expected: list[str]
    ) -> None:
        assert self.encode(tmp_path, "a", **settings) == expected

    def test_user_defined_tokens_are_matched_first(self, tmp_path: Path) -> None:
        metadata = sentencepiece_metadata([*PIECES, ("  ", -1000.0), ("abcab", -1000.0)])
        metadata["tokenizer.ggml.token_type"][-2:] = [int(TokenType.USER_DEFINED)] * 2
        metadata["tokenizer.ggml.add_space_prefix"] = False
        gguf_tokenizer = read_gguf_tokenizer(write_gguf_file(tmp_path, metadata)).tokenizer
        assert gguf_tokenizer.encode("c  abcab").tokens == ["<s>", "c", "  ", "abcab"]
        assert gguf_tokenizer.decode(gguf_tokenizer.encode("c  abcab").ids) == "c  abcab"


EXPECTED_SPLITS = {
    "gpt-2": ["It", "'s", " 12345", " I", "'", "LL", "!!", "\n\n ", " x"],
    "llama-bpe": ["It", "'s", " ", "123", "45", " I", "'LL", "!!\n\n", " ", " x"],
    "dbrx": ["It", "'s", " ", "123", "45", " I", "'LL", "!!\n\n", " ", " x"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "5", " I", "'LL", "!!\n\n", " ", " x"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", "5", " I", "'", "LL", "!!", "\n\n ", " x"],
    "gpt-4o": ["It's", " ", "123", "45", " I'LL", "!!\n\n", " ", " x"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", "5", " I", "'LL", "!!\n\n", " ", " x"],
}


@pytest.mark.parametrize("name", EXPECTED_SPLITS)
def test_the_pre_tokenizer_name_determines_the_splits_and_bos(tmp_path: Path, name: str) -> None:
    file = write_gguf_file(
        tmp_path, tokenizer_metadata(read_demo_tokenizer(), name) | {"tokenizer.ggml.bos_token_id": 1}
    )
    tokenizer = read_gguf_tokenizer(file).tokenizer
    assert tokenizer.pre_tokenizer is not None
    text = "It's 12345 I'LL!!\n\n  x"
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word in words] == EXPECTED_SPLITS[name]
    adds_bos = name in ("llama-bpe", "tekken")
    assert tokenizer.encode("a").ids[:1] == [1] if adds_bos else tokenizer.encode("a").ids[:1] != [1]


def test_ignore_merges_keeps_words_that_are_tokens(tmp_path: Path) -> None:
    tokenizer = read_demo_tokenizer()
    tokenizer["model"]["vocab"]["zqz"] = 2048
    for name, is_one_token in (("llama-bpe", True), ("qwen2", False)):
        gguf_tokenizer = read_gguf_tokenizer(
            write_gguf_file(tmp_path, tokenizer_metadata(tokenizer, name))
        ).tokenizer
        assert (gguf_tokenizer.encode("zqz").ids == [2048]) is is_one_token


class TestTokenizerJson:
    """A tokenizer.json in the folder of the GGUF file has precedence."""

    def write_folder(self, folder: Path, **changes: Any) -> Path:
        tokenizer = read_demo_tokenizer()
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        settings = {"eos_token": "<|im_end|>", "chat_template": "from the folder"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return write_gguf_file(folder, tokenizer_metadata(tokenizer, "martian") | changes)

    def test_tokenizer_json_has_precedence(self, tmp_path: Path) -> None:
        metadata = {"tokenizer.chat_template": "from GGUF", "tokenizer.ggml.eos_token_id": 0}
        file = self.write_folder(tmp_path, **metadata, **{"tokenizer.ggml.bos_token_id": 1})
        files = read_tokenizer_files(file)
        assert_tokenizers_are_equal(files.tokenizer, Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
        assert files.templates == {"default": "from the folder"}
        assert files.eos_token_ids == (2, 0)
        assert files.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

    def test_a_tokenizer_of_another_model_is_refused(self, tmp_path: Path) -> None:
        tokens = tokenizer_metadata(read_demo_tokenizer(), "gpt-2")["tokenizer.ggml.tokens"]
        tokens[700] = "other"
        file = self.write_folder(tmp_path, **{"tokenizer.ggml.tokens": tokens})
        with pytest.raises(
            CheckpointError, match=r"not the tokenizer of m\.gguf: token 700 is .*, but 'other'"
        ):
            read_tokenizer_files(file)

    def test_a_tokenizer_with_more_tokens_than_the_file_is_refused(self, tmp_path: Path) -> None:
        tokens = tokenizer_metadata(read_demo_tokenizer(), "gpt-2")["tokenizer.ggml.tokens"]
        file = self.write_folder(tmp_path, **{"tokenizer.ggml.tokens": tokens[:-1]})
        with pytest.raises(CheckpointError, match="token 2047 is '</tool_call>', but missing"):
            read_tokenizer_files(file)


def test_a_complete_tokenizer_in_the_metadata_is_used(tmp_path: Path) -> None:
    tokenizer = read_demo_tokenizer()
    metadata = tokenizer_metadata(tokenizer, "martian") | {
        "tokenizer.huggingface.json": json.dumps(tokenizer)
    }
    assert_tokenizers_are_equal(
        read_gguf_tokenizer(write_gguf_file(tmp_path, metadata)).tokenizer,
        Tokenizer.from_str(json.dumps(tokenizer)),
    )


def test_special_tokens_templates_and_limits_are_read(tmp_path: Path) -> None:
    metadata = tokenizer_metadata(read_demo_tokenizer(), "gpt-2", size=2050) | {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eom_token_id": 5,
        "tokenizer.ggml.padding_token_id": 2**32 - 1,  # the value that some writers use for "none"
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "T",
    }
    files = read_tokenizer_files(write_gguf_file(tmp_path, metadata))
    assert files.eos_token_ids == (0, 5, 2), "<|im_end|> (2) is an EOS token if the file has no eot_token_id"
    assert files.special_tokens == {"eos_token": "<|endoftext|>"}
    assert files.templates == {"default": "{{ messages[0].content }}", "tool_use": "T"}
    assert (files.vocab_size, files.max_length) == (2050, 64)
    tokenizer = TextTokenizer(tmp_path / "m.gguf")
    assert tokenizer.vocab_size == 2050
    assert tokenizer.eos == 0
    with_eot = metadata | {"tokenizer.ggml.eot_token_id": 7}
    assert read_tokenizer_files(write_gguf_file(tmp_path, with_eot)).eos_token_ids == (0, 7, 5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"tokenizer.ggml.model": "bert"},
            "of the unsupported kind 'bert' .supported: gpt2, llama, gemma4.: put the model's tokenizer.json",
        ),
        (
            {"tokenizer.ggml.pre": "default"},
            "unknown pre-tokenizer 'default' .known: gpt-2.*put the model's tokenizer.json",
        ),
        ({"tokenizer.ggml.pre": None}, "unknown pre-tokenizer None"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "has 2048 tokens, but types for 2"),
        (
            {"tokenizer.ggml.merges": ["a nowhere"]},
            "has the merge 'a nowhere', but its parts or its result are not tokens",
        ),
        (
            {"tokenizer.ggml.eos_token_id": 2048},
            "eos_token_id must be a whole number from 0 to 2047; it is 2048",
        ),
        ({"tokenizer.ggml.model": "llama"}, "has 2048 tokens, but scores for 0"),
        ({"tokenizer.huggingface.json": "{}"}, "tokenizer.huggingface.json cannot be read as a tokenizer"),
    ],
)
def test_invalid_metadata_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    metadata = tokenizer_metadata(read_demo_tokenizer(), "gpt-2") | changes
    file = write_gguf_file(tmp_path, {key: value for key, value in metadata.items() if value is not None})
    with pytest.raises(CheckpointError, match=problem) as error:
        read_tokenizer_files(file)
    assert str(error.value).startswith(str(file))


def test_a_duplicate_token_is_refused(tmp_path: Path) -> None:
    metadata = tokenizer_metadata(read_demo_tokenizer(), "gpt-2")
    metadata["tokenizer.ggml.tokens"][900] = metadata["tokenizer.ggml.tokens"][800]
    with pytest.raises(CheckpointError, match="has a token twice"):
        read_tokenizer_files(write_gguf_file(tmp_path, metadata))
