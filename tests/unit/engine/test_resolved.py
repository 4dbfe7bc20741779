"""What vLLM 0.32 reports of itself, against what was asked."""

from __future__ import annotations

from sweep.engine.resolved import differences, flatten

CONFIG = {
    "model_config": {"model": "/m", "dtype": "torch.bfloat16", "hf_token": "hf_secret", "quantization": None},
    "cache_config": {"cache_dtype": "fp8", "enable_prefix_caching": True, "block_size": 128},
    "scheduler_config": {"max_num_seqs": 4, "enable_chunked_prefill": True, "nested": {"a": 1}},
    "parallel_config": {"tensor_parallel_size": 1},
    "attention_config": {"backend": None},
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "tensor_parallel_size": None},
    "instance_id": "x",
}


def test_flatten_keeps_scalars_and_drops_secrets() -> None:
    flat = flatten(CONFIG)
    assert flat["cache_config.cache_dtype"] == "fp8" and flat["instance_id"] == "x"
    assert not any("hf_secret" in str(v) for v in flat.values()) and "scheduler_config.nested" not in flat


def test_what_was_granted_is_no_difference() -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    asked = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "max_num_seqs": 4.0, "enable_prefix_caching": True,
             "tensor_parallel_size": 1, "speculative_config": speculation}  # fmt: skip
    assert differences(asked, flatten(CONFIG)) == {}


def test_what_was_changed_is_shown_with_both_values() -> None:
    asked = {"enable_chunked_prefill": False, "block_size": 16, "attention_backend": "FLASH_ATTN", "dtype": "auto",
             "speculative_config": {"num_speculative_tokens": 5}, "disable_log_stats": True}  # fmt: skip
    assert differences(asked, flatten(CONFIG)) == {
        "enable_chunked_prefill": [False, True],
        "block_size": [16, 128],
        "attention_backend": ["FLASH_ATTN", None],
        "speculative_config.num_speculative_tokens": [5, 2],
    }
