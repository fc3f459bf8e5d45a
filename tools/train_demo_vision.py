"""Train the model `demo-vision` of the package from random weights, on one CPU thread, in about an hour.

    python tools/train_demo_vision.py --out penstock/demo/vision --minutes 70

``tools/demo_vision`` generates pictures of shapes, questions and answers during the training. The stream of
examples is endless. In a second task, which only helps the training, the vision tower learns the shape and
the colour of the thing at each patch. ``--seed`` determines the pictures, the questions and the initial
weights. After a warm-up of 200 steps, the learning rate depends on the elapsed time. A faster machine trains
on more pictures.

``--resume`` continues from the last checkpoint in ``--work``. ``--export-only`` exports this checkpoint to
``--out``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_vision.model import DemoVision, TowerSizes, smolvlm_config
from demo_vision.pictures import COLOURS, SHAPES
from demo_vision.tokens import END, IMAGE, TEMPLATE, Batch, Examples, make_tokenizer
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from train_demo_model import ModelSizes

NUM_PICTURES = 32
"""Number of pictures in a step."""
CLASS_WEIGHT = 0.5
"""Weight of the loss of the second task."""
NUM_TEXT_CONVERSATIONS = 4
"""Number of conversations without a picture in a step."""
SAVE_INTERVAL = 120.0
"""Seconds between two checkpoints."""


def text_sizes(vocab_size: int) -> ModelSizes:
    """Return the sizes of the decoder for a vocabulary size."""
    return ModelSizes(
        vocab_size=vocab_size,
        hidden_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        mlp_size=320,
        max_positions=512,
    )


def conversation_mask(segments: Tensor) -> Tensor:
    """Return the mask ``[B, 1, T, T]``: a conversation sees the picture and its own earlier tokens."""
    is_same_segment = segments[:, :, None] == segments[:, None, :]
    is_visible = (is_same_segment | (segments == 0)[:, None, :]).tril()
    return torch.zeros(is_visible.shape).masked_fill(~is_visible, float("-inf"))[:, None]


def class_loss(scores: Tensor, classes: Tensor) -> Tensor:
    """Return the loss of the second task for ``scores [N, P, K]`` and the true ``classes [N, P, 4]``."""
    class_counts = [len(SHAPES) + 1, len(COLOURS) + 1] * 2
    parts = scores.float().flatten(0, 1).split(class_counts, -1)
    targets = classes.flatten(0, 1).unbind(-1)
    losses = [F.cross_entropy(part, target) for part, target in zip(parts, targets, strict=True)]
    return torch.stack(losses).sum()


class Trainer:
    """A training run: model, optimizer and data."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        options.work.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(options.seed)
        self.tokenizer: Tokenizer = make_tokenizer()
        self.tower = TowerSizes()
        self.sizes = text_sizes(self.tokenizer.get_vocab_size())
        self.model = DemoVision(self.tower, self.sizes)
        matrices = [weight for weight in self.model.parameters() if weight.dim() == 2]
        vectors = [weight for weight in self.model.parameters() if weight.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98), fused=True)
        self.step, self.seconds = 0, 0.0
        if options.resume or options.export_only:
            state = torch.load(options.work / "last.pt", weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]
        image_sizes = self.tower.num_image_tokens, self.tower.grid, self.tower.image_size
        self.examples = Examples(self.tokenizer, options.seed + 1 + self.step, *image_sizes)

    def run(self) -> None:
        """Train until all runs together have taken ``--minutes``, and save checkpoints."""
        budget, last_save_time = 60.0 * self.options.minutes, time.perf_counter()
        recent_losses: list[tuple[float, float]] = []
        while self.seconds < budget:
            start_time = time.perf_counter()
            fraction = self.seconds / budget
            rate = min((self.step + 1) / 200, 0.5 + 0.5 * math.cos(math.pi * fraction), 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] = self.options.learning_rate * max(rate, 0.01)
            recent_losses.append(self._train_step())
            self.step += 1
            self.seconds += time.perf_counter() - start_time
            if self.step % 50 == 0:
                text_loss, patch_loss = (
                    sum(losses) / len(losses) for losses in zip(*recent_losses, strict=True)
                )
                recent_losses.clear()
                print(
                    f"step {self.step}, {self.seconds / 60:.1f} min, "
                    f"loss {text_loss:.4f}, loss of patches {patch_loss:.4f}",
                    flush=True,
                )
            if time.perf_counter() - last_save_time > SAVE_INTERVAL:
                self._save()
                last_save_time = time.perf_counter()
        self._save()

    def _train_step(self) -> tuple[float, float]:
        """Run a step. Return the loss of the answers (with and without pictures) and that of the patches."""
        batch = self.examples.batch(NUM_PICTURES)
        with torch.autocast("cpu", torch.bfloat16):
            image_embeddings, scores = self.model.encode_images(torch.from_numpy(batch.pixels))
            patch_loss = class_loss(scores, torch.from_numpy(batch.classes))
            text_loss = self._text_loss(batch, image_embeddings) + 0.1 * self._loss_without_picture()
        self.optimizer.zero_grad(set_to_none=True)
        (text_loss + CLASS_WEIGHT * patch_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return text_loss.item(), patch_loss.item()

    def _text_loss(self, batch: Batch, image_embeddings: Tensor) -> Tensor:
        segments = torch.from_numpy(batch.segments)
        logits = self.model(
            torch.from_numpy(batch.ids),
            image_embeddings,
            torch.tensor(self.examples.image_token_indices),
            torch.from_numpy(batch.positions),
            conversation_mask(segments),
        )
        targets = torch.from_numpy(batch.targets).flatten()
        is_answer = targets >= 0
        return F.cross_entropy(logits.flatten(0, 1)[is_answer].float(), targets[is_answer])

    def _loss_without_picture(self) -> Tensor:
        losses = []
        for ids, targets in self.examples.without_picture(NUM_TEXT_CONVERSATIONS):
            logits = self.model.text(torch.tensor([ids]))[0].float()
            losses.append(F.cross_entropy(logits, torch.tensor(targets)))
        return torch.stack(losses).mean()

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        target = self.options.work / "last.pt"
        torch.save(state, target.with_suffix(".tmp"))
        target.with_suffix(".tmp").replace(target)

    def export(self) -> None:
        """Write the model as a SmolVLM checkpoint."""
        out: Path = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        save_file(self.model.smolvlm_state(), out / "model.safetensors", metadata={"format": "pt"})
        image_id, end_id = self.tokenizer.token_to_id(IMAGE), self.tokenizer.token_to_id(END)
        write_json(out / "config.json", smolvlm_config(self.tower, self.sizes, image_id, end_id))
        write_json(
            out / "generation_config.json",
            {"do_sample": False, "eos_token_id": end_id, "pad_token_id": end_id},
        )
        write_json(out / "preprocessor_config.json", processor_config(self.tower.image_size))
        write_json(
            out / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "add_bos_token": False,
                "bos_token": None,
                "eos_token": END,
                "pad_token": END,
                "clean_up_tokenization_spaces": False,
                "model_max_length": self.sizes.max_positions,
            },
        )
        self.tokenizer.save(str(out / "tokenizer.json"), pretty=False)
        (out / "chat_template.jinja").write_text(TEMPLATE)


def processor_config(image_size: int) -> dict[str, Any]:
    """Return the configuration of SmolVLM's image processor for images of one tile."""
    return {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"longest_edge": image_size},
        "resample": 1,
        "do_image_splitting": False,
        "max_image_size": {"longest_edge": image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pad": True,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON with a newline at the end."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Train (unless ``--export-only``) and export."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--work", type=Path, default=Path("build/demo_vision"), help="checkpoints")
    parser.add_argument("--minutes", type=float, default=70)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--export-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trainer = Trainer(options)
    if not options.export_only:
        trainer.run()
    trainer.export()


if __name__ == "__main__":
    main()
