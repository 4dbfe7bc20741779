from __future__ import annotations

import pytest

from sweep.errors import ConfigError
from sweep.space.expressions import parse


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("a * b <= 8", {"a": 2, "b": 4}, True),
        ("a * b <= 8", {"a": 4, "b": 4}, False),
        ("model.is_moe and a > 1", {"model.is_moe": True, "a": 2}, True),
        ("x == 'ngram'", {"x": "ngram"}, True),
        ("x in ('a', 'b')", {"x": "c"}, False),
        ("x not in ['a']", {"x": "c"}, True),
        ("not (a == false and b < 4)", {"a": False, "b": 2}, False),
        ("a == null", {"a": None}, True),
        ("1 < a <= 3", {"a": 3}, True),
        ("-a == -2", {"a": 2}, True),
        ("heads % tp == 0", {"heads": 9, "tp": 2}, False),
        ("a // 2 == 3 and a / 2 == 3.5 and a - 1 + 1 == 7", {"a": 7}, True),
    ],
)
def test_evaluates(text: str, values: dict[str, object], expected: bool) -> None:
    assert parse(text).holds(values) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a >= 8", None),  # an ordered comparison with vLLM's unknown default is neither true nor false
        ("a * 2 == 4", None),
        ("not (a > 1)", None),
        ("a >= 8 or true", True),
        ("a >= 8 and false", False),
        ("a >= 8 and true", None),
        ("a == 8", False),  # equality with an absent knob is a definite no
    ],
)
def test_an_absent_knob_is_unknown(text: str, expected: bool | None) -> None:
    assert parse(text).holds({"a": None}) is expected


@pytest.mark.parametrize(
    "text", ["__import__('os')", "a.b()", "[x for x in y]", "a if b else c", "a ** 9", "lambda: 1"]
)
def test_refuses_everything_else(text: str) -> None:
    with pytest.raises(ConfigError, match="not allowed"):
        parse(text)


def test_refuses_what_is_no_expression() -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        parse("a <= ")


def test_names_are_dotted() -> None:
    assert parse("model.args.max_model_len > a and true").names == {"model.args.max_model_len", "a"}
