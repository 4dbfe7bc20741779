from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from made_points import made_grid, made_point

from sweep.decide.explain.knobs import DEFAULT, TECHNIQUES, TIED, Knobs, knob_of, technique_of, value_words
from sweep.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "knob", "technique"),
    [
        ("args.max_num_seqs", "max_num_seqs", "batch_limits"),
        ("args.tensor_parallel_size", "parallelism", "parallelism"),
        ("args.speculative_config.num_speculative_tokens", "speculation", "speculation"),
        ("model", "weights", "weights"),
        ("args.quantization", "weights", "weights"),
        ("env.VLLM_ATTENTION_BACKEND", "VLLM_ATTENTION_BACKEND", "attention"),
        ("args.some_flag_of_next_year", "some_flag_of_next_year", "some_flag_of_next_year"),
        ("args.some_dict.inner", "some_dict.inner", "some_dict"),
    ],
)
def test_settings_are_grouped(setting, knob, technique):
    assert (knob_of(setting), technique_of(setting)) == (knob, technique)


def test_the_table_names_arguments_that_vllm_has():
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text())
    fields = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    named = {name for names in TECHNIQUES.values() for name in names if not name.startswith("VLLM_")}
    assert named <= fields, named - fields
    assert set(TIED) <= set(TECHNIQUES)


def test_pairs_differ_in_one_knob_and_start_from_the_baseline():
    points = made_grid({"kv_cache_dtype": [None, "fp8"], "max_num_seqs": [None, 8, 64]}, lambda args, c: (1, 1, 0.001))
    knobs = Knobs(points)
    assert knobs.varying == ("kv_cache", "max_num_seqs")
    assert len(knobs.pairs("kv_cache")) == 9 and len(knobs.pairs("max_num_seqs")) == 12
    for pair in [*knobs.pairs("kv_cache"), *knobs.pairs("max_num_seqs")]:
        differing = set(pair.before.engine["args"].items()) ^ set(pair.after.engine["args"].items())
        assert pair.before.load_label == pair.after.load_label and len(differing) == 1
        assert pair.before_value == DEFAULT
    assert [value_words(v) for v in knobs.levels("max_num_seqs")] == [
        "vLLM's default", "max_num_seqs=8", "max_num_seqs=64",
    ]  # fmt: skip


def test_tied_settings_turn_as_one():
    on = {"speculative_config.method": "ngram", "speculative_config.num_speculative_tokens": 4}
    points = [made_point({}, 8, {}), made_point(on, 8, {})]
    (pair,) = Knobs(points).pairs("speculation")
    assert len(pair.after_value) == 2


def test_the_baseline_is_what_the_defaults_have():
    points = [
        made_point({"tensor_parallel_size": size}, 8, {}, purpose="baseline" if size == 2 else "trial")
        for size in (2, 4, 8)
    ]
    knobs = Knobs(points)
    assert dict(knobs.baseline["parallelism"])["args.tensor_parallel_size"] == 2


def test_a_technique_is_found_by_each_of_its_names():
    points = made_grid({"kv_cache_dtype": [None, "fp8"], "max_num_seqs": [None, 8]}, lambda args, c: (1, 1, 0.001))
    knobs = Knobs(points)
    assert knobs.chosen("kv_cache") == knobs.chosen("kv_cache_dtype") == ("kv_cache",)
    assert knobs.chosen("batch_limits") == knobs.chosen("max_num_seqs") == ("max_num_seqs",)
    assert knobs.chosen(None) == knobs.varying
    with pytest.raises(ConfigError, match="nothing in this study varies 'kv_cach'") as error:
        knobs.chosen("kv_cach")
    assert "kv_cache" in str(error.value)
    with pytest.raises(ConfigError, match="nothing"):
        Knobs([points[0]]).chosen("kv_cache")
