"""The lessons: every notebook runs from a clean kernel, from both folders, and is committed with its outputs."""

import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_is_a_notebook():
    assert NOTEBOOKS


@pytest.mark.parametrize("folder", [FOLDER, FOLDER.parent], ids=["its folder", "root"])
@each_notebook
def test_its_first_cell_finds_the_project(path, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [])
    exec(code_cells(path)[0].source, {})
    assert sys.path == [str(FOLDER.parent)]


@each_notebook
def test_its_first_cell_says_where_to_start_from(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="start Jupyter in the project's folder or in its folder notebooks"):
        exec(code_cells(path)[0].source, {})


@pytest.mark.slow
@each_notebook
def test_it_runs_from_a_clean_kernel(path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}})
    client.execute()  # raises at the first cell with an error
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]


@each_notebook
def test_it_is_committed_as_it_ran(path):
    nbformat.validate(nbformat.read(path, as_version=4))
    cells = code_cells(path)
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), "run it from top to bottom in a clean kernel, then save"
    for cell in cells:
        kinds = [kind for output in cell.outputs for kind in output.get("data", {})]
        if re.search(r"^(drawing\.draw_|plt\.show)", cell.source, re.MULTILINE):
            assert "image/png" in kinds, f"no figure in the outputs of:\n{cell.source}"
        if re.search(r"^(print|drawing\.(table|summary)|check_)", cell.source, re.MULTILINE):
            assert any(output.output_type == "stream" for output in cell.outputs), f"no text from:\n{cell.source}"


@each_notebook
def test_it_is_small_and_says_nothing_of_the_machine_that_ran_it(path):
    assert path.stat().st_size < 600_000
    for cell in code_cells(path):
        assert "execution" not in cell.metadata  # times
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr"
            text = str({k: v for k, v in output.get("data", {}).items() if k != "image/png"}) + output.get("text", "")
            assert str(FOLDER.parent) not in text
            assert not re.search(r"(/home|/root|/tmp|/Users|\b[A-Z]:\\)", text)


@each_notebook
def test_its_exercises_are_committed_unsolved(path):
    answered = [
        output.text for cell in code_cells(path) if "\ncheck_" in cell.source for output in cell.outputs if output.text
    ]
    assert all("not yet" in text and "right" not in text for text in answered)
