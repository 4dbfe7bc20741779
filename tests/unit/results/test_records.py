"""records.jsonl survives a kill at any byte, says where it is damaged, and never holds what is no measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sweep.errors import StudyError
from sweep.results.records import (
    SCHEMA_VERSION,
    LaunchRecord,
    PointRecord,
    QualityRecord,
    Record,
    RecordStore,
    from_json,
    record_from_dict,
    to_dict,
    to_json,
)

ENGINE = {"model": "m", "args": {"max_num_seqs": 4, "compilation_config": {"mode": 0}}, "env": {"A": "1"}}
POINT = PointRecord(
    "p", "0001-a", "a", "f", ENGINE, {"concurrency": 8}, "c8", {"seqs": None}, "trial", 2, "measured",
    metrics={"ttft_p99_ms": 12.5, "itl_p99_ms": None}, raw="launches/0001-a/c8-r0.parquet",
)  # fmt: skip
LAUNCH = LaunchRecord(
    "0001-a", "a", "f", ENGINE, None, "baseline", 2, (0, 1), "failed", "out_of_memory", 'a "quoted" line\nand é',
    False, None, 12.0, "2026-01-01T00:00:00+00:00", "2026-01-01T00:00:12+00:00",
)  # fmt: skip
QUALITY = QualityRecord("f", "g", "measured", {"quality_kl": 0.01}, 0.001, 4080, None, "2026-01-01T00:00:00+00:00")
ALL: list[Record] = [POINT, LAUNCH, QUALITY]


@pytest.mark.parametrize("record", ALL, ids=lambda r: r.kind)
def test_a_record_read_again_is_the_same(record: Record) -> None:
    assert from_json(to_json(record)) == record
    assert record_from_dict(to_dict(record)) == record
    assert "\n" not in to_json(record)


def test_fields_of_a_newer_minor_version_are_ignored() -> None:
    assert record_from_dict({**to_dict(QUALITY), "colour": "blue"}) == QUALITY


def test_a_newer_schema_is_refused() -> None:
    with pytest.raises(StudyError, match=f"schema {SCHEMA_VERSION + 1} is newer") as error:
        record_from_dict({**to_dict(POINT), "schema": SCHEMA_VERSION + 1})
    assert "upgrade" in (error.value.hint or "")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_measurement_is_neither_written_nor_read(tmp_path: Path, value: float) -> None:
    record = replace(POINT, metrics={"ttft_p99_ms": value})
    store = RecordStore(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        store.append(record)
    store.path.write_text(json.dumps(to_dict(record)) + "\n")
    with pytest.raises(StudyError, match="is no measurement"):
        store.read()


@pytest.mark.parametrize("record", ALL, ids=lambda r: r.kind)
def test_a_line_torn_at_any_byte_is_skipped_or_whole_and_never_joined(tmp_path: Path, record: Record) -> None:
    store = RecordStore(tmp_path)
    store.append(QUALITY)
    before = store.path.read_bytes()
    line = to_json(record).encode() + b"\n"
    for cut in range(len(line) + 1):
        store.path.write_bytes(before + line[:cut])
        whole = cut >= len(line) - 1  # only the newline may be missing
        expected = [QUALITY, record] if whole else [QUALITY]
        assert store.read() == expected
        if cut % 7 == 0 or whole or cut < 12:  # every append is synced to disk, so not at every cut
            store.append(POINT)
            assert store.read() == [*expected, POINT]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    for record in ALL:
        store.append(record)
    lines = store.path.read_text().splitlines()
    for damaged in (
        "rubbish",
        '{"kind": "point"}',
        '{"schema": 1, "kind": "poem"}',
        "5",
        '{"schema": 1, "kind": "point"}',
    ):
        store.path.write_text("\n".join([lines[0], damaged, lines[2]]) + "\n")
        with pytest.raises(StudyError, match=r"records\.jsonl:2 is not a sweep record") as error:
            store.read()
        assert "every other line is intact" in (error.value.hint or "")


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    store.path.write_bytes(b"\xff\xfe\x00\n" + to_json(POINT).encode() + b"\n")
    with pytest.raises(StudyError, match=r"records\.jsonl:1 "):
        store.read()


def test_no_file_and_an_empty_file_hold_no_records(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    assert store.read() == []
    store.path.write_bytes(b"")
    assert store.read() == []
    store.append(POINT)
    assert store.read() == [POINT]
