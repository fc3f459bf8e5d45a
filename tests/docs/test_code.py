"""Python and JavaScript blocks and curl commands of the pages run. Flags, links and file names are valid."""

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
from support.codecs import CODEC_REFERENCES
from support.documents import (
    FENCE,
    PAGES,
    ROOT,
    URL,
    Block,
    code_blocks,
    parse_curl,
    running_server,
    shell_commands,
    write_adapter,
)
from support.tiny_embedder import write_tiny_embedder
from support.tiny_speech import write_tiny_speech
from support.vision_checkpoint import random_picture, write_llava

from penstock.cli import cli

PYTHON_BLOCKS = code_blocks("python")
# test_readme.py runs the code of README.md.
STANDALONE_BLOCKS = [
    block for block in PYTHON_BLOCKS if not block.needs_server and block.page.name != "README.md"
]
CONSOLE_BLOCKS = [block for block in code_blocks("console") if shell_commands(block)]
CURL_COMMANDS = [
    (block, line) for block in CONSOLE_BLOCKS for line in shell_commands(block) if line.startswith("curl ")
]
EMBEDDER_PATH = "./all-MiniLM-L6-v2"
"""The model path in the console sessions with an embeddings model."""
CODE_FOLDERS = ("penstock", "tests", "tools", "examples", "benchmarks")
CLIENT_PACKAGES = {
    "langchain_openai",
    "llama_index",
    "litellm",
    "pydantic_ai",
    "instructor",
    "chromadb",
    "cohere",
}
"""Packages used in docs/clients.md that need not be installed for the tests."""
OTHER_LANGUAGES = {"text", "ini", "nginx", "toml", "json", "console", "javascript"}
"""Languages of blocks other than Python. Tests run JavaScript blocks and check console commands."""
NODE_PACKAGES = ROOT / "node_modules"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages")
    write_adapter(path / "adapters" / "tone")
    write_tiny_embedder(path / "all-MiniLM-L6-v2", settings={"prompts": {"query": "query: "}})
    write_tiny_speech(path / "neutts-nano", codec=str(CODEC_REFERENCES / "neucodec"))
    write_tiny_embedder(path / "ms-marco-MiniLM-L6-v2", labels=1)
    (path / "llava-1.5-7b-hf").mkdir()
    write_llava(path / "llava-1.5-7b-hf")
    random_picture().save(path / "photo.png")
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    flags = ("--lora", "tone=adapters/tone", "--enable-lora", "--speculative-method", "ngram")
    with running_server(folder, *flags) as address:
        yield address


@pytest.fixture(scope="module")
def embedder_url(folder: Path) -> Iterator[str]:
    with running_server(folder, EMBEDDER_PATH, "--served-model-name", "minilm") as address:
        yield address


@pytest.mark.parametrize("block", STANDALONE_BLOCKS, ids=str)
def test_python_blocks_run(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run_block(block, block.code)


@pytest.mark.parametrize("block", [block for block in PYTHON_BLOCKS if block.needs_server], ids=str)
def test_python_client_blocks_run(block: Block, request: pytest.FixtureRequest) -> None:
    code = block.code
    packages = CLIENT_PACKAGES & {*re.findall(r"^(?:from|import) (\w+)", code, flags=re.MULTILINE)}
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    url: str = request.getfixturevalue("embedder_url" if '="minilm"' in code else "url")
    code = code.replace(URL, url)
    if packages:  # run in another process, because these packages leave connections open
        # Otherwise LiteLLM downloads a price list.
        environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        completed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=environment
        )
        assert completed.returncode == 0, completed.stderr
        assert completed.stdout.strip()
        return
    names = run_block(block, code)
    if "client" in names:
        names["client"].close()


@pytest.mark.parametrize("block", code_blocks("javascript"), ids=str)
def test_node_client_blocks_run(block: Block, url: str, tmp_path: Path) -> None:
    if shutil.which("node") is None or not (NODE_PACKAGES / "@ai-sdk" / "openai-compatible").exists():
        pytest.skip("needs node and its packages, see CONTRIBUTING.md")
    (tmp_path / "node_modules").symlink_to(NODE_PACKAGES)
    (tmp_path / "client.mjs").write_text(block.code.replace(URL, url))
    completed = subprocess.run(
        ["node", "client.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert completed.returncode == 0, completed.stderr
    assert "happy" in completed.stdout
    assert "city" in completed.stdout


def run_block(block: Block, code: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile("\n" * block.line + code, str(block.page), "exec"), names)
    return names


@pytest.mark.parametrize(("block", "line"), CURL_COMMANDS, ids=str)
def test_curl_commands_succeed(block: Block, line: str, request: pytest.FixtureRequest) -> None:
    serves_embedder = f"penstock serve {EMBEDDER_PATH}" in block.code
    url: str = request.getfixturevalue("embedder_url" if serves_embedder else "url")
    method, path, body = parse_curl(line.replace('"mine"', '"demo"'))  # the server here serves demo
    response = httpx.request(method, url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("block", CONSOLE_BLOCKS, ids=str)
def test_penstock_commands_accept_the_flags_of_the_pages(block: Block) -> None:
    for line in shell_commands(block):
        words = shlex.split(line.split("| ")[-1], comments=True)
        if words[0] != "penstock" or len(words) == 1:
            continue
        with cli.make_context("penstock", words[1:2]) as context:
            command = cli.get_command(context, words[1])
            assert command is not None, line
            command.make_context(words[1], words[2:], parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_have_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked_page = page.parent / name if name else page
        assert linked_page.exists(), target
        titles = re.findall(r"^#+ (.*)$", linked_page.read_text(), flags=re.MULTILINE) if anchor else []
        assert not anchor or anchor in [title.lower().replace(" ", "-") for title in titles], target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_python_files_exist(page: Path) -> None:
    files = [
        f"/{file.relative_to(ROOT)}" for folder in CODE_FOLDERS for file in (ROOT / folder).rglob("*.py")
    ]
    for name in re.findall(r"`([\w/]+\.py)\b", page.read_text()):
        if page.name == "CHANGELOG.md":
            continue  # the changelog names files of earlier versions
        assert any(file.endswith(f"/{name}") for file in files), name


def test_each_block_has_one_of_the_expected_languages() -> None:
    unmarked_blocks = [str(block) for block in code_blocks("", "bash", "sh", "shell", "py")]
    assert not unmarked_blocks, (
        "name the language: python blocks run; console, text and similar blocks do not"
    )
    languages = {match[1] for page in PAGES for match in FENCE.finditer(page.read_text())}
    assert languages <= {*OTHER_LANGUAGES, "python"}


def test_the_pages_have_blocks_to_check() -> None:
    assert len([block for block in PYTHON_BLOCKS if block.needs_server]) >= 8
    assert len(STANDALONE_BLOCKS) >= 8
    assert len(CURL_COMMANDS) >= 2
