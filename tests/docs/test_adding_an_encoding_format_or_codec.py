"""The checks of the pages on encodings, checkpoint formats and codecs pass.

The checks of the pages on formats and codecs detect errors. A registry discovers the format of the page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.documents import ROOT

from penstock.errors import ConfigError
from penstock.weights.formats import FORMATS, FormatRegistry
from penstock.weights.formats.plain import PlainFormat

PAGES = {
    "adding-an-encoding": "10\n",
    "adding-a-checkpoint-format": "same text\n",
    "adding-a-codec": "wavetable 1000.0 72\n",
}


def write_files(page: str, folder: Path) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for name, code in re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)


def run_check(folder: Path) -> None:
    exec(compile((folder / "check.py").read_text(), "check.py", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES)
def test_the_check_of_the_page_prints_its_result(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    run_check(tmp_path)
    assert capsys.readouterr().out == PAGES[page]


def test_the_check_detects_a_format_that_reads_wrong_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files("adding-a-checkpoint-format", tmp_path)
    file = tmp_path / "formats" / "codes.py"
    file.write_text(file.read_text().replace('{"weight": codes,', '{"weight": codes.flip(0),'))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        run_check(tmp_path)


@pytest.mark.parametrize(
    ("code", "faulty_code"),
    [
        ("left_context = right_context = 1", "left_context = right_context = 0"),
        ("padding=TAPS // 2", "padding=TAPS // 2 - 1"),
    ],
)
def test_the_check_detects_an_error_in_a_codec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, faulty_code: str
) -> None:
    write_files("adding-a-codec", tmp_path)
    file = tmp_path / "codecs" / "wavetable" / "model.py"
    assert code in file.read_text()
    file.write_text(file.read_text().replace(code, faulty_code))
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, RuntimeError)):
        run_check(tmp_path)


def test_a_registry_discovers_the_formats_of_a_folder_and_detects_them(tmp_path: Path) -> None:
    write_files("adding-a-checkpoint-format", tmp_path)
    registry = FormatRegistry([tmp_path / "formats"])
    names = [record.name for record in registry.formats]
    assert names == [*sorted(["codes", *(record.name for record in FORMATS.formats[:-1])]), "plain"]
    assert {"gguf", "mxfp4", "fp8"} < set(names)
    config = {"quantization_config": {"quant_method": "codes"}}
    assert registry.detect(config, {}).name == "codes"
    assert isinstance(registry.detect({}, {}), PlainFormat)
    with pytest.raises(
        ConfigError, match=r"checkpoints of 'codes' cannot be read: use one of plain floats, .*mxfp4"
    ):
        FORMATS.detect(config, {})
