"""The notebooks run from top to bottom in a clone, and are committed without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_all_four_are_there() -> None:
    assert [n.name[:2] for n in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stripped(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


# What each must have shown: a piece of text, and whether a figure was drawn.
EXPECTED = {
    "01_launch_a_sweep": ("8 x H200", True),
    "02_inspect_the_front": ("on the front", True),
    "03_pick_for_an_sla": ("vllm serve", False),
    "04_compare_studies": ("h200", False),
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWEEP_STUDY", raising=False)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    text, figure = EXPECTED[path.stem]
    assert text.lower() in "".join(_text(o) for o in outputs).lower()
    drawn = [o for o in outputs if "application/vnd.plotly.v1+json" in o.get("data", {})]
    assert bool(drawn) == figure


def _text(output: Any) -> str:
    return str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))
