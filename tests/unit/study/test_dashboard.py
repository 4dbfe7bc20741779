"""optuna-dashboard on a study's own journal: it starts, and its API shows the study's trials."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from sweep.study.run import JOURNAL_FILE

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_WAIT_S = 90.0


@pytest.mark.skipif(find_spec("optuna_dashboard") is None, reason="optuna-dashboard is not installed: .[dashboard]")
def test_the_journal_of_a_study_in_the_dashboard(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_FILE
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(path))), study_name="night", directions=["minimize", "minimize"]
    )
    trial = study.ask()
    trial.suggest_categorical("max_num_seqs", ["8", "64"])
    study.tell(trial, [1.5, 300.0])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    program = str(Path(sys.executable).with_name("optuna-dashboard"))
    command = [program, str(path), "--port", str(port), "--server", "wsgiref", "--quiet"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        (summary,) = _get(f"http://127.0.0.1:{port}/api/studies", server)["study_summaries"]
        assert (summary["study_name"], summary["directions"]) == ("night", ["minimize", "minimize"])
        (shown,) = _get(f"http://127.0.0.1:{port}/api/studies/{summary['study_id']}", server)["trials"]
        assert shown["state"] == "Complete" and shown["values"] == [1.5, 300.0]
        assert [p["name"] for p in shown["params"]] == ["max_num_seqs"]
    finally:
        server.terminate()
        server.wait(20)


def _get(url: str, server: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + _WAIT_S
    while True:
        assert server.poll() is None, f"optuna-dashboard ended with {server.returncode}"
        try:
            with _NO_PROXY.open(url, timeout=20) as answer:
                return json.load(answer)
        except OSError:
            assert time.monotonic() < deadline, f"no answer at {url}"
            time.sleep(0.3)
