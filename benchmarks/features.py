"""Measure the cost of each feature: the same work with and without it, alternating (A B A B).

    python benchmarks/features.py                          # a 134 M Llama of random weights, bfloat16
    python benchmarks/features.py --only steps --batch 1 --encoding int8 --pairs 9
    python benchmarks/features.py --only lora grammar --batch 1 32 --json out.json

The work is ``--batch`` prompts of 128 tokens with 32 new tokens each. Sampling is greedy, end of sequence is
ignored, and the prefix cache is off.

    sampling       temperature, top-p, three penalties, a logit bias
    logprobs       log probabilities of each generated token and of five alternatives
    echo           log probabilities of the prompt tokens too
    grammar        a JSON schema that allows an answer of any length
    lora           each prompt uses one of four adapters of rank 16 on all linear layers
    n              four answers per prompt, compared with four times as many prompts
    beams          four beams, compared with four times as many prompts
    prefix         the second run of a prompt, compared with the first; prefix cache on
    steps          several decode steps per call (the default), compared with one step per call

The cost is the ratio of seconds with the feature to seconds without it: 1.00 is free. Figures are medians.
The machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from against_transformers import VOCABULARY, machine, timed
from safetensors.numpy import save_file

from penstock import LLM, SamplingParams
from penstock.bench.random_weights import SHAPES, write_random_checkpoint
from penstock.pipelines.core import Grammar

LENGTH, NEW, RANK, COPIES = 128, 32, 16, 4
PLAIN: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "detokenize": False}
NUMBERS = Grammar(
    "json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 10_000})
)
Run = Callable[[int], Any]


@dataclass(frozen=True)
class Setting:
    """The model on which features are measured."""

    folder: str
    shape: str
    encoding: str

    def llm(self, **config: Any) -> LLM:
        return LLM(self.folder, quantization_encoding=self.encoding, **config)

    @cache  # noqa: B019  # a run has one setting
    def plain(self) -> LLM:
        """Return the model without extra configuration. It is loaded once and shared by the features."""
        return self.llm(enable_prefix_caching=False)


def main() -> None:
    """Measure the features of the command line and print each row when it is complete."""
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
            "machine": machine(),
            "shape": options.shape,
            "encoding": options.encoding,
            "pairs": options.pairs,
            "rows": [],
        }
        print(f"{report['machine']}\n{options.shape}, {options.encoding}, {options.pairs} pairs", flush=True)
        setting = Setting(folder, options.shape, options.encoding)
        for name in options.only:
            for batch in options.batch:
                row = compare(name, setting, batch, options.pairs)
                report["rows"].append(row)
                spread = f"{row['lowest']:.2f} to {row['highest']:.2f}"
                print(
                    f"{name:14} batch {batch:2}  x{row['cost']:.2f} ({spread}), plain {row['plain']:.2f} s",
                    flush=True,
                )
                if options.json:
                    options.json.write_text(json.dumps(report, indent=2))


def compare(name: str, setting: Setting, batch: int, pairs: int) -> dict[str, Any]:
    """Run the work with and without a feature alternately, after one warm-up run of each."""
    plain, featured = FEATURES[name](setting, batch)
    plain(0), featured(0)
    found = [(timed(lambda: plain(seed)), timed(lambda: featured(seed))) for seed in range(1, pairs + 1)]  # noqa: B023
    ratios = [b / a for a, b in found]
    return {
        "feature": name,
        "batch": batch,
        "plain": statistics.median(a for a, _ in found),
        "cost": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def prompts(batch: int, seed: int) -> list[list[int]]:
    tokens = np.random.default_rng(seed).integers(3, VOCABULARY, (batch, LENGTH))
    return [[int(token) for token in row] for row in tokens]


def with_options(params: dict[str, Any] | None = None, **options: Any) -> Callable[..., tuple[Run, Run]]:
    """Return a factory of the two runs of a feature that needs only sampling parameters or call options."""

    def make(setting: Setting, batch: int) -> tuple[Run, Run]:
        llm = setting.plain()
        featured = SamplingParams(**{**PLAIN, **(params or {})})
        return (
            lambda seed: llm.generate(prompts(batch, seed), SamplingParams(**PLAIN), use_tqdm=False),
            lambda seed: llm.generate(prompts(batch, seed), featured, use_tqdm=False, **options),
        )

    return make


def lora(setting: Setting, batch: int) -> tuple[Run, Run]:
    names = [f"a{number}" for number in range(4)]
    shape = SHAPES[setting.shape]
    paths = [write_adapter(Path(setting.folder), name, shape, seed) for seed, name in enumerate(names)]
    pairs = [f"{name}={path}" for name, path in zip(names, paths, strict=True)]
    llm = setting.llm(enable_prefix_caching=False, lora=pairs, max_lora_rank=RANK)
    params = SamplingParams(**PLAIN)
    chosen = [names[place % 4] for place in range(batch)]
    return (
        lambda seed: llm.generate(prompts(batch, seed), params, use_tqdm=False),
        lambda seed: llm.generate(prompts(batch, seed), params, use_tqdm=False, adapter=chosen),
    )


def n(setting: Setting, batch: int) -> tuple[Run, Run]:
    llm = setting.llm()
    params = SamplingParams(**{**PLAIN, "temperature": 1.0, "top_k": 0})
    return (  # the two runs use different prompts: otherwise the second would hit the prefix cache
        lambda seed: llm.generate(prompts(COPIES * batch, 1000 + seed), params, use_tqdm=False),
        lambda seed: llm.generate(prompts(batch, seed), params, use_tqdm=False, n=COPIES),
    )


def beams(setting: Setting, batch: int) -> tuple[Run, Run]:
    llm = setting.plain()
    options: Any = {"num_beams": COPIES, "max_new_tokens": NEW, "ignore_eos": True, "use_tqdm": False}
    return (
        lambda seed: llm.generate(prompts(COPIES * batch, seed), SamplingParams(**PLAIN), use_tqdm=False),
        lambda seed: llm.beam_search(prompts(batch, seed), **options),
    )


def prefix(setting: Setting, batch: int) -> tuple[Run, Run]:
    llm = setting.llm()
    one = SamplingParams(**{**PLAIN, "max_new_tokens": 1})

    def run(seed: int) -> Any:
        return llm.generate(prompts(batch, seed), one, use_tqdm=False)

    return run, run


def steps(setting: Setting, batch: int) -> tuple[Run, Run]:
    one, several = setting.llm(enable_prefix_caching=False, max_num_steps=1), setting.plain()
    params = SamplingParams(**PLAIN)
    return (
        lambda seed: one.generate(prompts(batch, seed), params, use_tqdm=False),
        lambda seed: several.generate(prompts(batch, seed), params, use_tqdm=False),
    )


def write_adapter(folder: Path, name: str, shape: dict[str, int], seed: int) -> Path:
    """Write a PEFT directory with random matrices for every linear layer of a Llama model."""
    path = folder / name
    path.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sizes = {
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
        for linear, (wide, high) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{linear}"
            tensors[f"{key}.lora_A.weight"] = random.standard_normal((RANK, wide), np.float32)
            tensors[f"{key}.lora_B.weight"] = 0.01 * random.standard_normal((high, RANK), np.float32)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens spell text, which grammars need: bytes, then words without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"t{number}" for number in range(VOCABULARY - len(letters))]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate([*letters, *words])}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


FEATURES: dict[str, Callable[[Setting, int], tuple[Run, Run]]] = {
    "sampling": with_options(
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
    "logprobs": with_options(logprobs=5),
    "echo": with_options(logprobs=5, prompt_logprobs=5),
    "grammar": with_options({"stop_token_ids": [VOCABULARY - 1]}, grammar=NUMBERS),
    "lora": lora,
    "n": n,
    "beams": beams,
    "prefix": prefix,
    "steps": steps,
}

if __name__ == "__main__":
    main()
