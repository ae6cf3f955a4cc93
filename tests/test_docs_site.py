"""The site has a complete reference, links that work and current figures."""

import collections
import importlib
import pathlib
import re
import subprocess
import sys
import urllib.parse

import pytest

import jmp_lite as jmp

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.glob("*.md"))
PUBLIC = (ROOT / "tests" / "public_api.txt").read_text().splitlines()
PROJECTS = ("flax", "jax", "optax")
WIDEST_LINE = 104
"""Characters of a preformatted line that fit beside both sidebars at 1400 px."""


@pytest.fixture(scope="module")
def import_docs():
    """Imports a module that lies in docs/."""
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module
    sys.path.remove(str(DOCS))


# ------------------------------------------------------------------------ the reference


def documented():
    """Returns the names of the directives of the API pages."""
    names = []
    for page in sorted((DOCS / "api").glob("*.md")):
        module = ""
        for line in page.read_text().splitlines():
            if match := re.match(r"\.\. currentmodule:: (\S+)", line):
                module = match[1] + "."
            elif match := re.match(r"\.\. auto(?!module)\w+:: (\S+)", line):
                is_full = match[1].startswith("jmp_lite.")
                names.append(match[1] if is_full else module + match[1])
    return names


def top_level_names():
    """Returns the public names that are no members of a class."""
    names = {re.match(r"[\w.]+", line)[0] for line in PUBLIC}
    return {name for name in names if name.rpartition(".")[0] not in names}


def test_every_public_name_is_documented_once_and_nothing_else_is():
    counts = collections.Counter(documented())
    assert {name for name, count in counts.items() if count > 1} == set()
    assert set(counts) == top_level_names()


def test_every_page_of_the_reference_and_every_guide_is_in_the_table_of_contents():
    index = (DOCS / "index.md").read_text()
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
    entries = re.findall(r"^[a-z]\S*$", "\n".join(blocks), re.MULTILINE)
    pages = [*DOCS.glob("*.md"), *(DOCS / "api").glob("*.md")]
    expected = {path.relative_to(DOCS).with_suffix("").as_posix() for path in pages}
    found = [entry for entry in entries if not entry.startswith("notebooks/")]
    assert sorted(found) == sorted(expected - {"index"})


# -------------------------------------------------------------------------------- links


def split_code(text):
    """Returns the lines outside fenced blocks, and those inside preformatted ones."""
    prose, code, fence, directive = [], [], "", False
    for line in text.splitlines():
        mark = re.match(r" *(`{3,}|~{3,})(.*)", line)
        if fence and mark and mark[1] == fence and not mark[2].strip():
            fence = ""
        elif fence:
            code += [] if directive else [line]
        elif mark:
            fence, directive = mark[1], mark[2].startswith("{")
        else:
            prose.append(line)
    return "\n".join(prose), code


def anchors_of(text):
    """Returns the anchors of the headings, by the rule that GitHub and MyST share."""
    anchors, counts = set(), collections.Counter()
    for title in re.findall(r"^#{1,3} (.*)$", split_code(text)[0], re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        anchors.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return anchors | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def dead_anchors(page, text):
    """Returns the links of a page to a heading that does not exist."""
    links = re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)", split_code(text)[0])
    dead = []
    for file, anchor in links:
        target = (page.parent / file) if file else page
        if target.suffix == ".md" and anchor not in anchors_of(target.read_text()):
            dead.append(f"{file}#{anchor}")
    return dead


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_every_anchor_that_a_page_links_exists(page):
    path = ROOT / page
    if not path.exists():
        pytest.skip("not written yet")
    assert dead_anchors(path, path.read_text()) == []


def test_a_dead_anchor_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Where `it` *is*, twice\n```\n# Not a heading\n```\n## Second\n")
    (tmp_path / "other.md").write_text("# Other\n## Second\n## Second\n")
    good = "[a](#where-it-is-twice) [b](page.md#second) [c](other.md#second-1)"
    bad = "[d](#not-a-heading) [e](other.md#third) [f](https://a.b/c#d)"
    assert anchors_of(page.read_text()) == {"where-it-is-twice", "second"}
    assert dead_anchors(page, good) == []
    assert dead_anchors(page, bad) == ["#not-a-heading", "other.md#third"]


@pytest.mark.parametrize("project", PROJECTS)
def test_an_inventory_has_sorted_rows_of_name_role_and_address(project):
    text = (DOCS / "inventories" / f"{project}.txt").read_text()
    rows = [line.split(" ") for line in text.splitlines() if not line.startswith("#")]
    names = [name for name, _, _ in rows]
    assert names
    assert names == sorted(set(names))
    for name, role, url in rows:
        assert name.startswith(f"{project}.")
        assert role in ("class", "function", "module")
        assert re.fullmatch(r"[\w./{}]+\.html(#[\w.{}]+)?", url)


def test_an_inventory_is_what_intersphinx_reads(import_docs, tmp_path):
    inventory = pytest.importorskip("sphinx.util.inventory")
    mapping = import_docs("links").write_inventories(tmp_path)
    site, path = mapping["jax"]
    read = inventory.InventoryFile.loads(pathlib.Path(path).read_bytes(), uri=site)
    entry = read.data["py:function"]["jax.vmap"]
    assert entry.uri == f"{site}_autosummary/jax.vmap.html#jax.vmap"


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("autocast", "jmp_lite.autocast"),
        ("jmp.autocast(loss_fn, rules)", "jmp_lite.autocast"),
        ("@full_precision", "jmp_lite.full_precision"),
        ("LossScalingState.skipped", "jmp_lite.states.LossScalingState.skipped"),
        ("jmp_lite.nnx.autocast", "jmp_lite.nnx.autocast"),
        ("nnx.jit", "flax.nnx.jit"),
        ("lax.scan(body, x)", "jax.lax.scan"),
        ("optax.MultiSteps", "optax.MultiSteps"),
        ("grad", None),
        ("jmp.grad", "jmp_lite.grad"),
        ("loss_scale", None),
        ("float32", None),
        ("x.astype(jnp.float32)", None),
        ("autocast is", None),
    ],
)
def test_a_literal_that_names_an_object_is_a_link(import_docs, text, target):
    pytest.importorskip("sphinx")
    assert import_docs("links").target_of(text, is_reference=False) == target


def test_in_the_reference_a_bare_name_is_that_of_this_library(import_docs):
    pytest.importorskip("sphinx")
    target_of = import_docs("links").target_of
    assert target_of("value_and_grad", is_reference=True) == "jmp_lite.value_and_grad"


# ------------------------------------------------------------------------------- widths


@pytest.mark.parametrize("page", PAGES)
def test_preformatted_lines_fit_without_scrolling_at_1400_px(page):
    _, lines = split_code((ROOT / page).read_text())
    assert [line for line in lines if len(line) > WIDEST_LINE] == []


# ------------------------------------------------------------------------------ figures


@pytest.fixture(scope="module")
def figures(import_docs):
    return import_docs("figures")


@pytest.mark.parametrize("name", ["accuracy", "training_steps", "transformer_block"])
def test_a_committed_figure_shows_the_numbers_of_a_new_computation(figures, name):
    path = DOCS / f"{name}.svg"
    compute, _ = figures.FIGURES[name]
    assert path.stat().st_size < 150_000
    assert figures.data_of(path) == compute()


def test_each_part_of_the_figure_has_the_precision_that_explain_shows(figures):
    data = figures.block_data()
    assert list(data) == list(figures.PARTS)
    shown = collections.defaultdict(set)
    for row in figures.explain_transformer():
        inside = [part for part in data if f"{row.scope}/".startswith(f"{part}/")]
        # The figure shows the operands and the result of a GELU.
        if inside == ["block_1/gelu"] and row.op != "integer_pow":
            continue
        if inside and row.op != "broadcast_in_dim" and row.precision != "as traced":
            shown[inside[0]].add(row.precision)
    assert dict(shown) == {part: {precision} for part, precision in data.items()}
    products = {"qkv", "scores", "values", "output", "up", "down", "logits"}
    for part, precision in data.items():
        name = part.rpartition("/")[2]
        if name in products:
            assert precision == "bfloat16"
        if name.startswith("LayerNorm") or name in ("softmax", "loss"):
            assert precision == "float32"


def test_each_level_lowers_what_the_one_before_it_does_and_more(figures):
    levels = figures.level_data()
    assert set(levels["O0"].values()) == {"float32"}
    assert set(levels["O3"].values()) == {"bfloat16"}
    for before, after in (("O0", "O1"), ("O1", "O2"), ("O2", "O3")):
        low = [
            {column for column, at in levels[level].items() if at == "bfloat16"}
            for level in (before, after)
        ]
        assert low[0] < low[1]


def test_the_functions_that_do_the_steps_are_public(figures):
    functions = [function for _, function, _ in figures.STEPS]
    assert len(functions) == 7
    for function in functions[1:]:
        assert function.removeprefix("jmp.") in jmp.__all__


def test_the_curves_are_five_seeds_of_ten_epochs_each(figures):
    for curves in figures.accuracy_data().values():
        for name in ("loss", "accuracy"):
            assert len(curves[name]) == 5
            assert {len(seed) for seed in curves[name]} == {10}


# ----------------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Builds the site, and returns its folder."""
    for module in ("furo", "myst_nb", "sphinx_copybutton"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("site")
    options = ("--builder", "html", "--fail-on-warning", "--keep-going", "--quiet")
    subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(folder)],
        check=True,
    )
    return folder


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_documents_every_member(site):
    inventory = pytest.importorskip("sphinx.util.inventory")
    found = inventory.InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    names = [
        name for role, each in found.data.items() if "py:" in role for name in each
    ]
    assert len(names) == len(set(names))
    # Members of a base class are documented there.
    missing = {re.match(r"[\w.]+", line)[0] for line in PUBLIC} - set(names)
    assert {name.rpartition(".")[0] for name in missing} <= {
        "jmp_lite.results.LeafNumerics",
        "jmp_lite.results.OpNumerics",
    }
    for page in ("index", "changelog", "api/autocasting"):
        assert f"jmp_lite {jmp.__version__}" in (site / f"{page}.html").read_text()
    signature = (site / "api" / "autocasting.html").read_text()
    assert "https://docs.jax.dev/en/latest/jax.typing.html" in signature


def dead_links(site):
    """Returns the links between pages of a site whose page or anchor is missing."""
    pages = {page.resolve(): page.read_text() for page in site.rglob("*.html")}
    anchors = {
        page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()
    }
    dead = []
    for page, text in pages.items():
        for link in re.findall(r'<a\b[^>]*\bhref="([^"]*#[^"]+)"', text):
            url = urllib.parse.urlsplit(link)
            target = (page.parent / url.path).resolve() if url.path else page
            anchor = urllib.parse.unquote(url.fragment)
            if not url.scheme and anchor not in anchors.get(target, ()):
                dead.append(f"{page.relative_to(site.resolve())}: {link}")
    return dead


@pytest.mark.slow
def test_every_anchor_that_a_page_of_the_site_links_exists(site):
    sources = list((site / "_modules").rglob("*.html"))
    assert sum("[docs]" in page.read_text() for page in sources) > 20
    assert dead_links(site) == []


def test_a_dead_link_of_a_site_is_found(tmp_path):
    (tmp_path / "_modules").mkdir()
    (tmp_path / "api.html").write_text('<p id="f">f</p> <a href="#f">here</a>')
    good = '<a class="x" href="../api.html#f">a</a> <a href="https://a.b/c#d">b</a>'
    bad = '<a href="../api.html#g">c</a> <a href="../none.html#f">d</a>'
    (tmp_path / "_modules" / "f.html").write_text(good + bad)
    assert dead_links(tmp_path) == [
        "_modules/f.html: ../api.html#g",
        "_modules/f.html: ../none.html#f",
    ]
