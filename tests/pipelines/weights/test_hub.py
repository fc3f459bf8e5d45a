"""From a name to a folder. The hub itself is never reached: its client is replaced, or offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from penstock.errors import CheckpointError, CheckpointNotFoundError
from penstock.pipelines.weights import hub
from penstock.pipelines.weights.hub import resolve_checkpoint

Download = Callable[..., str]


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        pytest.fail(f"asked the hub for {args}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.usefixtures("no_download")
class TestLocal:
    def test_a_folder(self, tmp_path: Path) -> None:
        folder = touch(tmp_path / "m", "config.json", "model.safetensors")
        assert resolve_checkpoint(str(folder)) == folder

    def test_the_home_folder_and_relative_paths(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = touch(tmp_path / "m", "config.json", "model.safetensors")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        assert resolve_checkpoint("~/m") == resolve_checkpoint("./m") == resolve_checkpoint("m") == folder

    def test_demo_is_the_embedded_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert hub._DEMO_FOLDER == Path(hub.__file__).parents[2] / "demo"
        folder = touch(tmp_path / "embedded", "config.json", "model.safetensors")
        monkeypatch.setattr(hub, "_DEMO_FOLDER", folder)
        touch(tmp_path / "demo", "config.json", "model.safetensors")
        monkeypatch.chdir(tmp_path)
        assert resolve_checkpoint("demo") == folder
        assert resolve_checkpoint("./demo") == tmp_path / "demo"

    @pytest.mark.parametrize(
        "path", ["/no/such", "./gone", "~/gone", "~nobody/gone", "a/b/c", "../gone", "/" + "x" * 500]
    )
    def test_what_looks_like_a_path_never_goes_to_the_hub(self, path: str) -> None:
        with pytest.raises(CheckpointNotFoundError, match="no such folder: give the path"):
            resolve_checkpoint(path)

    @pytest.mark.parametrize("name", ["", "a b", "model/", "a\x00b", "namespace/na me", "-x"])
    def test_what_is_neither_path_nor_id(self, name: str) -> None:
        with pytest.raises(CheckpointNotFoundError, match="is neither a folder nor a hub id"):
            resolve_checkpoint(name)

    def test_a_file_names_its_folder(self, tmp_path: Path) -> None:
        touch(tmp_path, "model.safetensors")
        with pytest.raises(CheckpointError, match=f"is a file: give the folder .*, {tmp_path}$"):
            resolve_checkpoint(str(tmp_path / "model.safetensors"))

    @pytest.mark.parametrize(
        ("files", "problem"),
        [
            ((), "is empty"),
            (("notes.txt",), "it has no config.json"),
            (("model.safetensors",), "it has no config.json"),
            (("config.json",), "has no weights"),
            (("config.json", "pytorch_model.bin"), "pickled weights only .* convert the model"),
            (("model.gguf",), "GGUF weights only: give a folder with config.json"),
            (("config.json", "model.gguf"), "GGUF weights only"),
            (("adapter_config.json", "adapter_model.safetensors"), "is a LoRA adapter"),
        ],
    )
    def test_a_folder_that_is_no_checkpoint(
        self, tmp_path: Path, files: tuple[str, ...], problem: str
    ) -> None:
        with pytest.raises(CheckpointError, match=problem) as error:
            resolve_checkpoint(str(touch(tmp_path / "m", *files)))
        assert str(error.value).startswith(str(tmp_path / "m"))
        assert "\n" not in str(error.value)


class TestHub:
    def test_a_model_is_downloaded_in_its_revision(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []

        def download(model_id: str, **options: Any) -> str:
            asked.append((model_id, options["revision"]))
            assert "*.safetensors" in options["allow_patterns"]
            assert not any(pattern.endswith(".bin") for pattern in options["allow_patterns"])
            return str(touch(tmp_path / "snapshot", "config.json", "model.safetensors"))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve_checkpoint("name/space", "v1") == tmp_path / "snapshot"
        assert resolve_checkpoint("gpt2") == tmp_path / "snapshot"
        assert asked == [("name/space", "v1"), ("gpt2", "main")]

    def test_a_model_without_safetensors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        snapshot = str(touch(tmp_path / "snapshot", "config.json"))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: snapshot)
        with pytest.raises(CheckpointError, match="name/space: has no safetensors weights on the hub"):
            resolve_checkpoint("name/space")

    def test_offline_and_never_downloaded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(CheckpointNotFoundError, match="switched off: give the path of a local") as error:
            resolve_checkpoint("nobody/nothing")
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("kind", "advice"),
        [
            (errors.GatedRepoError, "accept its terms at https://huggingface.co/a/b"),
            (errors.RepositoryNotFoundError, "no such model on the hub"),
            (errors.RevisionNotFoundError, "has no revision 'v9'"),
            (errors.LocalEntryNotFoundError, "cannot be reached or is switched off"),
            (errors.OfflineModeIsEnabled, "cannot be reached or is switched off"),
            (errors.HFValidationError, "not a valid hub id"),
            (httpx.ReadTimeout, "cannot be downloaded from the hub: first line$"),
            (OSError, "cannot be downloaded from the hub: first line$"),
        ],
    )
    def test_each_failure_says_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], advice: str
    ) -> None:
        text = "first line\nsecond line"
        if issubclass(kind, errors.HfHubHTTPError):
            response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
            problem: Exception = kind(text, response=response)  # type: ignore[call-arg]
        else:
            problem = kind(text)

        def download(*args: Any, **options: Any) -> str:
            raise problem

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(CheckpointNotFoundError, match=advice) as error:
            resolve_checkpoint("a/b", "v9")
        assert str(error.value).startswith("a/b: ")
        assert "\n" not in str(error.value)
