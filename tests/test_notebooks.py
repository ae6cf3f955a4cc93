"""The notebooks run, and their committed outputs belong to their text halves."""

import re

import nbformat
import pytest

from notebooks import run

NAMES = [path.stem for path in run.texts()]
LONG = {2, 3, 5, 8, 10}  # Each trains or searches for more than 15 seconds.
README = (run.HERE.parent / "README.md").read_text()


def committed(name):
    return nbformat.read(run.HERE / f"{name}.ipynb", as_version=4)


def sources(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def written(notebook):
    """Returns the text of all outputs."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts.append(output.get("text", ""))
            texts.append(output.get("data", {}).get("text/plain", ""))
    return "\n".join(texts)


def places_of_pictures(cells):
    """Returns the number of a cell for each of its pictures."""
    return [
        place
        for place, cell in enumerate(cells)
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]


def test_the_readme_links_the_notebooks_in_their_order():
    assert re.findall(r"notebooks/(\w+)\.ipynb", README) == NAMES
    assert [name[:2] for name in NAMES] == [f"{i:02}" for i in range(1, 12)]
    assert NAMES[0].endswith("autocast")
    assert NAMES[-1].endswith("policies")


@pytest.mark.parametrize("name", NAMES)
def test_outputs_belong_to_the_text(name):
    shown = committed(name)
    nbformat.validate(shown)
    assert sources(shown) == sources(run.read(run.HERE / f"{name}.py"))
    code = [cell for cell in shown.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert "error" not in {output.output_type for output in outputs}
    assert not [o for o in outputs if o.get("name") == "stderr"]


@pytest.mark.parametrize("name", NAMES)
def test_one_question_comes_first_and_its_answer_last(name):
    cells = committed(name).cells
    assert re.match(rf"# {int(name[:2])}\. .*\n\n\*\*[^*]*\?\*\*", cells[0].source)
    assert cells[0].source.count("?") == 1
    assert "\n\n**Answer.** " in "\n\n" + cells[-1].source
    assert "TODO" not in "".join(cell.source for cell in cells)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_one_picture_with_title_and_labels(name):
    cells = committed(name).cells
    (cell,) = [cells[place] for place in places_of_pictures(cells)]
    assert "title" in cell.source
    assert "label" in cell.source


@pytest.mark.parametrize("name", ["01_autocast", "02_loss_scaling"])
def test_the_picture_follows_the_question_and_the_model(name):
    # The question, the model, a text, what is drawn, and the picture.
    (place,) = places_of_pictures(committed(name).cells)
    assert place < 5


@pytest.mark.parametrize("name", NAMES)
def test_outputs_contain_nothing_of_the_machine_that_made_them(name):
    shown = committed(name)
    assert not re.search(r"/(tmp|home|root|work|usr)/|0x[0-9a-f]{8}", written(shown))
    # A kernel names the file of a cell by a hash; colors of a terminal are escapes.
    assert not re.search(r"\d{6,}\.py|\x1b|Warning", written(shown))
    assert set(shown.metadata) == {"kernelspec"}
    assert (run.HERE / f"{name}.ipynb").stat().st_size < 600_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.daily) if int(name[:2]) in LONG else name
        for name in NAMES
    ],
)
def test_a_notebook_runs_and_has_outputs_of_the_committed_kinds(name):
    made, shown = run.run(run.HERE / f"{name}.py"), committed(name)
    for now, then in zip(made.cells, shown.cells, strict=True):
        kinds = [
            [o.output_type for o in cell.get("outputs", [])] for cell in (now, then)
        ]
        assert kinds[0] == kinds[1], now.source


def test_a_place_in_a_notebook_is_a_cell_and_a_line():
    places = re.findall(r" at (\S+:\d+)", written(committed("01_autocast")))
    assert places
    assert all(re.fullmatch(r"In\[\d+\]:\d+", place) for place in places)
