"""Runs the notebooks: their text halves (`*.py`) become notebooks (`*.ipynb`).

    python -m notebooks.run [name ...]

Each one runs from the top in a kernel of its own. Its outputs contain nothing of the
machine that made them.
"""

import argparse
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import jupytext
import nbclient
import nbformat

HERE = pathlib.Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
_OF_THE_LOG = re.compile(r"WARNING: All log messages before|[IW]\d+ .*\.cc:\d+\]")


def texts() -> list[pathlib.Path]:
    """Returns the paths of the text halves, in order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def read(path: pathlib.Path) -> Any:
    """Returns the notebook of a text half, without outputs."""
    notebook = jupytext.read(path)
    notebook.metadata = {"kernelspec": KERNEL}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"  # Not random: so an unchanged cell has no diff.
        cell.metadata = {}
    return notebook


def _is_log(output: Any) -> bool:
    """Returns whether an output is XLA's log, which describes the devices."""
    if output.get("name") != "stderr":
        return False
    return all(_OF_THE_LOG.match(line) for line in output.text.splitlines())


def run(path: pathlib.Path) -> Any:
    """Returns the notebook of a text half, with outputs; raises a cell's error."""
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        # JAX frees its programs, which takes some seconds, if a kernel ends by itself.
        shutdown_kernel="immediate",
    )
    client.execute()
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [x for x in cell.outputs if not _is_log(x)]
    notebook.metadata = {"kernelspec": KERNEL}
    return notebook


def main(argv: Sequence[str] | None = None) -> None:
    """Runs notebooks, and writes them beside their text halves."""
    parser = argparse.ArgumentParser("python -m notebooks.run")
    names = [path.stem for path in texts()]
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="name")
    options = parser.parse_args(argv)
    for name in options.names or names:
        start = time.perf_counter()
        nbformat.write(run(HERE / f"{name}.py"), HERE / f"{name}.ipynb")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
