"""The notebook runs from top to bottom on a study, and is committed without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "notebooks" / "inspect_front.ipynb"


def test_outputs_are_stripped():
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_it_runs_on_a_study(study_dir, monkeypatch):
    monkeypatch.setenv("SWEEP_STUDY", str(study_dir))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The kernel starts in the repository, so that an uninstalled checkout is importable.
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    data = [o.data for c in notebook.cells if c.cell_type == "code" for o in c.outputs if "data" in o]
    assert len(data) == 6
    assert any("application/vnd.plotly.v1+json" in d for d in data), "the front is drawn"
    assert any("vllm serve" in d.get("text/plain", "") for d in data), "a deployment is picked"
