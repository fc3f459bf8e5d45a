"""The pages make a site: every page is in it, and every link and anchor leads somewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.documents import ROOT


def build(folder: Path) -> None:
    config = pytest.importorskip("mkdocs.config", reason="needs the extra docs")
    from mkdocs.commands.build import build as build_site
    from mkdocs.exceptions import Abort

    site = config.load_config(str(folder / "mkdocs.yml"), strict=True, site_dir=str(folder / "site"))
    try:
        build_site(site)
    except Abort as problem:
        raise AssertionError(str(problem)) from problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


def test_the_site(folder: Path) -> None:
    build(folder)
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    built = {page.parent.name for page in (folder / "site").glob("*/index.html")}
    assert pages <= built
    index = (folder / "docs" / "index.md").read_text()
    assert all(
        f"({page}.md)" in index and f"{page}.md" in (folder / "mkdocs.yml").read_text() for page in pages
    )


@pytest.mark.parametrize("link", ["[a](nowhere.md)", "[a](features.md#nowhere)", "[a](../README.md)"])
def test_a_link_to_nowhere_is_noticed(folder: Path, link: str) -> None:
    page = folder / "docs" / "design.md"
    page.write_text(f"{page.read_text()}\n{link}\n")
    with pytest.raises(AssertionError, match="strict"):
        build(folder)
