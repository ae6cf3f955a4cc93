"""The site of the documentation: `make docs` builds it, and a warning is an error."""

import pathlib
import shutil
import sys

import jmp_lite

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import links  # noqa: E402  It lies beside this file.

# The notebooks are shown as they were committed, outputs and all; a page has to lie
# below this folder.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks")

project = "jmp_lite"
author = "the authors of jmp_lite"
copyright = "the authors of jmp_lite, Apache-2.0"
version = release = jmp_lite.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "links",
]
exclude_patterns = ["_build", "jupyter_execute"]
# The text halves of the notebooks are no pages.
exclude_patterns += ["notebooks/*.py", "notebooks/*.md"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
nb_execution_mode = "off"
nb_merge_streams = True

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = links.TYPE_ALIASES
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
toc_object_entries_show_parents = "hide"
intersphinx_mapping = links.write_inventories(HERE / "_build" / "inventories")

html_theme = "furo"
html_title = f"jmp_lite {version}"
html_theme_options = {"top_of_page_buttons": []}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "_static" / "scorer.js")
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
