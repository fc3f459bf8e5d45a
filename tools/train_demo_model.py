"""Train the demo model of the package from random weights, on one CPU thread, in about an hour.

    python tools/train_demo_model.py --out penstock/demo --minutes 60

``tools/demo_corpus`` generates the documents: short stories, plain facts, questions and answers, JSON, tool
calls, odd inputs. No document is read twice, unless the generator produces it twice. A checksum selects about
one document in fifty as held out. ``--seed`` determines the documents, the tokenizer and the initial weights.
The schedule depends on the elapsed time: a faster machine trains on more text, in the same order.

``--start FOLDER`` begins with the weights and the tokenizer of an exported model. Use a smaller
``--learning-rate`` with ``--start``. ``--resume`` continues from the last checkpoint in ``--checkpoints``.
``--export-only`` exports this checkpoint to ``--out`` and measures its losses.
"""

import argparse
import ctypes
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_corpus.tokens import (
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TEMPLATE_PATH,
    TURN_END,
    Encoder,
    Packer,
    train_tokenizer,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

MICRO_BATCH_TOKENS = 2048
NUM_MEASURED_BATCHES = 24
HELD_OUT_SEED_OFFSET = 1_000_003
TRAIN_SAMPLE_SEED_OFFSET = 2_000_003


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a Llama. The defaults are the sizes of the demo model."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    mlp_size: int = 512
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def to_llama_config(self) -> dict[str, Any]:
        """Return the sizes as the ``config.json`` of a ``LlamaForCausalLM``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
            "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` [B, H, T, D] with rotary positions, in the half-split layout of Llama."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Block(nn.Module):
    """A layer. The q, k and v projections are fused for speed, and the gate and up projections too."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        heads = sizes.num_heads + 2 * sizes.num_kv_heads
        self.attention_norm = nn.RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.qkv = nn.Linear(sizes.hidden_size, heads * sizes.head_dim, bias=False)
        self.attention_out = nn.Linear(sizes.num_heads * sizes.head_dim, sizes.hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.gate_up = nn.Linear(sizes.hidden_size, 2 * sizes.mlp_size, bias=False)
        self.down = nn.Linear(sizes.mlp_size, sizes.hidden_size, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Return causal attention, computed with matrix products.

        For short rows, matrix products are faster than the fused CPU kernel of torch.
        """
        sizes, (rows, length, _) = self.sizes, x.shape
        heads = self.qkv(x).view(rows, length, -1, sizes.head_dim).transpose(1, 2)
        q, k, v = heads.split([sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads], 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = sizes.num_heads // sizes.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q * sizes.head_dim**-0.5) @ k.transpose(-1, -2) + mask
        mixed = torch.softmax(scores, -1, dtype=scores.dtype) @ v
        return self.attention_out(mixed.transpose(1, 2).reshape(rows, length, -1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Return the output of the layer for ``x [B, T, E]``."""
        x = x + self.attend(self.attention_norm(x), cos, sin, mask)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """A Llama with tied embeddings for training, without a KV cache."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self._initialize()

    def _initialize(self) -> None:
        """Set random weights. Projections into the residual stream have smaller weights in deeper models."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                is_scaled = name.endswith(("attention_out.weight", "down.weight"))
                scale = math.sqrt(2 * self.sizes.num_layers) if is_scaled else 1
                nn.init.normal_(weight, std=0.02 / scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits ``[B, T, V]`` of ``ids [B, T]``."""
        length = ids.shape[1]
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        cos, sin, mask = self._tables(length, dtype)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return F.linear(self.norm(x), self.embedding.weight)

    def _tables(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotary cosines and sines [T, D] and the causal mask [T, T]."""
        exponents = torch.arange(0, self.sizes.head_dim, 2).float() / self.sizes.head_dim
        angles = torch.outer(torch.arange(length).float(), self.sizes.rope_theta**-exponents)
        angles = torch.cat((angles, angles), -1)
        mask = torch.full((length, length), float("-inf")).triu(1)
        return angles.cos().to(dtype), angles.sin().to(dtype), mask.to(dtype)

    def llama_state(self) -> dict[str, Tensor]:
        """Return the weights in bfloat16 under their Hugging Face names. Fused weights are split."""
        sizes = self.sizes
        kv = sizes.num_kv_heads * sizes.head_dim
        state = {"model.embed_tokens.weight": self.embedding.weight, "model.norm.weight": self.norm.weight}
        for index, block in enumerate(self.blocks):
            q, k, v = block.qkv.weight.split([sizes.num_heads * sizes.head_dim, kv, kv])
            gate, up = block.gate_up.weight.chunk(2)
            tensors = {
                "input_layernorm": block.attention_norm.weight,
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": block.attention_out.weight,
                "post_attention_layernorm": block.mlp_norm.weight,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": block.down.weight,
            }
            state |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in tensors.items()}
        return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in state.items()}

    @torch.no_grad()
    def load_llama_state(self, state: dict[str, Tensor]) -> None:
        """Copy weights with Hugging Face names into the model: the inverse of `llama_state`."""
        self.embedding.weight.copy_(state["model.embed_tokens.weight"])
        self.norm.weight.copy_(state["model.norm.weight"])
        for index, block in enumerate(self.blocks):
            layer = {
                name.removeprefix(f"model.layers.{index}.").removesuffix(".weight"): tensor
                for name, tensor in state.items()
                if name.startswith(f"model.layers.{index}.")
            }
            block.attention_norm.weight.copy_(layer["input_layernorm"])
            block.qkv.weight.copy_(torch.cat([layer[f"self_attn.{part}_proj"] for part in "qkv"]))
            block.attention_out.weight.copy_(layer["self_attn.o_proj"])
            block.mlp_norm.weight.copy_(layer["post_attention_layernorm"])
            block.gate_up.weight.copy_(torch.cat([layer["mlp.gate_proj"], layer["mlp.up_proj"]]))
            block.down.weight.copy_(layer["mlp.down_proj"])


@dataclass
class Progress:
    """The progress of a training run, saved with each checkpoint."""

    step: int = 0
    tokens: int = 0
    documents: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


def learning_rate(fraction: float, peak: float) -> float:
    """Return the learning rate at a fraction of the time: a short warm-up, then linear decay to 0."""
    warm_up = 0.02
    return peak * min(fraction / warm_up + 0.01, 1.0 - max(0.0, fraction - warm_up) / (1.0 - warm_up), 1.0)


def row_length(fraction: float) -> int:
    """Return the row length at a fraction of the time: 256, then 512, and 1024 in the last tenth."""
    return 256 if fraction < 0.45 else 512 if fraction < 0.9 else 1024


def num_micro_batches(fraction: float) -> int:
    """Return the number of micro-batches per step, which grows with the fraction of the time."""
    return 1 if fraction < 0.5 else 2 if fraction < 0.85 else 4


def token_losses(model: Model, ids: Tensor) -> Tensor:
    """Return the cross entropy of each next token, flattened."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")


def next_batch(packer: Packer, length: int) -> tuple[Tensor, Tensor]:
    """Return the ids of one micro-batch, and the flattened loss weights of its targets."""
    ids, weights = packer.batch(MICRO_BATCH_TOKENS // length, length)
    return torch.from_numpy(ids), torch.from_numpy(weights)[:, 1:].flatten()


def train_step(model: Model, packer: Packer, fraction: float) -> tuple[float, int]:
    """Compute the gradients of one step. Return the weighted loss and the number of predicted tokens."""
    batches = [next_batch(packer, row_length(fraction)) for _ in range(num_micro_batches(fraction))]
    total_weight = sum(weights.sum() for _, weights in batches)
    loss = 0.0
    for ids, weights in batches:
        batch_loss = (token_losses(model, ids) * weights).sum() / total_weight
        batch_loss.backward()
        loss += batch_loss.item()
    return loss, sum(weights.numel() for _, weights in batches)


@torch.no_grad()
def measure(model: Model, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss of tokens with weight 1: stories, facts and answers, without prompts."""
    losses = [token_losses(model, ids)[weights == 1.0] for ids, weights in batches]
    return torch.cat(losses).mean().item()


def make_optimizer(model: Model, peak: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


class Trainer:
    """A training run. A checkpoint has the model, the optimizer and the progress, but not the data."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        options.checkpoints.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(options.seed)
        self.tokenizer = self._load_or_train_tokenizer()
        self.model = Model(ModelSizes())
        if options.start is not None:
            self.model.load_llama_state(load_file(options.start / "model.safetensors"))
        self.optimizer = make_optimizer(self.model, options.learning_rate)
        self.progress = Progress()
        encoder = Encoder(self.tokenizer)
        if options.resume or options.export_only:
            self._restore()
        # A resumed run reads another stream of documents. The same stream would repeat its beginning.
        self.packer = Packer(encoder, options.seed + self.progress.step)
        held_out_packer = Packer(encoder, options.seed + HELD_OUT_SEED_OFFSET, held_out=True, distinct=True)
        self.held_out_batches = [next_batch(held_out_packer, 512) for _ in range(NUM_MEASURED_BATCHES)]
        sample_packer = Packer(encoder, options.seed + TRAIN_SAMPLE_SEED_OFFSET, distinct=True)
        self.train_batches = [next_batch(sample_packer, 512) for _ in range(NUM_MEASURED_BATCHES)]

    def _load_or_train_tokenizer(self) -> Tokenizer:
        path = self.options.checkpoints / "tokenizer.json"
        if self.options.start is not None:
            shutil.copyfile(self.options.start / "tokenizer.json", path)
        elif not ((self.options.resume or self.options.export_only) and path.exists()):
            train_tokenizer(self.options.seed, ModelSizes().vocab_size).save(str(path))
        return Tokenizer.from_file(str(path))

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        target = self.options.checkpoints / "last.pt"
        torch.save(state, target.with_suffix(".tmp"))
        target.with_suffix(".tmp").replace(target)

    def _restore(self) -> None:
        state = torch.load(self.options.checkpoints / "last.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])

    def run(self) -> None:
        """Train for ``--minutes``. Print losses and save every 100 steps, and save at the end."""
        progress, budget = self.progress, 60.0 * self.options.minutes
        recent_losses: list[float] = []
        while progress.seconds < budget:
            start_time, fraction = time.perf_counter(), progress.seconds / budget
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(fraction, self.options.learning_rate)
            documents_before = self.packer.num_documents
            loss, num_tokens = train_step(self.model, self.packer, fraction)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            progress.step += 1
            progress.tokens += num_tokens
            progress.documents += self.packer.num_documents - documents_before
            recent_losses.append(loss)
            if progress.step % 100 == 0:
                self._report(sum(recent_losses) / len(recent_losses), budget)
                recent_losses.clear()
            progress.seconds += time.perf_counter() - start_time
        self._save()

    def _report(self, loss: float, budget: float) -> None:
        """Measure the held-out loss, print one line, and save a checkpoint."""
        progress = self.progress
        held_out_loss = measure(self.model, self.held_out_batches[: NUM_MEASURED_BATCHES // 4])
        report = {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds}
        previous = progress.history[-1] if progress.history else {"tokens": 0, "seconds": 0.0}
        speed = (report["tokens"] - previous["tokens"]) / (report["seconds"] - previous["seconds"])
        progress.history.append(report | {"train": loss, "held_out": held_out_loss})
        print(
            f"step {progress.step}  {progress.tokens / 1e6:.2f} M tokens  loss {loss:.4f}  "
            f"held-out {held_out_loss:.4f}  {speed:.0f} tokens/s  "
            f"{(budget - progress.seconds) / 60:.1f} min left",
            flush=True,
        )
        self._save()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory.

    Otherwise each step allocates its memory again from the kernel, which takes a fifth of the training time.
    """
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # another C library has no mallopt; the training is slower without it
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON with a newline at the end, as on the Hugging Face Hub."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def tokenizer_config(tokenizer: Tokenizer, sizes: ModelSizes) -> dict[str, Any]:
    """Return the ``tokenizer_config.json`` that transformers needs."""
    added = {
        str(index): {
            "content": token.content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token.special,
        }
        for index, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": sizes.max_positions,
    }


def export(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model and the tokenizer as a Hugging Face checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.llama_state(), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", model.sizes.to_llama_config())
    end_ids = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    generation = {
        "do_sample": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "eos_token_id": end_ids,
        "pad_token_id": end_ids[1],
    }
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer, model.sizes))
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(TEMPLATE_PATH, folder / "chat_template.jinja")


@torch.no_grad()
def round_to_bfloat16(model: Model) -> None:
    """Round the weights of the model to the exported bfloat16 values."""
    for weight in model.parameters():
        weight.copy_(weight.to(torch.bfloat16))


def finish(trainer: Trainer, folder: Path) -> None:
    """Export the model, and print the losses of the exported weights."""
    export(trainer.model, trainer.tokenizer, folder)
    round_to_bfloat16(trainer.model)
    train_loss = measure(trainer.model, trainer.train_batches)
    held_out_loss = measure(trainer.model, trainer.held_out_batches)
    progress = trainer.progress
    num_parameters = sum(p.numel() for p in trainer.model.parameters())
    print(
        f"exported to {folder}: {num_parameters} parameters, "
        f"{progress.step} steps, {progress.tokens} tokens, "
        f"{progress.documents} documents, {progress.seconds / 60:.1f} minutes; "
        f"train loss {train_loss:.4f} (perplexity {math.exp(train_loss):.3f}), "
        f"held-out loss {held_out_loss:.4f} (perplexity {math.exp(held_out_loss):.3f})"
    )


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("penstock/demo"))
    parser.add_argument("--checkpoints", type=Path, default=Path("build/demo_checkpoints"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, help="folder of an exported model with the initial weights")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--export-only", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Train (unless ``--export-only``) and export."""
    options = parse_arguments()
    torch.set_num_threads(1)
    keep_freed_memory()
    trainer = Trainer(options)
    if not options.export_only:
        trainer.run()
    finish(trainer, options.out)


if __name__ == "__main__":
    main()
