"""Measure the cost of each feature. Runs with and without the feature alternate (A B A B).

    python benchmarks/features.py                          # a Llama with 134 M random parameters, bfloat16
    python benchmarks/features.py --only steps --batch 1 --encoding int8 --pairs 9
    python benchmarks/features.py --only lora grammar --batch 1 32 --json out.json

A run generates 32 tokens for each of ``--batch`` prompts of 128 tokens. Unless the list states otherwise,
sampling is greedy, end of sequence is ignored, and the prefix cache is off.

    sampling       temperature, top-p, three penalties, a logit bias
    logprobs       log probabilities of each generated token and of five alternatives
    echo           like logprobs, plus log probabilities of the prompt tokens and of five alternatives
    grammar        a JSON schema: an array of at least 10,000 integers, so that no answer ends early
    lora           each prompt uses one of four adapters of rank 16 on all linear layers
    n              four answers per prompt, compared with four times as many prompts;
                   temperature 1.0, prefix cache on
    beams          four beams, compared with four times as many prompts
    prefix         a repeated prompt, compared with its first run; one new token, prefix cache on
    steps          several decode steps per scheduler call (the default), compared with one step per call

The cost is the time with the feature divided by the time without it: 1.00 means no cost. The cost is printed
as the median of the pairs, with the lowest and highest value. The machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from against_transformers import VOCAB_SIZE, describe_machine, measure_seconds
from safetensors.numpy import save_file

from penstock import LLM, SamplingParams
from penstock.bench.random_weights import SHAPES, write_random_checkpoint
from penstock.pipelines.core import Grammar

PROMPT_LENGTH, NUM_NEW_TOKENS, LORA_RANK, NUM_ANSWERS = 128, 32, 16, 4
GREEDY: dict[str, Any] = {"max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True, "detokenize": False}
ARRAY_GRAMMAR = Grammar(
    "json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 10_000})
)
Run = Callable[[int], Any]
"""Generates tokens for random prompts. The argument is the seed of the prompts."""


@dataclass(frozen=True)
class ModelSource:
    """The checkpoint on which features are measured."""

    folder: str
    shape: str
    encoding: str

    def llm(self, **config: Any) -> LLM:
        """Load the model with extra configuration."""
        return LLM(self.folder, quantization_encoding=self.encoding, **config)

    @cache  # noqa: B019  # the process has one ModelSource
    def shared_llm(self) -> LLM:
        """Return the model with the prefix cache off. The first call loads it."""
        return self.llm(enable_prefix_caching=False)


def main() -> None:
    """Measure the selected features. Prints each row, and rewrites the JSON report, after its runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="l110m")
    parser.add_argument("--encoding", default="bfloat16")
    parser.add_argument("--only", nargs="+", choices=list(FEATURES), default=list(FEATURES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder), SHAPES[options.shape])
        write_tokenizer(Path(folder))
        report: dict[str, Any] = {
            "machine": describe_machine(),
            "shape": options.shape,
            "encoding": options.encoding,
            "pairs": options.pairs,
            "rows": [],
        }
        print(f"{report['machine']}\n{options.shape}, {options.encoding}, {options.pairs} pairs", flush=True)
        source = ModelSource(folder, options.shape, options.encoding)
        for name in options.only:
            for batch in options.batch:
                row = compare(name, source, batch, options.pairs)
                report["rows"].append(row)
                spread = f"{row['lowest']:.2f} to {row['highest']:.2f}"
                print(
                    f"{name:14} batch {batch:2}  x{row['cost']:.2f} ({spread}), without {row['plain']:.2f} s",
                    flush=True,
                )
                if options.json:
                    options.json.write_text(json.dumps(report, indent=2))


def compare(name: str, source: ModelSource, batch: int, num_pairs: int) -> dict[str, Any]:
    """Run with and without a feature alternately, after one warm-up run of each. Returns the row to print."""
    run_without, run_with = FEATURES[name](source, batch)
    run_without(0), run_with(0)
    seconds = [
        (measure_seconds(partial(run_without, seed)), measure_seconds(partial(run_with, seed)))
        for seed in range(1, num_pairs + 1)
    ]
    ratios = [b / a for a, b in seconds]
    return {
        "feature": name,
        "batch": batch,
        "plain": statistics.median(a for a, _ in seconds),
        "cost": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def random_prompts(batch: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    tokens = np.random.default_rng(seed).integers(3, VOCAB_SIZE, (batch, PROMPT_LENGTH))
    return [[int(token) for token in row] for row in tokens]


def runs_with_options(params: dict[str, Any] | None = None, **options: Any) -> Callable[..., tuple[Run, Run]]:
    """Return a factory of the two runs for a feature that needs only sampling parameters or call options."""

    def make(source: ModelSource, batch: int) -> tuple[Run, Run]:
        llm = source.shared_llm()
        feature_params = SamplingParams(**{**GREEDY, **(params or {})})
        return (
            lambda seed: llm.generate(random_prompts(batch, seed), SamplingParams(**GREEDY), use_tqdm=False),
            lambda seed: llm.generate(random_prompts(batch, seed), feature_params, use_tqdm=False, **options),
        )

    return make


def lora_runs(source: ModelSource, batch: int) -> tuple[Run, Run]:
    """Return the runs whose prompts use no adapter, and one of four. All four are loaded in both runs."""
    names = [f"a{number}" for number in range(4)]
    shape = SHAPES[source.shape]
    paths = [write_adapter(Path(source.folder), name, shape, seed) for seed, name in enumerate(names)]
    adapters = [f"{name}={path}" for name, path in zip(names, paths, strict=True)]
    llm = source.llm(enable_prefix_caching=False, lora=adapters, max_lora_rank=LORA_RANK)
    params = SamplingParams(**GREEDY)
    adapter_names = [names[index % 4] for index in range(batch)]
    return (
        lambda seed: llm.generate(random_prompts(batch, seed), params, use_tqdm=False),
        lambda seed: llm.generate(random_prompts(batch, seed), params, use_tqdm=False, adapter=adapter_names),
    )


def several_answers_runs(source: ModelSource, batch: int) -> tuple[Run, Run]:
    """Return the runs with four times as many prompts, and with ``n=4``. The prefix cache is on."""
    llm = source.llm()
    params = SamplingParams(**{**GREEDY, "temperature": 1.0, "top_k": 0})
    # The two runs use different prompts. Otherwise the second run would hit the prefix cache.
    return (
        lambda seed: llm.generate(random_prompts(NUM_ANSWERS * batch, 1000 + seed), params, use_tqdm=False),
        lambda seed: llm.generate(random_prompts(batch, seed), params, use_tqdm=False, n=NUM_ANSWERS),
    )


def beam_search_runs(source: ModelSource, batch: int) -> tuple[Run, Run]:
    """Return the runs with four times as many prompts, and with four beams."""
    llm = source.shared_llm()
    options: Any = {
        "num_beams": NUM_ANSWERS,
        "max_new_tokens": NUM_NEW_TOKENS,
        "ignore_eos": True,
        "use_tqdm": False,
    }
    return (
        lambda seed: llm.generate(
            random_prompts(NUM_ANSWERS * batch, seed), SamplingParams(**GREEDY), use_tqdm=False
        ),
        lambda seed: llm.beam_search(random_prompts(batch, seed), **options),
    )


def prefix_cache_runs(source: ModelSource, batch: int) -> tuple[Run, Run]:
    """Return one function as both runs. Its second call with a seed finds the prompts in the prefix cache."""
    llm = source.llm()
    params = SamplingParams(**{**GREEDY, "max_new_tokens": 1})

    def run(seed: int) -> Any:
        return llm.generate(random_prompts(batch, seed), params, use_tqdm=False)

    return run, run


def multi_step_runs(source: ModelSource, batch: int) -> tuple[Run, Run]:
    """Return the runs with one decode step per scheduler call, and with several."""
    single_step = source.llm(enable_prefix_caching=False, max_num_steps=1)
    multi_step = source.shared_llm()
    params = SamplingParams(**GREEDY)
    return (
        lambda seed: single_step.generate(random_prompts(batch, seed), params, use_tqdm=False),
        lambda seed: multi_step.generate(random_prompts(batch, seed), params, use_tqdm=False),
    )


def write_adapter(folder: Path, name: str, shape: dict[str, int], seed: int) -> Path:
    """Write a PEFT directory with random matrices for every linear layer of a Llama model."""
    path = folder / name
    path.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_RANK, "target_modules": "all-linear"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    in_out_features = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(shape["num_hidden_layers"]):
        for linear, (num_inputs, num_outputs) in in_out_features.items():
            key = f"base_model.model.model.layers.{layer}.{linear}"
            tensors[f"{key}.lora_A.weight"] = random.standard_normal((LORA_RANK, num_inputs), np.float32)
            tensors[f"{key}.lora_B.weight"] = 0.01 * random.standard_normal(
                (num_outputs, LORA_RANK), np.float32
            )
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def write_tokenizer(folder: Path) -> None:
    """Write a BPE tokenizer without merges: one token per byte, then ``t0``, ``t1`` and so on.

    Grammars need tokens with text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"t{number}" for number in range(VOCAB_SIZE - len(letters))]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate([*letters, *words])}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


FEATURES: dict[str, Callable[[ModelSource, int], tuple[Run, Run]]] = {
    "sampling": runs_with_options(
        {
            "temperature": 0.8,
            "top_k": 0,
            "top_p": 0.9,
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.1,
            "logit_bias": {5: 1.0},
        }
    ),
    "logprobs": runs_with_options(logprobs=5),
    "echo": runs_with_options(logprobs=5, prompt_logprobs=5),
    "grammar": runs_with_options({"stop_token_ids": [VOCAB_SIZE - 1]}, grammar=ARRAY_GRAMMAR),
    "lora": lora_runs,
    "n": several_answers_runs,
    "beams": beam_search_runs,
    "prefix": prefix_cache_runs,
    "steps": multi_step_runs,
}

if __name__ == "__main__":
    main()
