"""What installs and runs Penstock says what the code says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import penstock
from penstock.cli import cli
from penstock.pipelines.config import config_fields
from penstock.serve.config import ServeConfig, serve_fields
from penstock.serve.operations import router

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = (ROOT / "packaging" / "penstock.service").read_text()
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.suffix == "")


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", one)[0].lower().replace("_", "-") for one in requirements}


def test_the_version_is_said_once() -> None:
    assert PROJECT["dynamic"] == ["version"]
    newest = re.search(r"^## (\S+?),? (\S+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == penstock.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", newest[2])


def test_every_extra_is_explained() -> None:
    readme = (ROOT / "README.md").read_text()
    assert not [extra for extra in EXTRAS if f"`{extra}`" not in readme and f"'.[{extra}]'" not in readme]
    (everything,) = EXTRAS["all"]
    assert set(re.findall(r"[\w-]+", everything.partition("[")[2])) == {*EXTRAS} - {"all", "dev", "docs"}


def test_missing_packages_are_of_an_extra_that_has_them() -> None:
    raised = [
        found
        for file in (ROOT / "penstock").rglob("*.py")
        for found in re.findall(r'MissingDependencyError\(\s*"([\w-]+)",\s*"([\w-]+)"', file.read_text())
    ]
    assert len(raised) >= 3
    for package, extra in raised:
        assert package.lower().replace("_", "-") in names_of(EXTRAS[extra]), (package, extra)


def test_what_tests_need_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = names_of([line for line in lines if line and not line.startswith("#")])
    wanted = names_of([one for extra in EXTRAS.values() for one in extra] + PROJECT["dependencies"])
    others = names_of(EXTRAS["fast-http"] + EXTRAS["slow-tokenizers"]) - {"transformers"}
    assert wanted - others - pinned == {"penstock"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_what_the_image_copies_is_there_and_let_through() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, flags=re.MULTILINE)
    sources = [source for line in copies for source in line.split()]
    assert {"penstock", "pyproject.toml", "CMakeLists.txt"} <= {*sources}
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored, f"{source} is not let through"


def test_the_image_starts_a_server_and_asks_for_its_health() -> None:
    command = re.findall(r'"([^"]*)"', DOCKERFILE[DOCKERFILE.index("ENTRYPOINT") :])
    result = CliRunner().invoke(cli, [*command[1:], "--print-config"])
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^host +0\.0\.0\.0 +flag$", result.stdout, flags=re.MULTILINE)
    (port,) = re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, flags=re.MULTILINE)
    assert int(port) == ServeConfig().port
    asked = re.findall(rf"http://127\.0\.0\.1:{port}(/\w+)", DOCKERFILE)
    assert set(asked) <= {route.path for route in router.routes}  # type: ignore[attr-defined]
    assert asked
    assert re.findall(r"^USER (.*)$", DOCKERFILE, flags=re.MULTILINE) == ["penstock"]


def test_the_unit_starts_a_server_and_waits_for_its_end() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT, flags=re.MULTILINE))
    program, *arguments = shlex.split(settings["ExecStart"])
    assert Path(program).name == "penstock"
    assert CliRunner().invoke(cli, [*arguments, "--print-config"]).exit_code == 0
    assert float(settings["TimeoutStopSec"]) > ServeConfig().shutdown_grace
    known = {f"PENSTOCK_{field.name.upper()}" for field in (*config_fields(), *serve_fields())}
    assert set(re.findall(r"\bPENSTOCK_\w+", UNIT)) <= known
    assert settings["RestartPreventExitStatus"] == "2"


def test_a_torch_that_is_there_is_shared(tmp_path: Path) -> None:
    """Of an environment as of a system: the new environment sees it, and pip is not told to replace it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "new")], check=True)
    child = in_scripts(f"share_torch {sys.executable} {tmp_path}/new; constraints_of {tmp_path}/new")
    constraints = Path(child.stdout.strip())
    assert constraints.parent == tmp_path / "new"
    whole = (ROOT / "constraints.txt").read_text()
    assert constraints.read_text() == re.sub(r"^torch==.*\n", "", whole, flags=re.MULTILINE)
    code = "import importlib.util as u; print(u.find_spec('torch').origin)"
    found = [
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        for python in (sys.executable, str(tmp_path / "new" / "bin" / "python"))
    ]
    assert found[0] == found[1]


def test_without_a_torch_nothing_is_shared(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "new")], check=True)
    child = in_scripts(f"share_torch {tmp_path}/new/bin/python {tmp_path}/new; constraints_of {tmp_path}/new")
    assert child.stdout == "constraints.txt\n"
    assert child.stderr == ""


def in_scripts(commands: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source scripts/share_torch.sh; {commands}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
