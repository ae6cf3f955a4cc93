"""Links of the site: names in text, types in signatures, and the docs of JAX.

A Sphinx extension. The sites of JAX, optax and Flax are linked through the inventories
in ``inventories/``, text files that a build turns into what intersphinx reads: no build
needs the network.
"""

import inspect
import pathlib
import pydoc
import re
import zlib
from typing import ParamSpec, TypeVar

import docutils.nodes
import jax.typing
from sphinx import addnodes
from sphinx.util.typing import stringify_annotation

import jmp_lite
import jmp_lite.linen
import jmp_lite.nnx
import jmp_lite.numerics
import jmp_lite.ops
import jmp_lite.results
import jmp_lite.states

HERE = pathlib.Path(__file__).parent

SITES = {
    "jax": "https://docs.jax.dev/en/latest/",
    "optax": "https://optax.readthedocs.io/en/latest/",
    "flax": "https://flax.readthedocs.io/en/latest/",
}

# ---------------------------------------------------------------------- inventories


def read_inventory(project):
    """Returns rows ``(name, role, address)`` of ``inventories/{project}.txt``."""
    lines = (HERE / "inventories" / f"{project}.txt").read_text().splitlines()
    rows = (line.split() for line in lines if line and not line.startswith("#"))
    return [(name, role, url.replace("{}", name)) for name, role, url in rows]


def write_inventories(folder):
    """Writes an ``objects.inv`` for each project; returns intersphinx's mapping."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, site in SITES.items():
        head = (
            "# Sphinx inventory version 2",
            f"# Project: {project}",
            "# Version: latest",
            "# The remainder of this file is compressed using zlib.\n",
        )
        rows = [
            f"{name} py:{role} 1 {url} -\n"
            for name, role, url in read_inventory(project)
        ]
        path = folder / f"{project}.inv"
        path.write_bytes(
            "\n".join(head).encode() + zlib.compress("".join(rows).encode())
        )
        mapping[project] = (site, str(path))
    return mapping


# -------------------------------------------------------------------- names in text

PREFIXES = {
    "jmp": "jmp_lite",
    "jmp_lite": "jmp_lite",
    "jax": "jax",
    "jnp": "jax.numpy",
    "lax": "jax.lax",
    "optax": "optax",
    "flax": "flax",
    "nnx": "flax.nnx",
}
OF_JAX_TOO = ("grad", "value_and_grad")
"""Without a prefix these mean JAX's functions, but for the reference."""


def target_of(text, *, is_reference):
    """Returns the full name of what a literal names or calls, or None.

    Whether there is such an object, the builder finds out.
    """
    match = re.match(r"@?([A-Za-z_][\w.]*)(\(.*\))?$", text, re.DOTALL)
    if not match:
        return None
    name = match[1]
    first, _, rest = name.partition(".")
    if first in PREFIXES and rest:
        return f"{PREFIXES[first]}.{rest}"
    if name in OF_JAX_TOO and not is_reference:
        return None
    homes = (module for module in _MODULES if first in module.__all__)
    home = next(homes, None)
    return f"{home.__name__}.{name}" if home else None


_MODULES = (
    *(jmp_lite, jmp_lite.results, jmp_lite.states, jmp_lite.numerics, jmp_lite.ops),
)


def link_names(app, doctree):
    """Makes a literal that names an object a link, once in each section."""
    page = app.env.docname
    seen = set()
    for literal in list(doctree.findall(docutils.nodes.literal)):
        ancestors = list(_ancestors(literal))
        if any(isinstance(node, _NO_LINKS) for node in ancestors):
            continue
        target = target_of(literal.astext(), is_reference=page.startswith("api/"))
        described = [node for node in ancestors if isinstance(node, addnodes.desc)]
        own = {name for node in described for name in node[0]["ids"]}
        place = next((n for n in ancestors if isinstance(n, _PLACES)), doctree)
        if target is None or target in own or (id(place), target) in seen:
            continue
        seen.add((id(place), target))
        link = addnodes.pending_xref(
            "",
            refdomain="py",
            reftype="obj",
            reftarget=target,
            refexplicit=True,
            refwarn=False,
            refdoc=page,
        )
        literal.replace_self(link)
        link += literal


_NO_LINKS = (docutils.nodes.title, docutils.nodes.reference, addnodes.pending_xref)
_PLACES = (docutils.nodes.section, addnodes.desc)


def _ancestors(node):
    while node.parent is not None:
        node = node.parent
        yield node


# -------------------------------------------------------------- types in signatures

ALIASES = {
    stringify_annotation(union, mode): f"~jax.typing.{name}"
    for name in ("DTypeLike", "ArrayLike")
    for union in (getattr(jax.typing, name),)
    for mode in ("smart", "fully-qualified-except-typing")
}
"""The text of JAX's unions, and the names that users know."""

PUBLIC = {
    **{
        f"{value.__module__}.{value.__qualname__}": f"{module.__name__}.{name}"
        for module in (jmp_lite, jmp_lite.nnx)
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__.startswith("jmp_lite")
        if name in getattr(module, "__all__", ()) or value.__module__ == module.__name__
    },
    "optax._src.base.GradientTransformation": "optax.GradientTransformation",
    "optax._src.base.GradientTransformationExtraArgs": "optax.GradientTransformation",
    "flax.nnx.module.Module": "flax.nnx.Module",
    "flax.nnx.training.optimizer.Optimizer": "flax.nnx.Optimizer",
}
"""From where a class is defined to the name that users know."""

TYPE_ALIASES = {
    "DTypeLike": "jax.typing.DTypeLike",
    "Rules": "jmp_lite.Rules",
}
"""For the types of overloads, which Sphinx reads from the source."""


def with_names(text):
    """Returns a signature's text with public names in place of private paths."""
    for union, alias in ALIASES.items():
        text = text.replace(union, alias)

    def public(match):
        name = match[1]
        is_variable = isinstance(pydoc.locate(name), TypeVar | ParamSpec)
        return name.rpartition(".")[2] if is_variable else f"~{PUBLIC.get(name, name)}"

    text = re.sub(r"~?((?:jmp_lite|optax\._src|flax\.nnx)(?:\.\w+)+)", public, text)
    text = re.sub(r"(?<!~)collections\.abc\.", "~collections.abc.", text)
    return re.sub(r"Callable\[\[(~?_?Params)\], ", r"Callable[\1, ", text)


def tidy_signature(app, what, name, obj, options, signature, returns):
    """Shows the value of a default that is a constant, or dots."""
    if signature is None:
        return None

    def value_of(match):
        value = getattr(inspect.getmodule(obj), match[1], None)
        return f" = {value!r}" if isinstance(value, int | tuple) else " = ..."

    signature = re.sub(
        r" = (_\w+|[A-Z][A-Z_]+|<factory>)(?![\w.])", value_of, signature
    )
    return with_names(signature), returns and with_names(returns)


def type_attributes(app, what, name, obj, options, lines):
    """Moves the type of an attribute from below its description to its signature."""
    at = None
    for i, line in reversed(list(enumerate(lines))):
        if match := re.match(r" {3}(:type: .*)", line):
            at, typed = i, with_names(match[1])
        elif line.startswith(".. attribute::") and at is not None:
            del lines[at]
            lines.insert(i + 1, f"   {typed}")
            at = None


# ------------------------------------------------------------------ pages of source


def mend_back_links(app, pagename, templatename, context, doctree):
    """Links from the source of an object to where it is documented.

    ``sphinx.ext.viewcode`` takes one public module for all objects of a file, but the
    function of a file is in ``jmp_lite``, and its state in ``jmp_lite.states``.
    """
    if not pagename.startswith("_modules/") or "body" not in context:
        return
    objects = app.env.get_domain("py").objects
    found = {
        (app.builder.get_relative_uri(pagename, one.docname), local_name(name)): name
        for name, one in objects.items()
    }

    def mended(match):
        page, name = match[1], match[2]
        name = name if name in objects else found.get((page, local_name(name)), name)
        return f'href="{page}#{name}"'

    context["body"] = re.sub(
        r'href="([^"#]+)#(jmp_lite[\w.]*)"', mended, context["body"]
    )


def local_name(name):
    """Returns the name of an object inside of its public module."""
    modules = sorted((module.__name__ for module in _PUBLIC_MODULES), key=len)
    for module in reversed(modules):
        if name.startswith(f"{module}."):
            return name.removeprefix(f"{module}.")
    return name


_PUBLIC_MODULES = (*_MODULES, jmp_lite.linen, jmp_lite.nnx)


# ------------------------------------------------------------- pages from elsewhere


def link_tables(app, docname, source):
    """Links the page that includes the tables of the benchmarks, and not their file."""
    source[0] = source[0].replace("(../benchmarks/results/README.md", "(tables.md")


def setup(app):
    """Connects all of it."""
    app.connect("source-read", link_tables)
    app.connect("html-page-context", mend_back_links)
    app.connect("doctree-read", link_names)
    app.connect("autodoc-process-signature", tidy_signature)
    app.connect("autodoc-process-docstring", type_attributes, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
