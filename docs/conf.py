"""The site of the documentation: `make docs` builds it, and a warning is an error."""

import pathlib
import shutil

import jmp_lite

HERE = pathlib.Path(__file__).parent

# The notebooks are shown as they were committed, outputs and all; a page has to lie
# below this folder.
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks", dirs_exist_ok=True)

project = "jmp_lite"
author = "the authors of jmp_lite"
copyright = "the authors of jmp_lite, Apache-2.0"
version = release = jmp_lite.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
# The text halves of the notebooks are no pages.
exclude_patterns += ["notebooks/*.py", "notebooks/*.md"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
nb_execution_mode = "off"
nb_merge_streams = True

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "jmp_lite"
html_theme_options = {"top_of_page_buttons": []}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
