"""The configurations a search chooses from, and how alike two of them are.

All launchable members of the space where they can be counted, else a uniform draw of them; the one-knob neighbours of
what turns out well are added as the search goes. Alikeness is told knob by knob from the values that labels set:
numbers are as close as their ranks, everything else is equal or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sweep.search.history import FloatArray
from sweep.space.params import Choice, Label, Param
from sweep.space.search_space import Params, SearchSpace

LIMIT = 4_000
_RANGE_STEPS = 16
_UNLIKE = 0.1
_INACTIVE = "(inactive)"

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Key = tuple[tuple[str, Label], ...]


def key_of(params: Mapping[str, Label]) -> Key:
    """Identity of a configuration, whatever the order of its dimensions."""
    return tuple(sorted(params.items()))


class Candidates:
    """members: launchable configurations, no two the same. codes: (members, dimensions), rows of the likeness tables.

    allowed: what else must hold of a member (devices of the node, holes of a table). given: all members, where known.
    """

    def __init__(
        self,
        space: SearchSpace,
        seed: int,
        allowed: Callable[[Params], bool] = lambda _: True,
        given: Sequence[Params] | None = None,
        limit: int = LIMIT,
    ) -> None:
        self.space = space
        self.members: list[Params] = []
        self._allowed = allowed
        self._rows: dict[Key, int] = {}
        self._neighbours: dict[Key, list[int]] = {}
        self._labels = [_labels(param) for param in space.params]
        self._index = [{_hashable(label): i for i, label in enumerate(labels)} for labels in self._labels]
        self._codes: list[list[int]] = []
        self._code_table = np.zeros((0, len(space.params)), dtype=np.int64)
        self.complete = self._fill(seed, limit, given)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def codes(self) -> IntArray:
        if len(self._code_table) != len(self._codes):
            self._code_table = np.array(self._codes, dtype=np.int64).reshape(len(self._codes), len(self.space.params))
        return self._code_table

    def row(self, params: Mapping[str, Label]) -> int:
        """The row of a configuration, which becomes a member if it was none."""
        key = key_of(params)
        if key not in self._rows:
            self._rows[key] = len(self.members)
            self.members.append(dict(params))
            self._codes.append([self._code(d, params) for d in range(len(self._labels))])
        return self._rows[key]

    def neighbours(self, params: Params) -> list[int]:
        """Rows of the launchable configurations that differ in one dimension (and in those that then come or go)."""
        key = key_of(params)
        if key not in self._neighbours:
            found = []
            for param, labels in zip(self.space.params, self._labels, strict=True):
                if param.name not in params:
                    continue
                for label in labels:
                    if label != params[param.name] or isinstance(label, bool) != isinstance(params[param.name], bool):
                        changed = self._with(params, param.name, label)
                        if self.launchable(changed):
                            found.append(self.row(changed))
            self._neighbours[key] = found
        return self._neighbours[key]

    def simpler(self, params: Params) -> list[int]:
        """Neighbours that leave one knob more to vLLM's default, on no more devices' worth of settings."""
        own = self.overrides(params)
        return [row for row in self.neighbours(params) if self.overrides(self.members[row]) < own]

    def overrides(self, params: Params) -> int:
        """How many arguments a configuration sets, the number of devices aside."""
        settings = self.space.settings(params)
        return sum(v is not None and not k.endswith("_parallel_size") for k, v in settings.items())

    def likeness(self, length: float) -> list[FloatArray]:
        """One (labels, labels) table per dimension, positive semidefinite. length: in shares of a knob's ranks."""
        return [_likeness(param, labels, length) for param, labels in zip(self.space.params, self._labels, strict=True)]

    def _fill(self, seed: int, limit: int, given: Sequence[Params] | None) -> bool:
        if given is not None:
            for params in given:
                self.row(params)
            return True
        finite = all(isinstance(param, Choice) for param in self.space.params)
        if finite:
            head = list(itertools.islice(self.space.enumerate(), 5 * limit + 1))
            if len(head) <= 5 * limit:
                launchable = [params for params in head if self.launchable(params)]
                if len(launchable) <= limit:
                    for params in launchable:
                        self.row(params)
                    return True
        rng = np.random.default_rng(seed)
        for _ in range(20 * limit):
            params = self.space.suggest(lambda param: _draw(param, self._labels_of(param), rng))
            if self.launchable(params):
                self.row(params)
            if len(self.members) >= limit:
                break
        return False

    def _labels_of(self, param: Param) -> Sequence[Label]:
        return self._labels[self.space.params.index(param)]

    def launchable(self, params: Params) -> bool:
        """Whether no rule of the space or of its owner forbids it."""
        return not self.space.violations(params) and self._allowed(params)

    def _with(self, params: Params, name: str, label: Label) -> Params:
        """The same with one label changed; what becomes active takes its first label."""
        wanted = {**params, name: label}
        return self.space.suggest(lambda p: wanted[p.name] if p.name in wanted else self._labels_of(p)[0])

    def _code(self, dimension: int, params: Mapping[str, Label]) -> int:
        param = self.space.params[dimension]
        if param.name not in params:
            return len(self._labels[dimension])
        label = params[param.name]
        known = self._index[dimension].get(_hashable(label))
        if known is not None:
            return known
        numbers = np.array(self._labels[dimension], dtype=float)  # only a range has values between its steps
        return int(np.abs(numbers - float(label or 0.0)).argmin())


def _hashable(label: Label) -> tuple[str, Label]:
    return type(label).__name__, label


def _labels(param: Param) -> tuple[Label, ...]:
    if isinstance(param, Choice):
        return param.labels
    spread = np.geomspace if param.log else np.linspace
    return tuple(float(v) for v in spread(param.low, param.high, _RANGE_STEPS))


def _draw(param: Param, labels: Sequence[Label], rng: np.random.Generator) -> Label:
    return labels[int(rng.integers(len(labels)))]


def _settings(param: Param, labels: Sequence[Label]) -> list[Mapping[str, object]]:
    return [param.setting(label) for label in labels]


def _likeness(param: Param, labels: Sequence[Label], length: float) -> FloatArray:
    settings = _settings(param, labels)
    knobs = sorted({knob for setting in settings for knob in setting})
    n = len(labels)
    table = np.eye(n + 1)
    if not knobs:
        return np.ones((n + 1, n + 1))
    positions = {knob: _positions([setting.get(knob) for setting in settings]) for knob in knobs}
    for i, j in _pairs(n):
        parts = [
            _alike(settings[i].get(knob), settings[j].get(knob), positions[knob][i], positions[knob][j], length)
            for knob in knobs
        ]
        table[i, j] = table[j, i] = float(np.mean(parts))
    table[n, :n] = table[:n, n] = _UNLIKE
    return _semidefinite(table)


def _pairs(n: int) -> Iterator[tuple[int, int]]:
    return itertools.combinations(range(n), 2)


def _positions(values: Sequence[object]) -> list[float | None]:
    """The rank of every number among the numbers, from 0 to 1."""
    numbers = sorted({v for v in values if isinstance(v, int | float) and not isinstance(v, bool)})
    place = {v: i / max(len(numbers) - 1, 1) for i, v in enumerate(numbers)}
    return [place[v] if isinstance(v, int | float) and not isinstance(v, bool) else None for v in values]


def _alike(a: object, b: object, at_a: float | None, at_b: float | None, length: float) -> float:
    if at_a is not None and at_b is not None:
        return float(np.exp(-abs(at_a - at_b) / length))
    return 1.0 if a == b else _UNLIKE


def _semidefinite(table: FloatArray) -> FloatArray:
    """The nearest table with no negative eigenvalue and ones on its diagonal."""
    values, vectors = np.linalg.eigh(table)
    clipped = (vectors * np.maximum(values, 1e-9)) @ vectors.T
    norm = np.sqrt(np.diag(clipped))
    result: FloatArray = clipped / norm[:, None] / norm[None, :]
    return result
