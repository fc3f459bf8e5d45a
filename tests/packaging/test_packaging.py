"""The files that install and run Penstock agree with the code."""

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
from penstock.config import config_fields
from penstock.serve.api.operations import router
from penstock.serve.config import ServeConfig, serve_fields

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SYSTEMD_UNIT = (ROOT / "packaging" / "penstock.service").read_text()
DISTRIBUTION = PROJECT["name"]
TEXT_FILES = [
    path
    for folder_name in ("", "docs", "examples", "packaging", "penstock", "benchmarks", "scripts", "tools")
    for path in sorted((ROOT / folder_name).rglob("*") if folder_name else ROOT.iterdir())
    if path.is_file() and path.suffix in {"", ".md", ".py", ".toml", ".txt", ".yml", ".sh", ".service"}
]
"""Files that may contain installation commands."""
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.suffix == "")


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def test_the_version_is_defined_once_and_has_a_changelog_entry() -> None:
    assert PROJECT["dynamic"] == ["version"]
    newest_entry = re.search(r"^## (\S+?),? (\S+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest_entry is not None
    assert newest_entry[1] == penstock.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", newest_entry[2])


def test_every_extra_is_documented_and_all_contains_the_expected_extras() -> None:
    page = (ROOT / "docs" / "getting-started.md").read_text()
    assert not [extra for extra in EXTRAS if f"`{extra}`" not in page and f"'.[{extra}]'" not in page]
    (requirement_of_all,) = EXTRAS["all"]
    # The extra all leaves out xgrammar, an alternative to the packages of grammar, and ray, which only
    # clusters need. The extras xgrammar and cuda install triton (1 GB).
    extras_not_in_all = {"all", "dev", "docs", "browser", "xgrammar", "cuda", "ray"}
    assert set(re.findall(r"[\w-]+", requirement_of_all.partition("[")[2])) == {*EXTRAS} - extras_not_in_all


def test_extras_named_by_errors_contain_the_package() -> None:
    error_arguments = [
        arguments
        for file in (ROOT / "penstock").rglob("*.py")
        for arguments in re.findall(r'MissingDependencyError\(\s*"([\w-]+)",\s*"([\w-]+)"', file.read_text())
    ]
    assert len(error_arguments) >= 3
    for package, extra in error_arguments:
        assert package.lower().replace("_", "-") in requirement_names(EXTRAS[extra]), (package, extra)


def requirements_in(text: str) -> list[tuple[str, str]]:
    """Return the requirements on this project in a text, as pairs of a name (or a dot) and extras."""
    with_extras = re.findall(r"(?<![\w/.])(penstock[\w-]*|(?<=['\"])\.)\[([\w{},-]+)\]", text)
    commands = re.findall(r"pip install ([^\n#`]*)", text)
    words = [word.strip("'\".,;:)") for command in commands for word in command.split()]
    return with_extras + [(word, "") for word in words if re.fullmatch(r"penstock[\w-]*", word)]


def test_installation_commands_name_this_distribution() -> None:
    """The name `penstock` belongs to another distribution on the package index."""
    actual = [
        (path, requirement) for path in TEXT_FILES for requirement in requirements_in(path.read_text("utf-8"))
    ]
    assert {"errors.py", "getting-started.md", "server.md", "features.md", "about_penstock.txt"} <= {
        path.name for path, _ in actual
    }
    for path, (name, extras) in actual:
        assert name in (DISTRIBUTION, "."), (path, name)
        unknown_extras = {*filter(None, extras.split(","))} - {*EXTRAS}
        assert unknown_extras <= ({"{extra}"} if path.name == "errors.py" else set()), (path, extras)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pip install 'penstock[serve]'", [("penstock", "serve")]),
        ("Run `pip install penstock`.", [("penstock", "")]),
        ("pip install -c constraints.txt -e '.[dev]'", [(".", "dev")]),
        ('"pip install --no-deps penstock",', [("penstock", "")]),
        ("pip install /opt/penstock\npip install torch # penstock", []),
    ],
)
def test_requirements_are_found_in_texts(text: str, expected: list[tuple[str, str]]) -> None:
    assert requirements_in(text) == expected


def test_scripts_name_wheels_after_the_distribution() -> None:
    prefix = f"{DISTRIBUTION.replace('-', '_')}-"
    for path in ("scripts/wheel", "packaging/try_wheel.py"):
        names = re.findall(r"\bpenstock[\w]*-(?=\*|\()", (ROOT / path).read_text())
        assert {*names} == {prefix}, path


def test_all_requirements_except_the_listed_ones_are_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned_names = requirement_names([line for line in lines if line and not line.startswith("#")])
    required_names = requirement_names(
        [requirement for extra in EXTRAS.values() for requirement in extra] + PROJECT["dependencies"]
    )
    unpinned_names = requirement_names(
        EXTRAS["fast-http"] + EXTRAS["parquet"] + EXTRAS["slow-tokenizers"]
    ) - {"transformers"}
    unpinned_names |= requirement_names(EXTRAS["cuda"])  # the CUDA build of torch pins the version of triton
    assert required_names - unpinned_names - pinned_names == {PROJECT["name"]}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_valid_bash(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_files_copied_into_the_image_exist_and_are_not_ignored() -> None:
    dockerignore_lines = (ROOT / ".dockerignore").read_text().split()
    assert dockerignore_lines[0] == "*"
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, flags=re.MULTILINE)
    sources = [source for line in copies for source in line.split()]
    assert {"penstock", "pyproject.toml", "CMakeLists.txt"} <= {*sources}
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in dockerignore_lines, f"{source} is excluded by .dockerignore"


def test_the_image_starts_a_server_as_user_penstock_and_probes_an_existing_route() -> None:
    command = re.findall(r'"([^"]*)"', DOCKERFILE[DOCKERFILE.index("ENTRYPOINT") :])
    result = CliRunner().invoke(cli, [*command[1:], "--print-config"])
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^host +0\.0\.0\.0 +flag$", result.stdout, flags=re.MULTILINE)
    (port,) = re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, flags=re.MULTILINE)
    assert int(port) == ServeConfig().port
    probed_paths = re.findall(rf"http://127\.0\.0\.1:{port}(/\w+)", DOCKERFILE)
    assert set(probed_paths) <= {route.path for route in router.routes}  # type: ignore[attr-defined]
    assert probed_paths
    assert re.findall(r"^USER (.*)$", DOCKERFILE, flags=re.MULTILINE) == ["penstock"]


def test_both_stages_of_the_dockerfile_start_from_the_same_image() -> None:
    base_images = re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)
    assert base_images == ["$BASE", "$BASE"]
    assert "ARG BASE=python:" in DOCKERFILE[: DOCKERFILE.index("FROM $BASE")]


def test_the_dockerfile_uses_no_features_that_older_versions_of_docker_lack() -> None:
    """Older versions of Docker do not support `--start-interval`, heredocs and `RUN --mount`."""
    (flags,) = re.findall(r"^HEALTHCHECK((?: --\S+)+)", DOCKERFILE, flags=re.MULTILINE)
    names = set(re.findall(r"--([\w-]+)=", flags))
    assert names <= {"interval", "timeout", "start-period", "retries"}
    assert "start-period" in names
    assert not re.search(r"<<|RUN --", DOCKERFILE)


def test_the_image_installs_the_requirements_of_the_project(tmp_path: Path) -> None:
    """The list of packages is computed from pyproject.toml, before the source is copied."""
    (code,) = re.findall(
        r'^RUN python -c "(.*?)" > (?=/source/needed\.txt)', DOCKERFILE, re.MULTILINE | re.DOTALL
    )
    code = code.replace("\\\n", "").replace("/source/", f"{ROOT}/")
    printed_requirements = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed_requirements.split("\n")[:-1] == [
        *PROJECT["dependencies"],
        *EXTRAS["serve"],
        *EXTRAS["grammar"],
    ]


def test_a_source_change_does_not_reinstall_packages() -> None:
    steps = [step.partition("\n")[0] for step in re.split(r"\n(?=[A-Z]+ )", DOCKERFILE)]
    source = steps.index("COPY penstock /source/penstock")
    install_steps = [
        number for number, step in enumerate(steps) if "pip install" in step or "RUN python -c" in step
    ]
    assert len([number for number in install_steps if number < source]) == 2
    (last_install,) = [steps[number] for number in install_steps if number > source]
    assert "--no-deps" in last_install


def test_the_image_build_fails_without_cpp_kernels() -> None:
    """By default, a failed kernel build is ignored. The Dockerfile passes a setting that overrides this."""
    (override,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["overrides"]
    assert override == {"if": {"failed": True}, "wheel": {"cmake": False}}
    assert "-C wheel.cmake=true" in DOCKERFILE
    assert "kernels.isa() != 'none'" in DOCKERFILE


def test_the_systemd_unit_starts_a_server_and_waits_for_its_exit() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", SYSTEMD_UNIT, flags=re.MULTILINE))
    program, *arguments = shlex.split(settings["ExecStart"])
    assert Path(program).name == "penstock"
    assert CliRunner().invoke(cli, [*arguments, "--print-config"]).exit_code == 0
    assert float(settings["TimeoutStopSec"]) > ServeConfig().shutdown_grace
    known_names = {f"PENSTOCK_{field.name.upper()}" for field in (*config_fields(), *serve_fields())}
    assert set(re.findall(r"\bPENSTOCK_\w+", SYSTEMD_UNIT)) <= known_names
    assert settings["RestartPreventExitStatus"] == "2"


def test_an_installed_torch_is_shared_with_the_new_environment(tmp_path: Path) -> None:
    """The new environment imports the torch of the given Python, and its constraints do not pin torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "new")], check=True)
    completed = run_in_scripts(f"share_torch {sys.executable} {tmp_path}/new; constraints_of {tmp_path}/new")
    constraints = Path(completed.stdout.strip())
    assert constraints.parent == tmp_path / "new"
    all_constraints = (ROOT / "constraints.txt").read_text()
    assert constraints.read_text() == re.sub(r"^torch==.*\n", "", all_constraints, flags=re.MULTILINE)
    code = "import importlib.util as u; print(u.find_spec('torch').origin)"
    actual = [
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        for python in (sys.executable, str(tmp_path / "new" / "bin" / "python"))
    ]
    assert actual[0] == actual[1]


def test_without_an_installed_torch_the_constraints_are_unchanged(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "new")], check=True)
    completed = run_in_scripts(
        f"share_torch {tmp_path}/new/bin/python {tmp_path}/new; constraints_of {tmp_path}/new"
    )
    assert completed.stdout == "constraints.txt\n"
    assert completed.stderr == ""


@pytest.mark.parametrize(
    ("tags", "is_refused"),
    [([], False), (["v1.2.3"], False), (["nightly"], False), (["v1.2.4"], True)],
    ids=str,
)
def test_a_release_tag_must_equal_the_version(tmp_path: Path, tags: list[str], is_refused: bool) -> None:
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    for tag in tags:
        subprocess.run([*git, "tag", tag], check=True)
    completed = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source {ROOT}/scripts/release.sh; check_tag"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed.returncode != 0) == is_refused
    assert ("the tag v1.2.4 is not v1.2.3" in completed.stderr) == is_refused


def run_in_scripts(commands: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source scripts/share_torch.sh; {commands}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
