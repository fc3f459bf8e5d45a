"""The language model of the demo voice: a small Llama that generates speech codes, as NeuTTS does."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from train_demo_model import Model, ModelSizes, learning_rate, make_optimizer

from .codec import NUM_CODES

TASK, ANSWER = "user: Convert the text to speech:", "\nassistant:"
TEXT_START, TEXT_END = "<|TEXT_PROMPT_START|>", "<|TEXT_PROMPT_END|>"
SPEECH_START, SPEECH_END = "<|SPEECH_GENERATION_START|>", "<|SPEECH_GENERATION_END|>"
_CHARACTERS = " abcdefghijklmnopqrstuvwxyz0123456789.,?!'-:;\n"
_BATCH_ROWS = 16
_MAX_SHORT_ROW = 135  # rows below this length are short
_SHORT_ROW_FRACTION = 0.12  # share of the training time at the beginning in which only short rows are used
_NUM_HELD_OUT = 200

Row = tuple[int, list[int]]
"""The number of prompt tokens, and all tokens."""


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per character, per speech code and per fixed part of the prompt."""
    vocabulary = {"<unk>": 0} | {character: index for index, character in enumerate(_CHARACTERS, 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (TASK, ANSWER)])
    special = [TEXT_START, TEXT_END, SPEECH_START, SPEECH_END]
    special += [f"<|speech_{code}|>" for code in range(NUM_CODES)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def make_sizes(tokenizer: Tokenizer) -> ModelSizes:
    """Return the sizes of the model. The vocabulary is rounded up to a multiple of 64."""
    return ModelSizes(
        vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64,
        hidden_size=192,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=48,
        mlp_size=512,
        max_positions=1024,
    )


def prompt_text(text: str) -> str:
    """Return the prompt of a text, in the format of NeuTTS."""
    return f"{TASK}{TEXT_START}{text}{TEXT_END}{ANSWER}{SPEECH_START}"


def make_rows(tokenizer: Tokenizer, texts: Sequence[str], codes: Sequence[Tensor]) -> list[Row]:
    """Return the rows of texts: the tokens of the prompt, the codes of the speech, and the end token."""
    first = tokenizer.token_to_id("<|speech_0|>")
    end = tokenizer.token_to_id(SPEECH_END)
    rows = []
    for text, speech in zip(texts, codes, strict=True):
        prompt = tokenizer.encode(prompt_text(text), add_special_tokens=False).ids
        rows.append((len(prompt), [*prompt, *(speech.long() + first).tolist(), end]))
    return rows


def batch_loss(model: Model, rows: Sequence[Row]) -> Tensor:
    """Return the mean cross entropy of the codes and the end token, without the prompt."""
    length = max(len(tokens) for _, tokens in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    weights = torch.zeros(len(rows), length)
    for index, (num_prompt, tokens) in enumerate(rows):
        ids[index, : len(tokens)] = torch.tensor(tokens)
        weights[index, num_prompt : len(tokens)] = 1
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    target_weights = weights[:, 1:].flatten()
    return (losses * target_weights).sum() / target_weights.sum()


def _epoch(rows: Sequence[Row], rng: random.Random) -> list[list[Row]]:
    """Return the batches of one epoch in random order. Rows of similar length are in the same batch."""
    order = list(rows)
    rng.shuffle(order)
    batches = []
    for start in range(0, len(order), 32 * _BATCH_ROWS):
        part = sorted(order[start : start + 32 * _BATCH_ROWS], key=lambda row: len(row[1]))
        batches += [part[index : index + _BATCH_ROWS] for index in range(0, len(part), _BATCH_ROWS)]
    rng.shuffle(batches)
    return batches


def train_language_model(
    model: Model,
    rows: Sequence[Row],
    minutes: float,
    seed: int,
    *,
    peak_learning_rate: float = 2e-3,
    further_rows: Sequence[Row] = (),
) -> float:
    """Train for ``minutes`` and return the loss of held-out rows.

    Without ``further_rows``, the training begins with short rows.

    Args:
        model: the model, which is changed in place.
        rows: the rows. 200 of them are held out.
        minutes: the duration of the training.
        seed: the seed that selects the held-out rows and the order.
        peak_learning_rate: the largest learning rate.
        further_rows: further rows, which are not held out.
    """
    rng = random.Random(seed)
    training_rows = list(rows)
    rng.shuffle(training_rows)
    held_out, training_rows = training_rows[:_NUM_HELD_OUT], [*training_rows[_NUM_HELD_OUT:], *further_rows]
    optimizer = make_optimizer(model, peak_learning_rate)
    start_time, step, average, batches = time.perf_counter(), 0, 0.0, []
    while (seconds := time.perf_counter() - start_time) < 60 * minutes:
        fraction = seconds / (60 * minutes)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(fraction, peak_learning_rate)
        if not batches:
            is_early = not further_rows and fraction < _SHORT_ROW_FRACTION
            batches = _epoch(
                [row for row in training_rows if not is_early or len(row[1]) < _MAX_SHORT_ROW], rng
            )
        loss = batch_loss(model, batches.pop())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        average = loss.item() if step == 1 else 0.98 * average + 0.02 * loss.item()
        if step % 100 == 0:
            print(
                f"model step {step}  loss {average:.4f}  held-out {_measure(model, held_out[:100]):.4f}  "
                f"{seconds / 60:.1f} min",
                flush=True,
            )
    return _measure(model, held_out)


@torch.no_grad()
def _measure(model: Model, rows: Sequence[Row]) -> float:
    parts = [rows[start : start + _BATCH_ROWS] for start in range(0, len(rows), _BATCH_ROWS)]
    return sum(batch_loss(model, part).item() * len(part) for part in parts) / len(rows)
