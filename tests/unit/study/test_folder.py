"""A study folder belongs to one configuration and one running sweep, and says so in one line."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_launches import make_config

from sweep.config import BudgetConfig, SweepConfig
from sweep.errors import StudyError
from sweep.results.records import SCHEMA_VERSION
from sweep.study.folder import LOCK_FILE, STUDY_FILE, locked, study_folder, update_study, write_json


def opened(config: SweepConfig, fingerprint: str = "space1") -> Path:
    with study_folder(config, fingerprint) as folder:
        return folder


def saved(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / STUDY_FILE).read_text())
    return data


def test_a_new_study_describes_itself(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = opened(config)
    study = saved(folder)
    assert folder == tmp_path / "s"
    assert study["config"] == config.to_dict() and study["search_space_fingerprint"] == "space1"
    assert study["schema"] == SCHEMA_VERSION and study["workload_checksum"] is None
    assert study["host"]["cpu_count"] == os.cpu_count() and study["versions"]["optuna"]


def test_the_same_configuration_continues_and_keeps_what_was_learnt(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = opened(config)
    update_study(folder, workload_checksum="abc", vllm_version="1")
    created = saved(folder)["created_at"]
    assert opened(config) == folder
    assert (saved(folder)["workload_checksum"], saved(folder)["created_at"]) == ("abc", created)


def change_budget(config: SweepConfig) -> None:
    config.budget = BudgetConfig(trials=99)


def change_objectives(config: SweepConfig) -> None:
    config.objectives.metrics = ["cost_usd_per_mtok"]


def change_parallel(config: SweepConfig) -> None:
    config.executor.max_parallel = 3


@pytest.mark.parametrize("change", [change_budget, change_objectives, change_parallel])
def test_what_no_measurement_depends_on_may_change(tmp_path: Path, change: Callable[[SweepConfig], None]) -> None:
    opened(make_config(tmp_path))
    config = make_config(tmp_path)
    change(config)
    folder = opened(config)
    assert saved(folder)["config"] == config.to_dict()
    assert saved(folder)["objectives"] == config.objectives.metrics


def change_temperature(config: SweepConfig) -> None:
    config.workload.temperature = 0.7


def change_price(config: SweepConfig) -> None:
    config.hardware.price_usd_per_device_hour = 3.0


def change_args(config: SweepConfig) -> None:
    config.engine.args = {"dtype": "half"}


def change_proof(config: SweepConfig) -> None:
    config.proof = replace(config.proof, max_loop_lag_ms=50.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_temperature, "workload.temperature: 0.0 before, 0.7 now"),
        (change_price, "hardware.price_usd_per_device_hour: 2.0 before, 3.0 now"),
        (change_args, "engine.args.dtype: None before, 'half' now"),
        (change_proof, "proof.max_loop_lag_ms: 5.0 before, 50.0 now"),
    ],
)
def test_another_configuration_is_refused_with_key_and_both_values(
    tmp_path: Path, change: Callable[[SweepConfig], None], message: str
) -> None:
    folder = opened(make_config(tmp_path))
    before = saved(folder)
    config = make_config(tmp_path)
    change(config)
    with pytest.raises(StudyError) as error:
        opened(config)
    assert message in error.value.message and "choose another study=" in (error.value.hint or "")
    assert saved(folder) == before


def test_what_only_judges_a_measurement_may_change(tmp_path: Path) -> None:
    folder = opened(make_config(tmp_path))
    config = make_config(tmp_path)
    config.quality.non_inferiority = {"quality_kl": 0.05}
    config.quality.python = "/opt/eval/bin/python"
    assert opened(config) == folder
    assert saved(folder)["config"]["quality"]["non_inferiority"] == {"quality_kl": 0.05}


def test_a_study_of_an_older_sweep_lacks_fields_and_goes_on_with_their_defaults(tmp_path: Path) -> None:
    folder = opened(make_config(tmp_path))
    meta = saved(folder)
    del meta["config"]["proof"]["max_drain_s"], meta["config"]["workload"]["text"]
    (folder / "study.json").write_text(json.dumps(meta))
    config = make_config(tmp_path)
    assert opened(config) == folder
    (folder / "study.json").write_text(json.dumps(meta))
    config.proof.max_drain_s = 7.0
    with pytest.raises(StudyError, match=r"max_drain_s: 60\.0 before, 7\.0 now"):
        opened(config)


def test_another_search_space_is_refused(tmp_path: Path) -> None:
    opened(make_config(tmp_path))
    with pytest.raises(StudyError, match="another configuration: the search space"):
        opened(make_config(tmp_path), "space2")


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("")
    with pytest.raises(StudyError, match="exists and is not a study"):
        opened(make_config(tmp_path))
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["thesis.tex"]


def test_what_a_sweep_killed_at_its_start_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / LOCK_FILE).write_text("123")
    (tmp_path / "s" / f"{STUDY_FILE}.123.tmp").write_text('{"sch')
    assert saved(opened(make_config(tmp_path)))["study"] == "s"


HOLDER = """
import sys, time
from pathlib import Path
from sweep.study.folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(1000)
"""


def test_a_study_run_by_another_process_is_refused_by_its_pid_until_that_is_killed(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = opened(config)
    before = saved(folder)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        changed = make_config(tmp_path)
        change_budget(changed)
        with pytest.raises(StudyError, match=f"is being run by process {holder.pid} on {platform.node()}"):
            opened(changed)
        assert saved(folder) == before
        holder.kill()
    assert opened(config) == folder


def test_a_lock_is_left_to_nobody_after_its_owner_ended(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path):
            assert (tmp_path / LOCK_FILE).read_text().startswith(str(os.getpid()))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "5", "{}", '{"schema": 1}', '{"schema": 1, "config": [], "search_space_fingerprint": "x"}'],
)
def test_a_damaged_study_json_is_named(tmp_path: Path, text: str) -> None:
    folder = opened(make_config(tmp_path))
    (folder / STUDY_FILE).write_text(text)
    with pytest.raises(StudyError, match=r"study\.json is corrupt") as error:
        opened(make_config(tmp_path))
    assert "restore it from a backup" in (error.value.hint or "")
    assert (folder / STUDY_FILE).read_text() == text


def test_a_study_of_a_newer_sweep_is_refused(tmp_path: Path) -> None:
    folder = opened(make_config(tmp_path))
    write_json(folder / STUDY_FILE, {**saved(folder), "schema": SCHEMA_VERSION + 1})
    with pytest.raises(StudyError, match="newer than this sweep understands"):
        opened(make_config(tmp_path))


def test_a_storage_dir_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(StudyError, match=r"storage\.dir=.*runs cannot be used: .*Not a directory") as error:
        opened(make_config(tmp_path / "runs"))
    assert "choose another storage.dir=" in (error.value.hint or "")


def test_a_storage_dir_that_cannot_be_written_is_named() -> None:
    with pytest.raises(StudyError, match=r"storage\.dir=/proc/nowhere cannot be used"):
        opened(make_config(Path("/proc/nowhere")))


def test_a_disk_almost_full_is_refused_before_it_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 2**30))
    with pytest.raises(StudyError, match=r"only 1\.0 GiB free under") as error:
        opened(make_config(tmp_path))
    assert "free at least 2 GiB" in (error.value.hint or "")


def test_json_files_are_replaced_whole(tmp_path: Path) -> None:
    """A writer that dies halfway leaves the old file."""
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
