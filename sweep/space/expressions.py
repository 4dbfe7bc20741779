"""The small expression language of `when` and `constraints`: a safe subset of Python, evaluated over plain values.

Names may be dotted (`model.is_moe`, `speculative_config.method`). Allowed: and/or/not, comparisons, in, + - * / // %,
numbers, strings, true/false/null, tuples and lists. Nothing else: no calls, no attributes of objects.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sweep.errors import ConfigError

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_LITERALS = {"true": True, "false": False, "null": None}


class _Unknown:
    """The value of an absent knob in arithmetic: it makes an ordered comparison neither true nor false."""


_UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Expression:
    """A parsed expression. names: every dotted name it reads."""

    text: str
    tree: ast.expr
    names: frozenset[str]

    def holds(self, values: Mapping[str, Any]) -> bool | None:
        """True or False; None when it compares or computes with a knob left to vLLM's default (unknown value)."""
        result = _evaluate(self.tree, values)
        return None if isinstance(result, _Unknown) else bool(result)


def parse(text: str) -> Expression:
    """Raises ConfigError naming the part that is not allowed.

    >>> parse("a * b <= 8 and model.is_moe").holds({"a": 2, "b": 4, "model.is_moe": True})
    True
    >>> parse("a >= 8").holds({"a": None}) is None
    True
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ConfigError(
            f"cannot read the expression '{text}'", f"{error.msg}; Python syntax, e.g. a * b <= 8"
        ) from error
    return Expression(text, tree, frozenset(_names(tree, text)))


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return f"{head}.{node.attr}" if head else None
    return None


def _names(node: ast.expr, text: str) -> set[str]:
    name = _dotted(node)
    if name is not None:
        return set() if name in _LITERALS else {name}
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
        return set()
    allowed = (
        isinstance(node, ast.BoolOp | ast.Tuple | ast.List)
        or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub))
        or (isinstance(node, ast.BinOp) and type(node.op) in _BINARY)
        or (isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops))
    )
    if not allowed:
        raise ConfigError(
            f"'{ast.unparse(node)}' is not allowed in the expression '{text}'",
            "use names, numbers, strings, and, or, not, in, comparisons and arithmetic",
        )
    children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return set().union(*(_names(child, text) for child in children))


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    name = _dotted(node)
    if name is not None:
        return _LITERALS[name] if name in _LITERALS else values.get(name)
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple() | ast.List():
            return [_evaluate(e, values) for e in node.elts]
        case ast.BoolOp():
            return _logical(isinstance(node.op, ast.And), [_evaluate(v, values) for v in node.values])
        case ast.UnaryOp():
            operand = _evaluate(node.operand, values)
            if isinstance(operand, _Unknown):
                return _UNKNOWN
            if isinstance(node.op, ast.Not):
                return not operand
            return _UNKNOWN if operand is None else -operand
        case ast.BinOp():
            left, right = _evaluate(node.left, values), _evaluate(node.right, values)
            if left is None or right is None or isinstance(left, _Unknown) or isinstance(right, _Unknown):
                return _UNKNOWN
            return _BINARY[type(node.op)](left, right)
        case ast.Compare():
            return _compare(node, values)
    raise AssertionError(f"parse() let {ast.dump(node)} through")


def _logical(is_and: bool, operands: list[Any]) -> Any:
    """Three-valued logic: an unknown operand matters only when the known ones do not decide."""
    known = [bool(o) for o in operands if not isinstance(o, _Unknown)]
    if is_and and not all(known):
        return False
    if not is_and and any(known):
        return True
    return _UNKNOWN if len(known) < len(operands) else is_and


def _compare(node: ast.Compare, values: Mapping[str, Any]) -> Any:
    left = _evaluate(node.left, values)
    outcomes: list[Any] = []
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(comparator, values)
        unknown = isinstance(left, _Unknown) or isinstance(right, _Unknown)
        ordered_with_absent = isinstance(op, _ORDERED) and (left is None or right is None)
        outcomes.append(_UNKNOWN if unknown or ordered_with_absent else _COMPARE[type(op)](left, right))
        left = right
    return _logical(True, outcomes)
