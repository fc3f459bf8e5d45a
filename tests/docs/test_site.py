"""The documentation site has every page and public name, and every link within the site has a target.

The default run checks the sources of the pages. With `--slow`, the site is built with mkdocs and the result
is checked.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import pytest
from support.documents import ROOT

INTERNAL_PACKAGES = {
    "penstock.architectures",
    "penstock.assembly",
    "penstock.config",
    "penstock.media",
    "penstock.memory",
    "penstock.worker",
}
"""Packages that only developer pages import. `penstock.pipelines.config` has the public configuration."""
MEMBERS_FROM_TORCH = {"penstock.driver.Buffer", "penstock.driver.Tensor"}


def build_site(docs: Path, site_dir: Path, **settings: object) -> None:
    config = pytest.importorskip("mkdocs.config", reason="needs the extra docs")
    from mkdocs.commands.build import build as build_with_mkdocs
    from mkdocs.exceptions import Abort

    site = config.load_config(
        str(ROOT / "mkdocs.yml"), strict=True, docs_dir=str(docs), site_dir=str(site_dir), **settings
    )
    try:
        build_with_mkdocs(site)
    except Abort as problem:
        raise AssertionError(str(problem)) from problem


def public_names(module_name: str) -> set[str]:
    """Return the names in a module's ``__all__``, or the public names that a module without it defines."""
    module = import_module(module_name)
    own_names = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module_name and not isinstance(value, TypeVar)
    ]
    names = getattr(module, "__all__", [name for name in own_names if not name.startswith("_")])
    return {f"{module_name}.{name}" for name in names if not name.startswith("__")}


def page_names(docs: Path) -> set[str]:
    """Return the pages other than the index, without suffix."""
    return {page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.md")} - {"index"}


def reference_modules() -> set[str]:
    """Return the modules whose public names are on the reference pages."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return {name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)}


def heading_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = [heading.lower() for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in headings}


def find_broken_links(docs: Path) -> list[str]:
    """Return the links of all pages whose page or anchor is missing."""
    missing_targets = []
    for page in sorted(docs.rglob("*.md")):
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            is_inside = target.is_relative_to(docs.resolve()) or target == page
            if not link.startswith(("http:", "https:", "mailto:")) and not (
                is_inside and target.is_file() and (not anchor or anchor in heading_anchors(target))
            ):
                missing_targets.append(f"{page.name}: {link}")
    return missing_targets


def test_every_page_is_in_the_index_and_in_the_navigation() -> None:
    docs = ROOT / "docs"
    index, settings = (docs / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    assert all(f"({page}.md)" in index and f"{page}.md" in settings for page in page_names(docs))


def test_public_packages_imported_by_pages_and_examples_are_in_the_reference() -> None:
    files = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("*.py")]
    imports = re.compile(r"^(?:from|import) (penstock[\w.]*)", re.MULTILINE)
    imported_packages = package_names(
        module for file in files for module in imports.findall(file.read_text())
    )
    assert {"penstock.ray", "penstock.nn", "penstock.kernels"} <= imported_packages
    assert imported_packages - package_names(reference_modules()) == INTERNAL_PACKAGES


def package_names(modules: Iterable[str]) -> set[str]:
    """Return the module names, each truncated to its first two parts."""
    return {".".join(module.split(".")[:2]) for module in modules}


def test_every_link_within_the_site_has_a_target() -> None:
    assert not find_broken_links(ROOT / "docs")


@pytest.mark.parametrize(
    "link", ["[a](nowhere.md)", "[a](features.md#nowhere)", "[a](../README.md)", "[a](#none)"]
)
def test_a_broken_link_is_reported(tmp_path: Path, link: str) -> None:
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = docs / "design.md"
    page.write_text(f"{page.read_text()}\n{link}\n")
    assert find_broken_links(docs) == [f"design.md: {link[4:-1]}"]


@pytest.mark.slow
def test_the_built_site_has_every_page_and_name(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    docs = ROOT / "docs"
    build_site(docs, tmp_path)
    built_folders = {page.parent.relative_to(tmp_path).as_posix() for page in tmp_path.rglob("index.html")}
    assert page_names(docs) <= built_folders
    modules = reference_modules()
    html = "".join(page.read_text() for page in (tmp_path / "reference").rglob("index.html"))
    shown_ids = set(re.findall(r'id="([^"]+)"', html))
    for module in modules:
        assert public_names(module) - MEMBERS_FROM_TORCH <= shown_ids


@pytest.mark.slow
@pytest.mark.parametrize("link", ["[a](nowhere.md)", "[a](features.md#nowhere)", "[a](../README.md)"])
def test_the_build_fails_on_a_broken_link(tmp_path: Path, link: str) -> None:
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = docs / "design.md"
    page.write_text(f"{page.read_text()}\n{link}\n")
    with pytest.raises(AssertionError, match="strict"):
        build_site(docs, tmp_path / "site", plugins=["search"])
