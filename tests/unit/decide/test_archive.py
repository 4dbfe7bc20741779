"""A study as one file: nothing private in it, whole on the other side, and nothing that was tampered with comes in."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sweep import cli
from sweep.decide.archive import MANIFEST, export_archive, import_archive
from sweep.decide.opened import open_study
from sweep.engine.engine_args import EngineConfig
from sweep.errors import StudyError
from sweep.results.records import PointRecord, QualityRecord, RecordStore

PLANTED = {
    "token": "hf_" + "Qq7Ww8Ee" * 4, "password": "hunter2-db", "host": "gpu17.cluster.corp", "user": "mallory",
    "folder": "/fsx/acme-corp", "key": "planted-env-value",
}  # fmt: skip


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study whose every corner holds something private."""
    monkeypatch.setenv("PLANTED_API_KEY", PLANTED["key"])
    folder = tmp_path / "here" / "night"
    launch = folder / "launches" / "0001-a"
    launch.mkdir(parents=True)
    model, home = f"{PLANTED['folder']}/models/llama", f"/home/{PLANTED['user']}"
    engine = EngineConfig(model, {"max_num_seqs": 8, "tokenizer": f"{home}/tok"}, {"VLLM_CACHE_ROOT": f"{home}/cache"})
    meta = {
        "schema": 1, "study": "night", "objectives": ["cost_usd_per_mtok"], "host": {"node": PLANTED["host"]},
        "config": {
            "study": "night", "model": {"name": "llama", "path": model},
            "engine": {"python": f"{home}/venv/bin/python"},
            "hardware": {"name": "h100", "price_usd_per_device_hour": 2.0}, "storage": {
                "dir": str(folder.parent), "optuna": f"postgresql://u:{PLANTED['password']}@db.acme-corp.example/x"},
        },
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(meta))
    identity: dict[str, Any] = {"config_hash": engine.hash, "fingerprint": engine.fingerprint}
    store = RecordStore(folder)
    store.append(
        PointRecord(
            point_id="0001-a-c8-r0", launch_id="0001-a", engine=engine.to_dict(), load={"concurrency": 8},
            load_label="c8", params={}, purpose="baseline", devices=1, state="measured", **identity,
            metrics={"cost_usd_per_mtok": 1.0, "ttft_p99_ms": 300.0}, raw="launches/0001-a/c8-r0.parquet",
        )
    )  # fmt: skip
    detail = f"401 {PLANTED['token']} {PLANTED['key']} for {PLANTED['user']}@{PLANTED['host']} in {launch}/server.log"
    store.append(
        PointRecord(
            point_id="0001-a-c4-r0", launch_id="0001-a", engine=engine.to_dict(), load={"concurrency": 4},
            load_label="c4", params={}, purpose="baseline", devices=1, state="failed", cause="request_errors",
            detail=detail, **identity,
        )
    )  # fmt: skip
    store.append(
        QualityRecord(
            fingerprint=engine.fingerprint, reference_fingerprint=engine.fingerprint, state="measured",
            metrics={"quality_kl": 0.001}, noise_floor_kl=0.001, positions=9, launch_id=None, finished_at="",
        )
    )  # fmt: skip
    (launch / "spec.json").write_text(json.dumps({"study_dir": str(folder), "python": f"{home}/py", "niceness": 0}))
    (launch / "resolved.json").write_text(json.dumps({"model_config.model": model, "x.hf_token": PLANTED["token"]}))
    (launch / "server.log").write_text(detail)
    pq.write_table(pa.table({"error": [None, detail], "sent_s": [0.0, 1.0]}), launch / "c8-r0.parquet")
    (folder / "quality").mkdir()
    np.savez(folder / "quality" / f"{engine.fingerprint}.npz", x=np.arange(3))
    (folder / "workload").mkdir()
    np.save(folder / "workload" / "corpus.npy", np.arange(9))
    return folder


def everything(path: Path) -> bytes:
    """Every byte of every member, unpacked; Parquet as text."""
    with zipfile.ZipFile(path) as archive:
        parts = [name.encode() + archive.read(name) for name in archive.namelist()]
        for name in archive.namelist():
            if name.endswith(".parquet"):
                parts.append(str(pq.read_table(pa.BufferReader(archive.read(name))).to_pylist()).encode())
    return b"\n".join(parts)


def test_nothing_planted_leaves(study: Path, tmp_path: Path) -> None:
    exported = export_archive(open_study(study), tmp_path / "night.zip", raw=True)
    content = everything(exported.path)
    for kind, value in PLANTED.items():
        assert value.encode() not in content, kind
    assert b"acme-corp" not in content and str(tmp_path).encode() not in content
    assert all(exported.taken_out[kind] for kind in ("secrets", "paths"))
    assert b"server.log" not in b" ".join(n.encode() for n in zipfile.ZipFile(exported.path).namelist())
    assert "llama" in exported.text() and exported.sha256 in exported.text()


def test_another_machine_opens_picks_and_has_its_own_places(study: Path, tmp_path: Path) -> None:
    exported = export_archive(open_study(study), tmp_path / "night.zip", raw=True)
    there = import_archive(exported.path, tmp_path / "there" / "night", sha256=exported.sha256)
    assert there.points == 2 and "path-1" in there.unplaced
    opened, original = open_study(there.path), open_study(study)
    assert [p.metrics for p in opened.operating_points] == [p.metrics for p in original.operating_points]
    assert opened.pick("ttft_p99_ms<=500").feasible
    assert [p.config_hash for p in opened.operating_points] == [p.config_hash for p in original.operating_points]
    assert opened.config["storage"] == {"dir": str(there.path.resolve().parent), "optuna": None}
    assert opened.config["engine"]["python"] is None
    spec = json.loads((there.path / "launches/0001-a/spec.json").read_text())
    assert spec["study_dir"] == str(there.path.resolve())
    assert pq.read_table(there.path / "launches/0001-a/c8-r0.parquet")["sent_s"].to_pylist() == [0.0, 1.0]
    assert np.load(there.path / "workload" / "corpus.npy").tolist() == list(range(9))


def test_relocated_paths_are_part_of_the_identity_again(study: Path, tmp_path: Path) -> None:
    exported = export_archive(open_study(study), tmp_path / "night.zip")
    models = next(name for name, names in exported.folders.items() if "llama" in names)
    there = import_archive(exported.path, tmp_path / "there", relocate=[f"{models}={tmp_path}/weights"])
    assert models not in there.unplaced
    first = open_study(there.path).operating_points[0]
    engine = EngineConfig.from_dict(first.engine)
    assert engine.model == f"{tmp_path}/weights/llama"
    assert (first.config_hash, first.fingerprint) == (engine.hash, engine.fingerprint)
    assert first.metrics["quality_kl"] == 0.001, "quality found its fingerprint again"
    assert [p.stem for p in (there.path / "quality").iterdir()] == [engine.fingerprint]


def test_no_raw_unless_asked_and_no_file_overwritten(study: Path, tmp_path: Path) -> None:
    path = export_archive(open_study(study), tmp_path / "night.zip").path
    assert not [n for n in zipfile.ZipFile(path).namelist() if n.endswith(".parquet")]
    with pytest.raises(StudyError, match="exists"):
        export_archive(open_study(study), path)
    import_archive(path, tmp_path / "there")
    with pytest.raises(StudyError, match="exists"):
        import_archive(path, tmp_path / "there")
    with pytest.raises(StudyError, match="cannot write"):
        export_archive(open_study(study), tmp_path / "no" / "folder.zip")


# ---------------------------------------------------------------- what must not come in


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None], *, honest: bool = False) -> Path:
    """The archive with its members changed; honest: the manifest says so too."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    if honest:
        import hashlib

        manifest = json.loads(members[MANIFEST])
        files = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in members.items()}
        manifest["files"] = {n: f for n, f in files.items() if n != MANIFEST}
        members[MANIFEST] = json.dumps(manifest).encode()
    out = path.with_name("changed.zip")
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out


def put(name: str, content: bytes = b"x") -> Callable[[dict[str, bytes]], None]:
    return lambda members: members.__setitem__(name, content)


def flip(members: dict[str, bytes]) -> None:
    members["records.jsonl"] = members["records.jsonl"].replace(b"300.0", b"100.0")


@pytest.mark.parametrize(
    ("change", "honest", "message"),
    [
        (flip, False, "was changed"),
        (put("records.jsonl", b""), False, "unsafe or was changed"),
        (put("../../evil.json"), True, "no file of a study"),
        (put("/etc/evil.json"), True, "no file of a study"),
        (put("launches/../../evil/x.json"), True, "no file of a study"),
        (put("launches/a/b/../c.json"), True, "no file of a study"),
        (put("launches\\a\\x.json"), True, "no file of a study"),
        (put("quality/evil.py"), True, "no file of a study"),
        (put("launches/1/extra.json"), False, "not in its manifest"),
        (lambda m: m.pop("records.jsonl"), False, "is missing"),
        (put("records.jsonl", b"nonsense\n"), True, "Expecting value"),
        (put(MANIFEST, b"{}"), False, "not a sweep archive"),
        (put(MANIFEST, b"[]"), False, "not a sweep archive"),
        (lambda m: m.pop(MANIFEST), False, "not a sweep archive"),
    ],
)
def test_what_is_unsafe_or_changed_is_refused_whole(
    study: Path, tmp_path: Path, change: Callable[[dict[str, bytes]], None], honest: bool, message: str
) -> None:
    exported = export_archive(open_study(study), tmp_path / "night.zip")
    evil, room = rewritten(exported.path, change, honest=honest), tmp_path / "room"
    with pytest.raises(StudyError, match=message):
        import_archive(evil, room / "in" / "night")
    assert [p for p in room.rglob("*") if p.is_file()] == [] and not list(tmp_path.rglob("evil*"))
    with pytest.raises(StudyError, match="is another file"):
        import_archive(evil, room / "in" / "night", sha256=exported.sha256)


def test_a_newer_archive_a_damaged_one_and_none(study: Path, tmp_path: Path) -> None:
    path = export_archive(open_study(study), tmp_path / "night.zip").path

    def newer(members: dict[str, bytes]) -> None:
        members[MANIFEST] = members[MANIFEST].replace(b'"schema": 1', b'"schema": 2', 1)

    with pytest.raises(StudyError, match="newer than this sweep"):
        import_archive(rewritten(path, newer), tmp_path / "x")
    (tmp_path / "half.zip").write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StudyError, match="damaged"):
        import_archive(tmp_path / "half.zip", tmp_path / "x")
    with pytest.raises(StudyError, match="no archive at"):
        import_archive(tmp_path / "none.zip", tmp_path / "x")


def test_places_that_are_not_understood(study: Path, tmp_path: Path) -> None:
    path = export_archive(open_study(study), tmp_path / "night.zip").path
    for text, message in (("models=/x", "not understood"), ("path-1", "not understood"), ("path-99=/x", "path-99")):
        with pytest.raises(StudyError, match=message):
            import_archive(path, tmp_path / "x", relocate=[text])


def test_the_example_study_survives_the_journey(study_dir: Path, tmp_path: Path) -> None:
    here = shutil.copytree(study_dir, tmp_path / "here")
    original = open_study(here)
    path = export_archive(original, tmp_path / "demo.zip").path
    there = open_study(import_archive(path, tmp_path / "there").path)
    sla = "ttft_p99_ms<=2500 quality_kl<=0.01"
    assert there.pick(sla).to_dict() == original.pick(sla).to_dict()
    assert len(there.records) == len(original.records)


def test_from_the_command_line(study_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.zip"
    assert cli.main(["archive", "export", str(study_dir), "-o", str(path)]) == 0
    checksum = next(line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("sha256"))
    target = tmp_path / "there"
    assert cli.main(["archive", "import", str(path), "--to", str(target), "--sha256", checksum]) == 0
    assert "sweep front" in capsys.readouterr().out
    assert cli.main(["watch", str(target), "--once"]) == 0
    assert "demo" in capsys.readouterr().out
    assert cli.main(["archive", "import", str(path), "--to", str(target)]) == cli.EXIT_USER_ERROR
    assert "exists" in capsys.readouterr().err
