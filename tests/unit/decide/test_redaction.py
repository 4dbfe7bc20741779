"""What leaves with a study: planted secrets, names and paths go; everything a study is read for stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.decide.redaction import Redactor

HUB = "hf_" + "a1B2c3D4" * 4


@pytest.fixture
def redactor(tmp_path: Path) -> Redactor:
    return Redactor(tmp_path / "runs" / "night", hosts=["gpu17.cluster.corp", "gpu17"], users=["alice"])


@pytest.mark.parametrize(
    ("text", "gone", "kept"),
    [
        (f"401 for token {HUB} at the hub", HUB, "401 for token"),
        ("Authorization: Bearer abc.DEF-123456", "abc.DEF-123456", "Authorization: Bearer"),
        ("HF_TOKEN=xyzzy42 vllm serve", "xyzzy42", "vllm serve"),
        ('{"api_key": "plain-words-1"}', "plain-words-1", "api_key"),
        ("postgresql://bob:pw1234@db:5432/optuna", "pw1234", "postgresql://"),
        ("postgresql://bob:pw1234@db:5432/optuna", "bob", "/optuna"),
        ("sk-" + "Zz9" * 8, "sk-Zz9", ""),
        ("OSError: /data/acme/llama-70b/config.json: gone", "/data/acme", "config.json: gone"),
        ("sqlite:////home/carol/x.db", "/home/carol", "x.db"),
        ("cc -I/home/carol/include", "carol", "include"),
        ("PATH=/opt/corp/bin:/srv/corp/bin", "corp", "bin"),
        ("~/models/secret-customer/llama", "models", "llama"),
        ("alice logged in on GPU17.cluster.corp", "alice", "logged in"),
        ("alice logged in on GPU17.cluster.corp", "GPU17", "logged in"),
        ("connect to 10.20.30.40:8000 failed", "10.20", ":8000 failed"),
        ("ask carol@corp.example.com", "carol", "ask"),
    ],
)
def test_what_goes_and_what_stays(redactor: Redactor, text: str, gone: str, kept: str) -> None:
    shown = redactor.text(text)
    assert gone not in shown and kept in shown


@pytest.mark.parametrize(
    "text",
    [
        "ttft_p99_ms<=500", "HTTP 400: /v1/completions: max_tokens is too large", "tokens: 55, token_ids", "tok/s/user",
        "http://127.0.0.1:8000/health", "Qwen/Qwen3-32B", "launches/0001-abc/server.log", "kv_cache_dtype=fp8",
        "0.32.0",
        "2026-05-04T10:00:00+00:00", "num_speculative_tokens=4", "first token: 12 ms", "root cause above", "and/or",
    ],
)  # fmt: skip
def test_what_a_study_is_read_for_stays(redactor: Redactor, text: str) -> None:
    assert redactor.text(text) == text


def test_names_of_keys_make_values_secret(redactor: Redactor) -> None:
    data = {"env": {"AWS_SECRET_ACCESS_KEY": "q1", "VLLM_USE_V1": "1"}, "api_key": ["k1"], "max_tokens": 7,
            "num_key_value_heads": 8, "tokenizer_mode": "auto", "hf_token": None, "tokenizer": "/m/t"}  # fmt: skip
    assert redactor.value(data) == {
        "env": {"AWS_SECRET_ACCESS_KEY": "[secret]", "VLLM_USE_V1": "1"}, "api_key": ["[secret]"], "max_tokens": 7,
        "num_key_value_heads": 8, "tokenizer_mode": "auto", "hf_token": None, "tokenizer": "[path-1]/t",
    }  # fmt: skip


def test_a_secret_of_the_environment_goes_wherever_it_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORP_API_KEY", "no-known-format")
    redactor = Redactor(tmp_path)
    assert redactor.text("server said: bad no-known-format!") == "server said: bad [secret]!"
    assert redactor.counts["secrets"] == 1


def test_the_same_folder_is_the_same_word_and_the_study_is_its_own(redactor: Redactor, tmp_path: Path) -> None:
    assert redactor.text("/data/m/a and /data/m/b in /else/c") == "[path-1]/a and [path-1]/b in [path-2]/c"
    assert redactor.text(f"{tmp_path}/runs/night/launches/1") == "[study]/launches/1"
    assert {name: sorted(names) for name, names in redactor.folders.items()} == {"path-1": ["a", "b"], "path-2": ["c"]}
    assert redactor.text(redactor.text("/data/m/a")) == "[path-1]/a"


@given(
    st.lists(st.from_regex(r"[a-z]{4,8}", fullmatch=True), min_size=2, max_size=5),
    st.sampled_from([" ", "=", "'", ":", "("]),
)
def test_no_folder_of_an_absolute_path_survives(parts: list[str], before: str) -> None:
    shown = Redactor(Path("/nowhere/else")).text(f"in{before}/zz{'/zz'.join(parts)} here")
    assert not any(f"zz{part}/" in shown for part in parts)
