"""`resolve_codec`: uses a local folder, or downloads safetensors files or ``pytorch_model.bin``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from penstock.errors import CheckpointError, CheckpointNotFoundError
from penstock.weights.hub import resolve_codec


@pytest.mark.parametrize(
    ("remote_files", "num_requests"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], 1),
        (["config.json", "pytorch_model.bin"], 2),
    ],
)
def test_only_the_required_files_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote_files: list[str], num_requests: int
) -> None:
    patterns = []

    def download(model_id: str, *, revision: str, allow_patterns: list[str], **_: Any) -> str:
        assert (model_id, revision) == ("someone/codec", "v1")
        patterns.append(allow_patterns)
        for name in remote_files:
            if any(Path(name).match(pattern) for pattern in allow_patterns):
                (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_codec("someone/codec", "v1") == tmp_path
    assert len(patterns) == num_requests
    assert {file.name for file in tmp_path.iterdir()} == set(remote_files[:2])


def test_a_path_is_used_or_refused_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such folder"):
        resolve_codec(str(tmp_path / "none"))
    with pytest.raises(CheckpointNotFoundError, match="neither a folder nor a hub id"):
        resolve_codec("a b")
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        resolve_codec(str(tmp_path))
    (tmp_path / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"neither \*\.safetensors nor pytorch_model\.bin"):
        resolve_codec(str(tmp_path))
    (tmp_path / "pytorch_model.bin").touch()
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_codec(f"./{tmp_path.name}") == tmp_path
