"""tasks.json: the round trip, staleness, merging, and every malformed field refused by name."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.errors import FormatError, ResourceError
from lowbit.formats.tasks import (
    TASKS_FILE,
    TaskReport,
    TaskResult,
    manifest_sha256,
    merged,
    read_tasks,
    write_tasks,
)

HASH = "ab" * 32
ROW = TaskResult(
    task="hellaswag",
    metric="acc_norm",
    value=0.625,
    stderr=0.5,
    samples=40,
    higher_is_better=True,
    few_shot=0,
    limit=40,
    chat=False,
    context=8192,
    device="cpu",
    kv_cache="bf16",
    version="1.0",
)
UNKNOWN = dataclasses.replace(
    ROW,
    task="mmlu",
    metric="exact_match (strict-match)",
    value=None,
    stderr=None,
    higher_is_better=None,
    few_shot=None,
    limit=None,
)


def report(*rows: TaskResult, **changes: Any) -> TaskReport:
    made = TaskReport("0.1.0", "lm-eval 0.4.13", HASH, rows or (ROW, UNKNOWN))
    return dataclasses.replace(made, **changes)


def test_round_trip(tmp_path: Path) -> None:
    assert read_tasks(tmp_path) is None
    for written in (report(), report(manifest_sha256=None), report(tasks=())):
        assert write_tasks(tmp_path, written) == tmp_path / TASKS_FILE
        assert read_tasks(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == [TASKS_FILE]


def test_the_file_is_plain_json() -> None:
    content = json.loads(report(ROW).to_bytes())
    assert content == {
        "schema": 1,
        "lowbit_version": "0.1.0",
        "harness": "lm-eval 0.4.13",
        "manifest_sha256": HASH,
        "tasks": [dataclasses.asdict(ROW)],
    }
    with pytest.raises(ValueError, match="not JSON compliant"):
        report(dataclasses.replace(ROW, value=float("nan"))).to_bytes()


def test_a_manifest_is_known_by_its_bytes(tmp_path: Path) -> None:
    assert manifest_sha256(tmp_path) is None
    (tmp_path / "lowbit.json").write_bytes(b"one")
    assert manifest_sha256(tmp_path) == hashlib.sha256(b"one").hexdigest()


def test_results_of_other_tasks_are_kept() -> None:
    old, new = report(ROW, UNKNOWN), report(dataclasses.replace(ROW, value=0.5))
    assert merged(None, new) == new
    assert merged(old, new).tasks == (UNKNOWN, *new.tasks)
    for change in (
        {"manifest_sha256": "cd" * 32},
        {"harness": "lm-eval 9"},
        {"lowbit_version": "9"},
    ):
        assert merged(report(**change), new) == new


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2, this release reads 1"),
        ({"tasks": None}, "tasks` is not a list"),
        ({"harness": None}, "`harness` cannot be null"),
        ({"tasks": [dataclasses.asdict(ROW) | {"value": "0.5"}]}, '`value` cannot be "0.5"'),
        ({"tasks": [dataclasses.asdict(ROW) | {"activations": "fp8"}]}, "`activations` cannot be"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    content = report().to_json() | change
    (tmp_path / TASKS_FILE).write_text(json.dumps(content))
    with pytest.raises(FormatError, match=message) as error:
        read_tasks(tmp_path)
    assert TASKS_FILE in str(error.value)
    assert "`lowbit-run evaluate` again" in (error.value.hint or "")


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasks(tmp_path, report(ROW))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ResourceError, match=r"tasks\.json` cannot be written: the disk is full"):
        write_tasks(tmp_path, report(UNKNOWN))
    assert read_tasks(tmp_path) == report(ROW)
    assert [path.name for path in tmp_path.iterdir()] == [TASKS_FILE]
