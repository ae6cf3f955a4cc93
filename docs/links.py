"""Links of the site: names in text, types in signatures, and the docs of JAX.

A Sphinx extension. The sites of JAX, optax and Flax are linked through the inventories
in ``inventories/``, text files that a build turns into what intersphinx reads: no build
needs the network.
"""

import inspect
import pathlib
import re
import zlib

import docutils.nodes
import jax.typing
from sphinx import addnodes
from sphinx.util.typing import stringify_annotation

import jmp_lite
import jmp_lite.linen
import jmp_lite.nnx

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
    return f"jmp_lite.{name}" if first in jmp_lite.__all__ else None


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

DTYPE_LIKE = stringify_annotation(jax.typing.DTypeLike, "smart")
DTYPE_LIKE_IN_FULL = stringify_annotation(jax.typing.DTypeLike, "fully-qualified")

PUBLIC = {
    **{
        f"{value.__module__}.{value.__qualname__}": f"{module.__name__}.{name}"
        for module in (jmp_lite, jmp_lite.nnx)
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__.startswith("jmp_lite")
        if module is not jmp_lite or name in jmp_lite.__all__
    },
    "optax._src.base.GradientTransformation": "optax.GradientTransformation",
    "optax._src.base.GradientTransformationExtraArgs": "optax.GradientTransformation",
    "flax.nnx.module.Module": "flax.nnx.Module",
    "flax.nnx.training.optimizer.Optimizer": "flax.nnx.Optimizer",
}
"""From where a class is defined to the name that users know."""


def with_names(text):
    """Returns a signature's text with the alias ``DTypeLike`` in place of its union."""
    for union in (DTYPE_LIKE, DTYPE_LIKE_IN_FULL):
        text = text.replace(union, "~jax.typing.DTypeLike")
    return text


def tidy_signature(app, what, name, obj, options, signature, returns):
    """Shows defaults that are private as what they are."""
    if signature is None:
        return None
    signature = signature.replace("<factory>", "...")

    def shown(match):
        value = inspect.signature(obj).parameters[match[1]].default
        return f"{match[1]}{match[2]} = {value if isinstance(value, int) else '...'}"

    signature = re.sub(r"(\w+)(: [^=]*?)? = _\w+", shown, signature)
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


def resolve_type(app, env, node, contnode):
    """Resolves a type by its public name, and shows no path of a private module."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    for text in list(contnode.findall(docutils.nodes.Text)):
        if text.astext() == target and target.startswith("jmp_lite."):
            text.parent.replace(text, docutils.nodes.Text(target.rpartition(".")[2]))
    if target not in PUBLIC:
        return None
    node["reftarget"] = PUBLIC[target]
    page, builder = node["refdoc"], app.builder
    domain = env.get_domain("py")
    return domain.resolve_xref(
        env, page, builder, "obj", PUBLIC[target], node, contnode
    )


def setup(app):
    """Connects all of it."""
    app.connect("doctree-read", link_names)
    app.connect("autodoc-process-signature", tidy_signature)
    app.connect("autodoc-process-docstring", type_attributes, priority=900)
    # Before intersphinx, which then looks for the public name.
    app.connect("missing-reference", resolve_type, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
