from __future__ import annotations

from typing import Any

import pytest

from sweep.engine.failures import FailureCause, LaunchFailure
from sweep.measure.corpus import corpus_text, tokenize_corpus


def test_the_corpus_is_tokenized_in_pieces_that_join_to_the_whole(scripted_server: Any) -> None:
    text = corpus_text()
    assert len(text) > 1_000_000
    tokens = tokenize_corpus(scripted_server.base_url, "m", text[:120_000])
    assert "".join(map(chr, tokens)) == text[:120_000]


def test_a_server_that_cannot_tokenize_is_a_failure_with_a_cause(scripted_server: Any) -> None:
    with pytest.raises(LaunchFailure, match="404") as failure:
        tokenize_corpus(scripted_server.base_url + "/nowhere", "m", "text")
    assert failure.value.cause is FailureCause.first_request_failed
