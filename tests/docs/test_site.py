"""The pages make a site: every page and public name is in it, and every link and anchor leads somewhere."""

from __future__ import annotations

import re
import shutil
from importlib import import_module
from pathlib import Path

import pytest
from support.documents import ROOT

OF_TORCH = {"penstock.driver.Buffer", "penstock.driver.Tensor"}


def build(docs: Path, site_dir: Path, **settings: object) -> None:
    config = pytest.importorskip("mkdocs.config", reason="needs the extra docs")
    from mkdocs.commands.build import build as build_site
    from mkdocs.exceptions import Abort

    site = config.load_config(
        str(ROOT / "mkdocs.yml"), strict=True, docs_dir=str(docs), site_dir=str(site_dir), **settings
    )
    try:
        build_site(site)
    except Abort as problem:
        raise AssertionError(str(problem)) from problem


def public_names(module_name: str) -> set[str]:
    """Return the public names of a module: those of ``__all__``, or else those that it defines."""
    module = import_module(module_name)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return {f"{module_name}.{name}" for name in names if not name.startswith("__")}


def test_the_site(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    docs = ROOT / "docs"
    build(docs, tmp_path)
    pages = {page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.md")} - {"index"}
    built = {page.parent.relative_to(tmp_path).as_posix() for page in tmp_path.rglob("index.html")}
    assert pages <= built
    index, settings = (docs / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    assert all(f"({page}.md)" in index and f"{page}.md" in settings for page in pages)

    reference = (docs / "reference").glob("*.md")
    modules = {
        name for page in reference for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
    }
    html = "".join(page.read_text() for page in (tmp_path / "reference").rglob("index.html"))
    shown = set(re.findall(r'id="([^"]+)"', html))
    assert {"penstock", "penstock.pipelines", "penstock.pipelines.core"} <= modules
    for module in modules:
        assert public_names(module) - OF_TORCH <= shown


@pytest.mark.parametrize("link", ["[a](nowhere.md)", "[a](features.md#nowhere)", "[a](../README.md)"])
def test_a_link_to_nowhere_is_noticed(tmp_path: Path, link: str) -> None:
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = docs / "design.md"
    page.write_text(f"{page.read_text()}\n{link}\n")
    with pytest.raises(AssertionError, match="strict"):
        build(docs, tmp_path / "site", plugins=["search"])
