"""Test a wheel with the Python in which the wheel is installed: ``python try_wheel.py WHEEL ISAS``.

Uses only the standard library. ``scripts/wheel`` runs this file outside the source tree.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

REQUIRED_FILES = (
    "penstock/py.typed",
    "penstock/demo/model.safetensors",
    "penstock/demo/tokenizer.json",
    "penstock/serve/playground/index.html",
)
MANYLINUX = re.compile(r"manylinux(2014|_2_\d+)_\w+")
SOURCE_FILES = re.compile(r"^(tests|docs|benchmarks|examples|tools|scripts)/|\.(cpp|inl|h|pyc)$|CMakeLists")


def main() -> None:
    """Check tags, contents, imports, kernels and commands of the wheel.

    Raises:
        AssertionError: a check failed. The message names the fault.
    """
    wheel, isas = Path(sys.argv[1]), sys.argv[2].split()
    version, tag = re.fullmatch(r"penstock_llm-([^-]+)-(.+)\.whl", wheel.name).groups()  # type: ignore[union-attr]
    assert tag.startswith("py3-none-"), f"{tag} is not for every Python"
    platforms = tag.removeprefix("py3-none-").split(".")
    is_pure_python = platforms == ["any"]
    assert is_pure_python or all(MANYLINUX.fullmatch(one) for one in platforms), (
        f"{tag} is not a manylinux tag"
    )
    names = zipfile.ZipFile(wheel).namelist()
    missing = [part for part in REQUIRED_FILES if part not in names]
    assert not missing, f"missing: {missing}"
    assert not [name for name in names if ".libs/" in name], "a library is bundled: libgomp is torch's"
    assert not [name for name in names if SOURCE_FILES.search(name)], "sources are in the wheel"
    for name in ("LICENSE", "NOTICE"):
        assert any(part.endswith(f"/licenses/{name}") for part in names), f"no {name}"

    assert run("penstock", "--version") == f"penstock {version}"
    print_heavy_imports = (
        "import sys, penstock.cli; print({'torch', 'transformers', 'fastapi'} & {*sys.modules})"
    )
    assert run(sys.executable, "-c", print_heavy_imports) == "set()"
    origin = Path(run(sys.executable, "-c", "import penstock; print(penstock.__file__)"))
    assert Path(sys.prefix) in origin.parents, f"{origin} is not of this environment"
    isa = json.loads(run("penstock", "env", "--json"))["isa"]
    assert isa in isas, f"kernels {isa}, not {isas}"
    assert (isa == "none") == is_pure_python, f"kernels {isa} in a wheel for {tag}"
    assert len(json.loads(run("penstock", "list", "--json"))["architectures"]) > 1
    run("penstock", "warm-cache")
    flags = ("--chat", "--prompt", "What is Penstock?", "--temperature", "0", "--json")
    answer = json.loads(run("penstock", "generate", *flags))
    assert "inference" in answer["text"], answer["text"]
    print(f"{wheel.name}: kernels {isa}: {answer['text']!r}")


def run(*command: str) -> str:
    """Return the output of a command."""
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, f"{command}: {child.stderr}"
    return child.stdout.strip()


if __name__ == "__main__":
    main()
