"""Input and output files of a batch on Ray. Needs no Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InputError
from penstock.ray.batch import remove_output
from penstock.ray.batch_files import (
    ParquetWriter,
    finished_request_ids,
    make_writer,
    parquet_files,
    pending_chunks,
    pending_row_ids,
    read_chunk,
    row_to_line,
)


def make_request_line(name: str, **body: Any) -> str:
    return json.dumps({"custom_id": name, "url": "/v1/completions", "body": body})


def test_chunks_contain_all_non_empty_lines_without_a_result(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [
        make_request_line("a"),
        "",
        make_request_line("b", x=1),
        "not json",
        make_request_line("ä"),
        '{"custom_id": 5}',
        make_request_line("c"),
    ]
    path.write_text("\n".join(lines) + "\n")
    chunks, pending_ids = pending_chunks(path, {"b"}, 2)
    assert pending_ids == {"a", "line-4", "ä", "line-6", "c"}
    assert [chunk.line_numbers for chunk in chunks] == [[1, 4], [5, 6], [7]]
    rows = [row for chunk in chunks for row in read_chunk(path, chunk)]
    assert [row["line"].decode().strip() for row in rows] == [lines[row["line_number"] - 1] for row in rows]
    assert pending_chunks(path, pending_ids | {"b"}, 2) == ([], set())


def test_duplicate_ids_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"{make_request_line('a')}\n{make_request_line('a')}\n")
    with pytest.raises(InputError, match="two requests have the custom_id 'a'"):
        pending_chunks(path, set(), 2)
    with pytest.raises(InputError, match=r"cannot be read: No such file"):
        pending_chunks(tmp_path / "none", set(), 2)


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_results_are_appended_to_existing_results(tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    output = tmp_path / name
    assert finished_request_ids(output) == set()
    for ids in (["a", "b"], ["c"]):
        writer = make_writer(output)
        for custom_id in ids:
            response = {"status_code": 200, "body": {"text": custom_id}}
            writer.add(
                json.dumps({"id": "1", "custom_id": custom_id, "response": response, "error": None}).encode()
            )
        writer.close()
    assert finished_request_ids(output) == {"a", "b", "c"}
    remove_output(output)
    assert not output.exists()


def test_parquet_files_are_numbered_after_the_largest_number(tmp_path: Path) -> None:
    """The first file was deleted. The numbers of the remaining files are not used again."""
    for name in ("part-000001.parquet", "part-000003.parquet", "part-x.parquet"):
        (tmp_path / name).touch()
    assert ParquetWriter(tmp_path)._file_number == 4


def test_parquet_files_hold_requests_and_results_and_invalid_files_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import read_table, write_table

    body = [{"model": "m", "prompt": "x", "stop": None}, {"model": "m", "prompt": "y", "stop": ["s"]}]
    table = pyarrow.table({"custom_id": ["a", "b"], "url": ["/u"] * 2, "body": body})
    write_table(table, tmp_path / "0.parquet")
    assert pending_row_ids(tmp_path, {"a"}) == {"b"}
    lines = [json.loads(row_to_line(row)) for row in table.to_pylist()]
    assert [request["body"] for request in lines] == [{"model": "m", "prompt": "x"}, body[1]]
    assert json.loads(row_to_line({"custom_id": "a", "url": "/u", "body": '{"k": 1}'}))["body"] == {"k": 1}
    write_table(table, tmp_path / "1.parquet")
    with pytest.raises(InputError, match="two requests have the custom_id 'a'"):
        pending_row_ids(tmp_path, set())
    write_table(pyarrow.table({"custom_id": ["a"]}), tmp_path / "only.parquet")
    with pytest.raises(InputError, match=r"only\.parquet has no column url"):
        pending_row_ids(tmp_path / "only.parquet", set())
    write_table(table.set_column(0, "custom_id", [["a", None]]), tmp_path / "none.parquet")
    with pytest.raises(InputError, match="a row without a custom_id"):
        pending_row_ids(tmp_path / "none.parquet", set())
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"has no files \*\.parquet"):
        parquet_files(tmp_path / "empty")
    writer = make_writer(tmp_path / "out.parquet")
    writer.add(b'{"custom_id": "a", "response": null, "error": {"code": "bad"}}')
    writer.close()
    (row,) = read_table(tmp_path / "out.parquet").to_pylist()
    assert row == {"custom_id": "a", "status_code": None, "body": None, "error": '{"code":"bad"}'}
    (tmp_path / "out.parquet" / "notes").touch()
    with pytest.raises(InputError, match="'notes', which is not a batch result"):
        remove_output(tmp_path / "out.parquet")
