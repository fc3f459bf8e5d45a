"""Compare the embeddings of one model in several engines: throughput, latency, memory, accuracy.

    python benchmarks/embeddings.py --model FOLDER                          # Penstock in all encodings
    python benchmarks/embeddings.py --model FOLDER --encoding int8 --sentence-transformers \\
        --onnx-int8 model.onnx --openvino model.onnx --llama-cpp model-Q8_0.gguf \\
        --python openvino=/venvs/openvino/bin/python --python llama-cpp=/venvs/llama_cpp/bin/python

Each engine runs in a separate process, which is idle while another engine runs. ``--python`` sets the Python
interpreter of an engine. An engine is skipped if this interpreter lacks its package. A round runs every
workload once on every engine. Each figure of a workload is the median of the rounds. Workloads:

- ``mixed``: one list of 256 texts of 8 to 256 tokens; texts per second.
- ``short``: one list of 512 queries of 4 to 12 tokens; texts per second.
- ``single``: one short query at a time; the median latency in milliseconds.

`benchmarks/embedding_engines.py` has the settings of each engine. ``python -m benchmarks.peers setup
llama_cpp`` makes a virtual environment with llama.cpp built for this processor, and its converter to GGUF.
OpenVINO needs the packages openvino, nncf, tokenizers and numpy. The ONNX model comes from
``python benchmarks/embedding_engines.py FOLDER export model.onnx``, with the packages torch, transformers and
onnxscript.

The accuracy is the cosine between an engine's vector and the reference vector of the same text. The reference
is sentence-transformers if it runs, otherwise Penstock in float32, otherwise the first engine. The accuracy
is measured on 500 texts of 1 to 233 words of 15 kinds: scripts, languages, numbers, code and signs.
``--rounds 0`` measures only the accuracy:

    python benchmarks/embeddings.py --model FOLDER --rounds 0 --sentence-transformers \\
        --python sentence-transformers=/venvs/embed/bin/python
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ENGINES_FILE = Path(__file__).with_name("embedding_engines.py")
PEERS = ("sentence-transformers", "onnx", "onnx-int8", "openvino", "llama-cpp")
WORKLOADS = ("mixed", "short", "single")
COLUMNS = {
    "mixed": ("mixed/s", 1),
    "short": ("short/s", 1),
    "single": ("single ms", 2),
    "memory": ("MiB", 0),
    "cosine": ("min cosine", 6),
    "mean_cosine": ("mean cosine", 6),
}
"""Name of a figure -> the title and the number of decimal places of its column."""


class Engine:
    """An engine in a separate process.

    Args:
        python: the Python interpreter of the engine.
        model: the folder of the checkpoint.
        engine: the engine, by its name in `embedding_engines`.
        option: the encoding of Penstock, or the file that the engine loads.
    """

    def __init__(self, python: str, model: str, engine: str, option: str) -> None:
        self.name = f"{engine} {Path(option).stem}".strip()
        command = [python, str(ENGINES_FILE), model, engine, option]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.skip_reason: str | None = self._read().get("skipped")
        """The reason why the engine cannot run; None if it is ready."""

    def run(self, workload: str) -> Any:
        """Run a workload and return its result, as `embedding_engines.run_workload` describes it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{workload}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> Any:
        """Return the next JSON line of the engine.

        Lines that are not JSON, which libraries print, go to standard error.

        Raises:
            SystemExit: the engine ended.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                print(line, end="", file=sys.stderr)
        raise SystemExit(f"{self.name} ended with exit status {self._process.wait()}")


def start_engines(
    model: str, engine_options: Sequence[tuple[str, str]], interpreter_paths: Mapping[str, str]
) -> list[Engine]:
    """Start the engines and return the engines that can run. Prints the reason for each skipped engine."""
    engines = []
    for engine, option in engine_options:
        process = Engine(interpreter_paths.get(engine, sys.executable), model, engine, option)
        if process.skip_reason is None:
            engines.append(process)
        else:
            print(f"{process.name} is skipped: {process.skip_reason}", file=sys.stderr)
            process.close()
    return engines


def parse_interpreter_paths(arguments: Sequence[str]) -> dict[str, str]:
    """Return engine -> path of its interpreter, from the values ``ENGINE=PATH`` of ``--python``.

    Raises:
        SystemExit: a value does not have the form ``ENGINE=PATH``, or the engine is not one of `PEERS`.
    """
    paths = {}
    for argument in arguments:
        engine, equals, path = argument.partition("=")
        if not equals or engine not in PEERS:
            raise SystemExit(f"--python {argument!r} must be ENGINE=PATH, with one of {', '.join(PEERS)}")
        paths[engine] = path
    return paths


def compare(engines: Sequence[Engine], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Run all rounds. Returns engine -> workload -> the results of the rounds."""
    figures: dict[str, dict[str, list[float]]] = {engine.name: {} for engine in engines}
    for _ in range(rounds):
        for name in WORKLOADS:
            for engine in engines:
                figures[engine.name].setdefault(name, []).append(engine.run(name))
    return figures


def main() -> None:
    """Run the engines that the command line selects, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", required=True, help="folder of a model in the layout of sentence-transformers"
    )
    parser.add_argument(
        "--encoding",
        action="append",
        help="encoding of Penstock, repeatable; default: float32, bfloat16, int8, int4",
    )
    parser.add_argument("--sentence-transformers", action="store_true")
    parser.add_argument(
        "--onnx", action="append", default=[], help="ONNX model that ONNX Runtime runs unchanged"
    )
    parser.add_argument(
        "--onnx-int8",
        action="append",
        default=[],
        help="float32 ONNX model that ONNX Runtime quantizes to int8",
    )
    parser.add_argument(
        "--openvino", action="append", default=[], help="float32 ONNX model that NNCF quantizes to int8"
    )
    parser.add_argument("--llama-cpp", action="append", default=[], help="a GGUF file")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds; 0 measures only the accuracy"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine_options = [
        ("penstock", encoding) for encoding in options.encoding or ["float32", "bfloat16", "int8", "int4"]
    ]
    engine_options += [("sentence-transformers", "")] * options.sentence_transformers
    for engine in PEERS[1:]:
        engine_options += [(engine, path) for path in getattr(options, engine.replace("-", "_"))]
    engines = start_engines(options.model, engine_options, parse_interpreter_paths(options.python))
    figures = compare(engines, options.rounds)
    vectors = {loaded_engine.name: np.array(loaded_engine.run("vectors")) for loaded_engine in engines}
    references = ("sentence-transformers", "penstock float32", engines[0].name)
    reference_vectors = vectors[next(name for name in references if name in vectors)]
    rows = {}
    for loaded_engine in engines:
        medians = {name: statistics.median(values) for name, values in figures[loaded_engine.name].items()}
        cosines = (vectors[loaded_engine.name] * reference_vectors).sum(1)
        rows[loaded_engine.name] = {
            **medians,
            "memory": loaded_engine.run("memory"),
            "cosine": float(cosines.min()),
            "mean_cosine": float(cosines.mean()),
        }
        loaded_engine.close()
    columns = {name: form for name, form in COLUMNS.items() if all(name in row for row in rows.values())}
    print(f"{'engine':28}" + "".join(f"{title:>13}" for title, _ in columns.values()))
    for engine, row in rows.items():
        print(f"{engine:28}" + "".join(f"{row[name]:13.{digits}f}" for name, (_, digits) in columns.items()))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "rounds": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
