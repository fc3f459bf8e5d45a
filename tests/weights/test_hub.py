"""Resolution of model names to folders and GGUF files, with a fake or offline client of the hub."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from penstock.errors import CheckpointError, CheckpointNotFoundError
from penstock.weights import hub
from penstock.weights.hub import resolve_checkpoint


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        pytest.fail(f"the hub was called with {args}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def create_files(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.usefixtures("no_download")
class TestLocal:
    def test_a_folder_is_returned_unchanged(self, tmp_path: Path) -> None:
        folder = create_files(tmp_path / "m", "config.json", "model.safetensors")
        assert resolve_checkpoint(str(folder)) == folder

    def test_home_and_relative_paths_are_resolved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = create_files(tmp_path / "m", "config.json", "model.safetensors")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        assert resolve_checkpoint("~/m") == resolve_checkpoint("./m") == resolve_checkpoint("m") == folder

    def test_demo_names_resolve_to_the_demo_models_and_paths_to_folders(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert hub._DEMO_FOLDER == Path(hub.__file__).parents[1] / "demo"
        folder = create_files(tmp_path / "demo-model", "config.json", "model.safetensors")
        monkeypatch.setitem(hub._INCLUDED_MODELS, "demo", folder)
        create_files(tmp_path / "demo", "config.json", "model.safetensors")
        monkeypatch.chdir(tmp_path)
        assert resolve_checkpoint("demo") == folder
        assert resolve_checkpoint("./demo") == tmp_path / "demo"
        assert resolve_checkpoint("demo-voice") == hub._DEMO_FOLDER / "voice"
        assert resolve_checkpoint("demo-vision") == hub._DEMO_FOLDER / "vision"

    @pytest.mark.parametrize(
        "path", ["/no/such", "./gone", "~/gone", "~nobody/gone", "a/b/c", "../gone", "/" + "x" * 500]
    )
    def test_paths_are_never_searched_on_the_hub(self, path: str) -> None:
        with pytest.raises(CheckpointNotFoundError, match="no such folder or GGUF file: use the path"):
            resolve_checkpoint(path)

    @pytest.mark.parametrize("name", ["", "a b", "model/", "a\x00b", "namespace/na me", "-x"])
    def test_an_invalid_name_is_refused(self, name: str) -> None:
        with pytest.raises(CheckpointNotFoundError, match="is neither a folder nor a hub id"):
            resolve_checkpoint(name)

    def test_the_error_for_a_weight_file_names_its_folder(self, tmp_path: Path) -> None:
        create_files(tmp_path, "model.safetensors")
        with pytest.raises(CheckpointError, match=f"is a file: use the folder .*, {tmp_path}$"):
            resolve_checkpoint(str(tmp_path / "model.safetensors"))

    @pytest.mark.parametrize(
        ("files", "problem"),
        [
            ((), "is empty"),
            (("notes.txt",), "it has no config.json"),
            (("model.safetensors",), "it has no config.json"),
            (("config.json",), "has no weights"),
            (("config.json", "pytorch_model.bin"), "only pickled weights .* convert the model"),
            (("a.gguf", "b.gguf"), "has 2 matching GGUF files.* --gguf-file: a.gguf, b.gguf$"),
            (("config.json", "mmproj-a.gguf"), "has no weights"),
            (("m-00001-of-00002.gguf", "x.gguf"), "has 2 matching GGUF files"),
            (("adapter_config.json", "adapter_model.safetensors"), "is a LoRA adapter"),
        ],
    )
    def test_a_folder_without_one_usable_checkpoint_is_refused(
        self, tmp_path: Path, files: tuple[str, ...], problem: str
    ) -> None:
        with pytest.raises(CheckpointError, match=problem) as error:
            resolve_checkpoint(str(create_files(tmp_path / "m", *files)))
        assert str(error.value).startswith(str(tmp_path / "m"))
        assert "\n" not in str(error.value)


@pytest.mark.usefixtures("no_download")
class TestLocalGGUF:
    def test_a_gguf_file_that_matches_the_selection_is_returned_unchanged(self, tmp_path: Path) -> None:
        create_files(tmp_path, "a.gguf", "b.GGUF", "config.json", "model.safetensors")
        for name in ("a.gguf", "b.GGUF"):
            assert resolve_checkpoint(str(tmp_path / name)) == tmp_path / name
        assert resolve_checkpoint(str(tmp_path / "a.gguf"), gguf_file="a") == tmp_path / "a.gguf"
        with pytest.raises(CheckpointError, match="does not match --gguf-file 'Q4_0'"):
            resolve_checkpoint(str(tmp_path / "a.gguf"), gguf_file="Q4_0")

    @pytest.mark.parametrize(
        ("files", "selection", "expected"),
        [
            (("m.gguf",), None, "m.gguf"),
            (("m.gguf", "mmproj-m-f16.gguf", "config.json"), None, "m.gguf"),
            (("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"), None, "m-00001-of-00002.gguf"),
            (("m-Q4_K_M.gguf", "m-Q8_0.gguf"), "q8_0", "m-Q8_0.gguf"),
            (("m-Q4_K.gguf", "m-Q4_K_M.gguf"), "m-Q4_K.gguf", "m-Q4_K.gguf"),
            (("m-Q4_K.gguf", "m-Q4_K_M.gguf"), "Q4_K", "m-Q4_K.gguf"),
            (("m.F16.gguf", "m.BF16.gguf"), "f16", "m.F16.gguf"),
            (
                ("m-Q2_K-00001-of-00002.gguf", "m-Q2_K-00002-of-00002.gguf", "m-Q2_K_L.gguf"),
                "Q2_K",
                "m-Q2_K-00001-of-00002.gguf",
            ),
            (("config.json", "model.safetensors", "m.gguf"), "m.gguf", "m.gguf"),
            (("config.json", "model.safetensors", "m.gguf"), None, ""),  # safetensors are preferred
        ],
    )
    def test_a_folder_resolves_to_its_selected_or_only_gguf_file(
        self, tmp_path: Path, files: tuple[str, ...], selection: str | None, expected: str
    ) -> None:
        assert (
            resolve_checkpoint(str(create_files(tmp_path, *files)), gguf_file=selection)
            == tmp_path / expected
        )

    @pytest.mark.parametrize(
        ("files", "selection", "problem"),
        [
            (("a-Q4_0.gguf", "b-Q4_0.gguf"), "Q4_0", "2 matching GGUF files: .*: a-Q4_0.gguf, b-Q4_0.gguf$"),
            (("a-Q4_0.gguf",), "Q5_0", "has no GGUF file 'Q5_0': choose one of a-Q4_0.gguf$"),
            (
                ("config.json", "model.safetensors"),
                "Q5_0",
                "has no GGUF file that matches --gguf-file 'Q5_0'",
            ),
            (
                tuple(f"{i:02}.gguf" for i in range(25)),
                None,
                "has 25 matching GGUF files: .* 19.gguf and 5 more$",
            ),
        ],
    )
    def test_no_match_or_several_matches_are_refused(
        self, tmp_path: Path, files: tuple[str, ...], selection: str | None, problem: str
    ) -> None:
        with pytest.raises(CheckpointError, match=problem):
            resolve_checkpoint(str(create_files(tmp_path, *files)), gguf_file=selection)

    def test_the_error_for_a_later_part_names_the_first_part(self, tmp_path: Path) -> None:
        create_files(tmp_path, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
        with pytest.raises(CheckpointError, match=r"use its first part, m-00001-of-00002\.gguf"):
            resolve_checkpoint(str(tmp_path / "m-00002-of-00002.gguf"))

    def test_a_gguf_selection_for_the_demo_model_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match="has no GGUF file"):
            resolve_checkpoint("demo", gguf_file="Q4_0")


class FakeHub:
    """A fake hub client with one repository, which records the names of the downloaded files."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str, is_online: bool = True
    ) -> None:
        self.folder, self.names, self.is_online = folder, names, is_online
        self.downloaded: set[str] = set()
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", self.list_repo_files)

    def list_repo_files(self, model_id: str, *, revision: str) -> list[str]:
        assert revision == "v1"
        if not self.is_online:
            raise errors.OfflineModeIsEnabled("off")
        return list(self.names)

    def snapshot_download(
        self, model_id: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        assert revision == "v1"
        selection = filter_repo_objects(
            self.names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for name in selection if self.is_online else ():
            self.downloaded.add(name)
            (self.folder / name).parent.mkdir(exist_ok=True, parents=True)
            create_files(self.folder / Path(name).parent, Path(name).name)
        self.folder.mkdir(exist_ok=True)
        return str(self.folder)


class TestHubGGUF:
    FILES = ("README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m.gguf")

    def test_only_the_selected_gguf_file_and_the_tokenizer_are_downloaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub = FakeHub(monkeypatch, tmp_path / "m", *self.FILES, "tokenizer.json")
        assert resolve_checkpoint("a/b", "v1", "q4_k_m") == tmp_path / "m" / "m-Q4_K_M.gguf"
        assert hub.downloaded == {"m-Q4_K_M.gguf", "tokenizer.json"}

    def test_several_gguf_files_without_a_selection_are_refused_before_a_download(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub = FakeHub(monkeypatch, tmp_path / "m", *self.FILES)
        with pytest.raises(
            CheckpointError, match=r"a/b: has 2 matching GGUF files: .*: m-Q4_K_M.gguf, m-Q8_0.gguf$"
        ):
            resolve_checkpoint("a/b", "v1")
        assert not hub.downloaded

    def test_a_single_gguf_file_needs_no_selection(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        FakeHub(monkeypatch, tmp_path / "m", "m-Q8_0.gguf")
        assert resolve_checkpoint("a/b", "v1") == tmp_path / "m" / "m-Q8_0.gguf"

    def test_safetensors_are_preferred_to_gguf(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = FakeHub(monkeypatch, tmp_path / "m", *self.FILES, "config.json", "model.safetensors")
        assert resolve_checkpoint("a/b", "v1") == tmp_path / "m"
        assert hub.downloaded == {"config.json", "model.safetensors"}

    def test_a_selected_gguf_file_is_preferred_to_safetensors(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub = FakeHub(monkeypatch, tmp_path / "m", *self.FILES, "config.json", "model.safetensors")
        resolve_checkpoint("a/b", "v1", "Q8_0")
        assert hub.downloaded == {"config.json", "m-Q8_0.gguf"}

    def test_all_parts_of_the_selected_file_are_downloaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        part_names = tuple(f"Q8_0/m-Q8_0-{i:05}-of-00003.gguf" for i in (1, 2, 3))
        hub = FakeHub(monkeypatch, tmp_path / "m", *part_names, "Q4_0/m-Q4_0-00001-of-00001.gguf")
        assert resolve_checkpoint("a/b", "v1", "Q8_0") == tmp_path / "m" / part_names[0]
        assert hub.downloaded == set(part_names)

    def test_the_local_cache_is_used_offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeHub(monkeypatch, create_files(tmp_path, "m-Q8_0.gguf"), *self.FILES, is_online=False)
        assert resolve_checkpoint("a/b", "v1") == tmp_path / "m-Q8_0.gguf"
        with pytest.raises(CheckpointError, match=r"has no GGUF file 'Q4_K_M': choose one of m-Q8_0.gguf$"):
            resolve_checkpoint("a/b", "v1", "Q4_K_M")

    def test_an_incomplete_download_is_refused_offline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        FakeHub(monkeypatch, create_files(tmp_path, "config.json", "m-1.safetensors"), is_online=False)
        index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-3.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(
            CheckpointError,
            match=r"a/b: 2 of 3 weight files are not .*\(m-2.safetensors, .*run once with a connection",
        ):
            resolve_checkpoint("a/b", "v1")


class TestHub:
    def test_modules_and_heads_are_downloaded_with_the_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module_files = {"config.json", "modules.json", "1_Pooling/config.json", "2_Dense/pytorch_model.bin"}
        head_files = {"sparse_linear.pt", "colbert_linear.pt"}
        other_files = {"pytorch_model.bin", "optimizer.pt", "onnx/model.onnx"}
        expected = module_files | head_files | {"model.safetensors"}
        hub = FakeHub(monkeypatch, tmp_path / "m", *expected, *other_files)
        assert resolve_checkpoint("a/b", "v1") == tmp_path / "m"
        assert hub.downloaded == expected

    def test_the_requested_revision_is_downloaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        downloads: list[Any] = []

        def download(model_id: str, **options: Any) -> str:
            downloads.append((model_id, options["revision"]))
            assert "*.safetensors" in options["allow_patterns"]
            assert not any(fnmatch("pytorch_model.bin", pattern) for pattern in options["allow_patterns"])
            return str(create_files(tmp_path / "snapshot", "config.json", "model.safetensors"))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve_checkpoint("name/space", "v1") == tmp_path / "snapshot"
        assert resolve_checkpoint("gpt2") == tmp_path / "snapshot"
        assert downloads == [("name/space", "v1"), ("gpt2", "main")]

    def test_a_model_without_safetensors_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        snapshot = str(create_files(tmp_path / "snapshot", "config.json"))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: snapshot)
        with pytest.raises(CheckpointError, match="name/space: has no safetensors weights on the hub"):
            resolve_checkpoint("name/space")

    def test_a_model_that_is_not_cached_is_refused_offline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(CheckpointNotFoundError, match="is disabled: use the path of a local") as error:
            resolve_checkpoint("nobody/nothing")
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("error_type", "advice"),
        [
            (errors.GatedRepoError, "accept its terms at https://huggingface.co/a/b"),
            (errors.RepositoryNotFoundError, "no such model on the hub"),
            (errors.RevisionNotFoundError, "has no revision 'v9'"),
            (errors.LocalEntryNotFoundError, "cannot be reached or is disabled"),
            (errors.OfflineModeIsEnabled, "cannot be reached or is disabled"),
            (errors.HFValidationError, "not a valid hub id"),
            (httpx.ReadTimeout, "cannot be downloaded from the hub .finished files are kept.*: first line$"),
            (OSError, "cannot be downloaded from the hub .finished files are kept.*: first line$"),
        ],
    )
    def test_each_download_error_has_advice(
        self, monkeypatch: pytest.MonkeyPatch, error_type: type[Exception], advice: str
    ) -> None:
        text = "first line\nsecond line"
        if issubclass(error_type, errors.HfHubHTTPError):
            response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
            download_error: Exception = error_type(text, response=response)  # type: ignore[call-arg]
        else:
            download_error = error_type(text)

        def download(*args: Any, **options: Any) -> str:
            raise download_error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(CheckpointNotFoundError, match=advice) as error:
            resolve_checkpoint("a/b", "v9")
        assert str(error.value).startswith("a/b: ")
        assert "\n" not in str(error.value)
