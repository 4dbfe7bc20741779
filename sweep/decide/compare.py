"""Two studies side by side: what they differ in, the points both have, their fronts, and what moved.

Points match when they have the same settings and load; the checkpoint each study is about counts as the same, so that
two versions of a model can be compared. A change is told from noise by Student's t on both points' spreads
(results.uncertainty), and of all changes tested together at most 5 % of those called significant are expected to be
none (Benjamini & Hochberg 1995). Hypervolumes share one reference point: the worse of both studies' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sweep.decide.comparison import FALSE_DISCOVERY_RATE, Comparison, Difference, Hypervolumes
from sweep.decide.explain.arena import beats, spanned
from sweep.decide.explain.change import change, is_relative, step
from sweep.decide.wording import engine_text, plural, shared_settings
from sweep.errors import StudyError
from sweep.results.front import eligible, front, hypervolume, minimized, nondominated
from sweep.results.metrics import get_metric
from sweep.results.points import OperatingPoint, cell, settings
from sweep.results.records import LaunchRecord
from sweep.results.uncertainty import Spreads, minimized_draws

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    from sweep.decide.opened import Study

    FloatArray = npt.NDArray[np.float64]

_SURE, _DRAWS = 0.95, 256
_SETTING = ("model", "hardware", "workload", "engine", "quality")
_SAID_ALREADY = ("model.path", "model.name", "hardware.name")
_COLUMNS = (
    "load_label", "engine", "metric", "a", "b", "change", "low", "high", "p_value", "moved", "better", "point_a",
    "point_b",
)  # fmt: skip


def compare(a: Study, b: Study, objectives: Sequence[str] | None = None) -> Comparison:
    """Compare b with a in these objectives (default: those of a that b has too).

    Raises StudyError when the studies share no objective, ConfigError for an unknown metric.
    """
    names = [get_metric(n).name for n in objectives or [o for o in a.objectives if o in b.objectives]]
    if not names:
        raise StudyError(
            f"'{a.name}' ({', '.join(a.objectives)}) and '{b.name}' ({', '.join(b.objectives)}) share no objective",
            "name metrics that both measured with --objectives",
        )
    pairs = _matched(a, b)
    both = [(p, q) for p, q in pairs if p.state == q.state == "measured"]
    spreads = {"before": Spreads(a.operating_points), "after": Spreads(b.operating_points)}
    shifts = {name: change(_once(both, name), name, spreads) for name in names}
    paired = {id(p) for pair in pairs for p in pair}
    sums = a.meta.get("workload_checksum"), b.meta.get("workload_checksum")
    return Comparison(
        names=(_title(a), _title(b)),
        objectives=tuple(names),
        differences=tuple(differences(a, b)),
        same_requests=None if None in sums else sums[0] == sums[1],
        matched=_changes(both, names, spreads, shared_settings([p for p, _ in both])),
        n_matched=len(both),
        shifts={name: shift for name, shift in shifts.items() if shift is not None},
        only=(
            tuple(p for p in a.operating_points if p.state == "measured" and id(p) not in paired),
            tuple(p for p in b.operating_points if p.state == "measured" and id(p) not in paired),
        ),
        states=tuple((p, q) for p, q in pairs if {p.state, q.state} == {"measured", "failed"}),
        fronts=_fronts(a, b, names),
        hypervolumes=_hypervolumes(a, b, names),
    )


def differences(a: Study, b: Study) -> list[Difference]:
    """What the studies say of their setting and do not say alike: model, vLLM, hardware, requests, engine, space."""
    facts = [_facts(study) for study in (a, b)]
    names = dict.fromkeys(name for study in facts for name in study)
    return [
        Difference(name, facts[0].get(name), facts[1].get(name))
        for name in names
        if facts[0].get(name) != facts[1].get(name)
    ]


def _facts(study: Study) -> dict[str, Any]:
    """What a study says of its setting, the weightiest first; then every setting of the groups in _SETTING."""
    meta, config = study.meta, study.config
    model, hardware = config.get("model", {}), config.get("hardware", {})
    host = meta.get("host", {})
    found = {
        "model": model.get("path") or model.get("name"),
        "vLLM": ", ".join(_vllm_versions(study)) or None,
        "points": ", ".join(_provenances(study)) or None,
        "hardware": hardware.get("name"),
        "driver": host.get("driver"),
        "machine": host.get("node"),
        "requests (checksum)": (meta.get("workload_checksum") or "")[:12] or None,
        "search space": meta.get("search_space_fingerprint"),
        "sweep": meta.get("versions", {}).get("sweep-llm"),
        **{name: value for group in _SETTING for name, value in _flat(group, config.get(group))},
    }
    return {name: value for name, value in found.items() if value is not None and name not in _SAID_ALREADY}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, cell(value)
        return
    for key, inner in value.items():
        yield from _flat(f"{name}.{key}", inner)


def _provenances(study: Study) -> list[str]:
    return sorted({p.provenance for p in study.operating_points if p.state == "measured"})


def _vllm_versions(study: Study) -> list[str]:
    launched = {r.vllm_version for r in study.records if isinstance(r, LaunchRecord) and r.vllm_version}
    stated = study.meta.get("vllm_version") or study.meta.get("versions", {}).get("vllm")
    return sorted(launched) or ([str(stated)] if stated else [])


def _title(study: Study) -> str:
    there = sum(p.state == "measured" for p in study.operating_points)
    kind = " and ".join(_provenances(study)) or "measured"
    return f"{study.name} ({study.path}): {plural(there, f'{kind} point')}"


def _matched(a: Study, b: Study) -> list[tuple[OperatingPoint, OperatingPoint]]:
    theirs = {_identity(p, b): p for p in b.operating_points}
    pairs = ((p, theirs.get(_identity(p, a))) for p in a.operating_points)
    return [(p, q) for p, q in pairs if q is not None]


def _identity(point: OperatingPoint, study: Study) -> tuple[Any, ...]:
    """Settings and load; the study's own checkpoint and what every launch was given besides it are the same thing."""
    model = study.config.get("model", {})
    own = {name: cell(value) for name, value in settings(point.engine).items()}
    if own["model"] == model.get("path"):
        own["model"] = ""
    load = tuple(sorted((k, v) for k, v in point.load.items() if v is not None and (k, v) != ("burstiness", 1.0)))
    return frozenset(own.items()), load


def _once(
    pairs: Sequence[tuple[OperatingPoint, OperatingPoint]], metric: str
) -> list[tuple[OperatingPoint, OperatingPoint]]:
    """All pairs; for quality one of each pair of fingerprints: points share their measurement."""
    if not metric.startswith("quality_"):
        return list(pairs)
    return list({(p.fingerprint, q.fingerprint): (p, q) for p, q in reversed(pairs)}.values())[::-1]


def _changes(
    pairs: Sequence[tuple[OperatingPoint, OperatingPoint]],
    metrics: Sequence[str],
    spreads: Mapping[str, Spreads],
    shared: Mapping[str, Any],
) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    rows, sizes = [], []
    for name in metrics:
        for p, q in _once(pairs, name):
            if name not in p.metrics or name not in q.metrics:
                continue
            u, v = p.metrics[name], q.metrics[name]
            relative = is_relative(name) and u > 0 and v > 0
            found = step(p, q, name, spreads["before"], spreads["after"], relative=relative)
            value, interval = found.estimate(0.95, logarithm=relative)
            better = get_metric(name).sign * (v - u) < 0
            rows.append((p.load_label, engine_text(p, shared), name, u, v, value, *(interval or (None, None)),
                         found.p_value, False, better, p.point_id, q.point_id))  # fmt: skip
            sizes.append(abs(found.value))
    frame = pd.DataFrame(rows, columns=pd.Index(_COLUMNS))
    frame["moved"] = discoveries(frame["p_value"].to_numpy(dtype=np.float64))
    order = np.argsort(-np.array(sizes), kind="stable")
    return frame.iloc[order].reset_index(drop=True)


def discoveries(p_values: FloatArray, rate: float = FALSE_DISCOVERY_RATE) -> npt.NDArray[np.bool_]:
    """Which tests are significant at this false discovery rate, (n,): Benjamini & Hochberg 1995. NaN never is."""
    import numpy as np

    known = np.flatnonzero(~np.isnan(p_values))
    ordered = known[np.argsort(p_values[known], kind="stable")]
    passed = np.flatnonzero(p_values[ordered] <= rate * np.arange(1, len(ordered) + 1) / max(1, len(ordered)))
    result = np.zeros(len(p_values), dtype=bool)
    if len(passed):
        result[ordered[: passed[-1] + 1]] = True
    return result


def _fronts(a: Study, b: Study, objectives: Sequence[str]) -> pd.DataFrame:
    """Columns study ("A" or "B"), point_id, load_label, engine, objectives, on_both (on the front of both together)."""
    import pandas as pd

    shared = {side: shared_settings(study.operating_points) for side, study in (("A", a), ("B", b))}
    sides = [(side, p) for side, study in (("A", a), ("B", b)) for p in front(study.operating_points, objectives)]
    kept = nondominated(minimized([p for _, p in sides], objectives)).tolist() if sides else []
    rows = [
        (side, p.point_id, p.load_label, engine_text(p, shared[side]), *(p.metrics[n] for n in objectives), keep)
        for (side, p), keep in zip(sides, kept, strict=True)
    ]
    columns = ["study", "point_id", "load_label", "engine", *objectives, "on_both"]
    first = get_metric(objectives[0])
    frame = pd.DataFrame(rows, columns=pd.Index(columns))
    return frame.sort_values(first.name, ascending=first.direction == "minimize", ignore_index=True)


def _hypervolumes(a: Study, b: Study, objectives: Sequence[str]) -> Hypervolumes | None:
    """Each study by itself decides which provenance is on its front, so points of both are not put together."""
    import moocore
    import numpy as np

    sides = [eligible(study.operating_points, objectives) for study in (a, b)]
    objectives = spanned([p for side in sides for p in side], objectives)
    own = [hypervolume(points, objectives) for points in sides]
    if own[0] is None or own[1] is None:
        return None
    signs = [get_metric(name).sign for name in objectives]
    limits = [
        max(s * volume.reference_point[name] for volume in own if volume)
        for name, s in zip(objectives, signs, strict=True)
    ]
    measured = [minimized(points, objectives) for points in sides]
    drawn = [minimized_draws(points, objectives, n=_DRAWS, seed=seed) for seed, points in enumerate(sides)]
    volumes = [
        np.array([moocore.hypervolume(v, ref=limits) for v in (values, *draws)])
        for values, draws in zip(measured, drawn, strict=True)
    ]
    ratio, interval = None, None
    if volumes[0].min() > 0:
        ratios = volumes[1] / volumes[0]
        low, high = np.quantile(ratios[1:], (0.025, 0.975))
        ratio, interval = float(ratios[0]), (float(low), float(high))
    return Hypervolumes(
        a=float(volumes[0][0]),
        b=float(volumes[1][0]),
        ratio=ratio,
        interval=interval,
        reference_point={name: float(s * limit) for name, s, limit in zip(objectives, signs, limits, strict=True)},
        beaten_a=_beaten(objectives, sides[0], (measured[0], measured[1]), (drawn[0], drawn[1])),
        beaten_b=_beaten(objectives, sides[1], (measured[1], measured[0]), (drawn[1], drawn[0])),
    )


def _beaten(
    objectives: Sequence[str],
    points: Sequence[OperatingPoint],
    measured: tuple[FloatArray, FloatArray],
    drawn: tuple[FloatArray, FloatArray],
) -> tuple[str, ...]:
    """Front points that one and the same rival beats (explain.arena.beats) in _SURE of the draws.

    measured: (n, objectives) of both sides, drawn: (draws, n, objectives), both minimized. Each study measured quality
    by itself, so there a rival has to be no worse beyond noise.
    """
    import numpy as np

    quality = np.array([not is_relative(name) for name in objectives], dtype=bool)
    others = [name for name in objectives if is_relative(name)]
    spread = [side.std(axis=0)[:, quality] for side in drawn]
    found = []
    for i in np.flatnonzero(nondominated(measured[0])):
        if beats(measured[0], measured[0][i], objectives).any():
            continue  # its own study has better: it marks no frontier
        slack = 1.96 * np.hypot(spread[1], spread[0][i])
        no_worse = np.all(measured[1][:, quality] - measured[0][i, quality] <= slack, axis=1)
        often = beats(drawn[1][..., ~quality], drawn[0][:, [i]][..., ~quality], others).mean(axis=0) >= _SURE
        if (no_worse & often).any():
            found.append(points[i].point_id)
    return tuple(found)
