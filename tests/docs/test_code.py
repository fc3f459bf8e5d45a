"""Every block of code on the pages runs unchanged, or its language marks it as not runnable."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from support.codecs import FOLDER
from support.documents import (
    PAGES,
    ROOT,
    URL,
    Block,
    blocks,
    curl_of,
    running_server,
    shell_commands,
    write_adapter,
)
from support.tiny_embedder import write_tiny_embedder
from support.tiny_speech import write_tiny_speech
from support.vision_checkpoint import picture, write_llava

from penstock.cli import cli

PYTHON = blocks("python")
ALONE = [
    block for block in PYTHON if not block.needs_server and block.page.name != "README.md"
]  # test_readme
SESSIONS = [block for block in blocks("console") if shell_commands(block)]
CURLS = [(block, line) for block in SESSIONS for line in shell_commands(block) if line.startswith("curl ")]
EMBEDDER = "./all-MiniLM-L6-v2"
"""The model of sessions with an embeddings model."""
FOLDERS = ("penstock", "tests", "tools", "examples", "benchmarks")
CLIENT_PACKAGES = {
    "langchain_openai",
    "llama_index",
    "litellm",
    "pydantic_ai",
    "instructor",
    "chromadb",
    "cohere",
}
"""Packages of docs/clients.md that the tests do not install."""
NOT_RUN = {"text", "ini", "nginx", "toml", "json", "console", "javascript"}
"""Languages of blocks that `test_python` and `test_clients` do not run. Commands in sessions are checked."""
NODE_PACKAGES = ROOT / "node_modules"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages")
    write_adapter(path / "adapters" / "tone")
    write_tiny_embedder(path / "all-MiniLM-L6-v2", settings={"prompts": {"query": "query: "}})
    write_tiny_speech(path / "neutts-nano", codec=str(FOLDER / "neucodec"))
    write_tiny_embedder(path / "ms-marco-MiniLM-L6-v2", labels=1)
    (path / "llava-1.5-7b-hf").mkdir()
    write_llava(path / "llava-1.5-7b-hf")
    picture().save(path / "photo.png")
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    flags = ("--lora", "tone=adapters/tone", "--enable-lora", "--speculative-method", "ngram")
    with running_server(folder, *flags) as address:
        yield address


@pytest.fixture(scope="module")
def embedder_url(folder: Path) -> Iterator[str]:
    with running_server(folder, EMBEDDER, "--served-model-name", "minilm") as address:
        yield address


@pytest.mark.parametrize("block", ALONE, ids=str)
def test_python(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run(block, block.code)


@pytest.mark.parametrize("block", [block for block in PYTHON if block.needs_server], ids=str)
def test_clients(block: Block, request: pytest.FixtureRequest) -> None:
    code = block.code
    packages = CLIENT_PACKAGES & {*re.findall(r"^(?:from|import) (\w+)", code, flags=re.MULTILINE)}
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    url: str = request.getfixturevalue("embedder_url" if '="minilm"' in code else "url")
    code = code.replace(URL, url)
    if packages:  # in another process, because these packages leave connections open
        environment = os.environ | {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True"
        }  # otherwise LiteLLM downloads a list of prices
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=environment
        )
        assert child.returncode == 0, child.stderr
        assert child.stdout.strip()
        return
    names = run(block, code)
    if "client" in names:
        names["client"].close()


@pytest.mark.parametrize("block", blocks("javascript"), ids=str)
def test_node_clients(block: Block, url: str, tmp_path: Path) -> None:
    if shutil.which("node") is None or not (NODE_PACKAGES / "@ai-sdk" / "openai-compatible").exists():
        pytest.skip("needs node and its packages, see CONTRIBUTING.md")
    (tmp_path / "node_modules").symlink_to(NODE_PACKAGES)
    (tmp_path / "client.mjs").write_text(block.code.replace(URL, url))
    child = subprocess.run(["node", "client.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert child.returncode == 0, child.stderr
    assert "happy" in child.stdout
    assert "city" in child.stdout


def run(block: Block, code: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile("\n" * block.line + code, str(block.page), "exec"), names)
    return names


@pytest.mark.parametrize(("block", "line"), CURLS, ids=str)
def test_curl(block: Block, line: str, request: pytest.FixtureRequest) -> None:
    serves_embedder = f"penstock serve {EMBEDDER}" in block.code
    url: str = request.getfixturevalue("embedder_url" if serves_embedder else "url")
    method, path, body = curl_of(line)
    response = httpx.request(method, url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("block", SESSIONS, ids=str)
def test_commands_take_these_flags(block: Block) -> None:
    for line in shell_commands(block):
        words = shlex.split(line.split("| ")[-1], comments=True)
        if words[0] != "penstock" or len(words) == 1:
            continue
        with cli.make_context("penstock", words[1:2]) as context:
            command = cli.get_command(context, words[1])
            assert command is not None, line
            command.make_context(words[1], words[2:], parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        titles = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE) if anchor else []
        assert not anchor or anchor in [title.lower().replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    files = [f"/{file.relative_to(ROOT)}" for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    for name in re.findall(r"`([\w/]+\.py)\b", page.read_text()):
        if page.name == "CHANGELOG.md":
            continue  # it names files of earlier versions
        assert any(file.endswith(f"/{name}") for file in files), name


def test_other_blocks_are_marked() -> None:
    unmarked = [str(block) for block in blocks("", "bash", "sh", "shell", "py")]
    assert not unmarked, "name the language: python is run; console, text and the like are not"
    assert {block.language for block in blocks(*NOT_RUN, "python")} <= {*NOT_RUN, "python"}


def test_there_is_something_to_check() -> None:
    assert len([block for block in PYTHON if block.needs_server]) >= 8
    assert len(ALONE) >= 8
    assert len(CURLS) >= 2
