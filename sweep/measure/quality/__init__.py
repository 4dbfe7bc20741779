"""Quality of a numerics fingerprint against the reference engine, measured once and shared by all studies.

* logprobs, divergence: both engines score the same fixed text; KL divergence, top-1 agreement and perplexity.
* tasks, paired: lm-eval asks both the same items; accuracy, flips, McNemar's test, the paired difference.
* completions: greedy decoding, for what no prompt shows: whether speculation is lossless, and answers under load.
"""

from sweep.measure.quality.cache import cache_path
from sweep.measure.quality.divergence import QualityResult, compare, noise_floor
from sweep.measure.quality.logprobs import (
    FloatArray,
    PromptLogprobs,
    QualitySpec,
    load_logprobs,
    measure_logprobs,
    quality_prompts,
    save_logprobs,
)

__all__ = [
    "FloatArray",
    "PromptLogprobs",
    "QualityResult",
    "QualitySpec",
    "cache_path",
    "compare",
    "load_logprobs",
    "measure_logprobs",
    "noise_floor",
    "quality_prompts",
    "save_logprobs",
]
