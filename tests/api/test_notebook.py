"""Notebooks, run by Jupyter: what is written in their cells is taken as it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from api.test_any_object import PROGRAM, TRAINING, results
from small_runs import sort_prompts, word_model, write_lines

FOLDER = Path(__file__).parents[2] / "examples" / "python"


def printed(notebook: NotebookNode, folder: Path) -> str:
    """Run a notebook in a kernel, in `folder`, and return what its cells printed."""
    before = os.environ.copy()
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(folder / "ipython"),
    }
    try:
        client = NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(folder)}})
        client.execute()
    finally:
        os.environ.clear()
        os.environ |= before
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.long
def test_cells_train_with_closures_objects_and_partials(tmp_path: Path) -> None:
    word_model(tmp_path / "model")
    write_lines(tmp_path / "p.jsonl", sort_prompts(4))
    arguments = f"import sys\nsys.argv = ['', {str(tmp_path)!r}, {str(tmp_path)!r}]"
    cells = [new_code_cell(source) for source in (arguments, PROGRAM, TRAINING)]
    found = results(printed(new_notebook(cells=cells), tmp_path))
    assert len(set(found.values())) == 1


@pytest.mark.nightly
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / "tour.ipynb", as_version=4)
    assert "held out: " in printed(notebook, tmp_path)
    assert (tmp_path / "tour" / "report.html").is_file()
