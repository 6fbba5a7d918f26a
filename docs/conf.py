"""The documentation site: ``sphinx-build -W --keep-going -n docs docs/_build``."""

from __future__ import annotations

import html
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes
from sphinx.application import Sphinx

HERE = Path(__file__).parent
# The site shows the notebooks, which lie beside this folder: Sphinx reads what is inside it only.
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks", dirs_exist_ok=True)

project = "scio-recorder"
author = "The scio-recorder developers"
copyright = f"2026, {author}"  # noqa: A001 - Sphinx's name
release = version = tomllib.loads(
    (HERE.parent / "pyproject.toml").read_text(encoding="utf-8")
)["project"]["version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints", "notebooks/_*"]

# The tests execute notebooks and compare what they print with what is stored.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]  # it calls them variables
napoleon_use_param = False  # types are prose: "(int, int) or str"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say it, with shapes and units
autodoc_inherit_docstrings = True
# It reads defaults in the source, and those of options stand elsewhere.
autodoc_preserve_defaults = False

html_theme = "furo"
html_title = "scio-recorder"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["search_in_files.js"]
html_theme_options = {"footer_icons": []}
pygments_dark_style = (
    "github-dark"  # Furo's own underlines imports as if they were links
)
html_math_renderer = "mathml"

# torchinfo is not documented here.
nitpick_ignore_regex = [("py:(class|func)", r"torchinfo\..*")]


def index_words(app: Sphinx, doctree: nodes.document) -> None:
    """Put the words of ``search.toml`` into the index, where the search looks first."""
    words = tomllib.loads((HERE / "search.toml").read_text(encoding="utf-8"))
    section = next(iter(doctree.findall(nodes.section)))
    place = section["ids"][0]
    entries = [
        ("single", word, place, "main", None) for word in words.get(app.env.docname, ())
    ]
    if entries:
        section.insert(1, addnodes.index(entries=entries))


def visit_math(display: str) -> Any:
    """Return the writer of formulas in the browser's own language."""

    def visit(writer: Any, node: nodes.Element) -> None:
        writer.body.append(convert(node.astext(), display=display))
        raise nodes.SkipNode

    return visit


def skip_fields(
    app: Sphinx, kind: str, name: str, member: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out what Python says of a named tuple's fields, which is their number."""
    text = str(getattr(member, "__doc__", ""))
    return True if text.startswith("Alias for field number") else None


def link_copies(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links to notebooks lead to the copies that the site is built from, and theirs back."""
    for way in ("", "../"):  # from this folder, and from one inside it
        source[0] = source[0].replace(f"]({way}../notebooks/", f"]({way}notebooks/")
    source[0] = source[0].replace("](../docs/", "](../")


def let_code_break(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let names break between their parts, so that a narrow column cuts no word."""
    part = re.compile(r"(?<=[._/])(?=\w{3})|(?<=[a-z]{4})(?=[A-Z])")
    code = re.compile('(?<=<span class="pre">)[^<]*')
    # The page itself, the list beside it, and the links below it.
    for place, key in (
        (context, "body"),
        (context, "furo_navigation_tree"),
        (context.get("prev"), "title"),
        (context.get("next"), "title"),
    ):
        if place and key in place:
            place[key] = code.sub(lambda found: part.sub("<wbr>", found[0]), place[key])


def write_texts(app: Sphinx, exception: Exception | None) -> None:
    """Write what all pages say into one script, for ``_static/search_in_files.js``."""
    if exception or app.builder.name != "html":
        return
    main = re.compile('<article role="main".*?</article>', re.DOTALL)
    unseen = re.compile(
        '<(script|style).*?</\\1>|<a class="headerlink".*?</a>', re.DOTALL
    )
    # Tags inside a line stand between letters that belong together, as in highlighted code.
    inline = re.compile("</?(a|code|em|span|strong|wbr)\\b[^>]*>")
    block = re.compile("<[^>]*>")
    site, texts = Path(app.outdir), {}
    for page in sorted(site.rglob("*.html")):
        if found := main.search(page.read_text(encoding="utf-8")):
            text = html.unescape(
                block.sub(" ", inline.sub("", unseen.sub(" ", found[0])))
            )
            texts[page.relative_to(site).as_posix()] = " ".join(text.split())
    (site / "_static" / "page_texts.js").write_text(
        f"PAGE_TEXTS = {json.dumps(texts)};"
    )


def write_index_for_models(app: Sphinx, exception: Exception | None) -> None:
    """Write ``llms.txt``, the index of all pages as language models read it (llmstxt.org)."""
    if exception or app.builder.name != "html":
        return
    lines = ["# scio-recorder", "", f"> {_first_words(app, 'index')}"]
    for part in app.env.toctree_includes["index"]:
        title = (
            app.env.titles[part].astext() if part.endswith("/index") else "Notebooks"
        )
        if f"## {title}" not in lines:
            lines += ["", f"## {title}", ""]
        lines += [
            f"- [{app.env.titles[page].astext()}]({page}.html): {_first_words(app, page)}"
            for page in _pages_below(app, part)
        ]
    (Path(app.outdir) / "llms.txt").write_text(
        "\n".join(lines) + "\n", encoding="utf-8"
    )


def _pages_below(app: Sphinx, page: str) -> list[str]:
    below = app.env.toctree_includes.get(page, [])
    return [page, *(deeper for one in below for deeper in _pages_below(app, one))]


def _first_words(app: Sphinx, page: str) -> str:
    """Return the first sentence of a page's text, or several if it is short."""
    found = list(app.env.get_doctree(page).findall(nodes.paragraph))
    # Captions, cells of tables and pictures are paragraphs too.
    text = [one for one in found if isinstance(one.parent, nodes.section)]
    text = [one for one in text if not isinstance(one[0], nodes.image)]
    words = (" ".join(one.astext().split()) for one in text)
    sentences = (re.match(r".{40,}?[.?!](?= [A-Z]|$)|.*", one) for one in words)
    return next(one[0] for one in sentences if one and not one[0].endswith(":"))


def setup(app: Sphinx) -> None:
    """Write MathML: MathJax, Sphinx's own choice, would be fetched from another host."""
    app.connect("source-read", link_copies)
    app.connect("doctree-read", index_words)
    app.connect("autodoc-skip-member", skip_fields)
    # After the theme, which makes the list beside the page.
    app.connect("html-page-context", let_code_break, priority=900)
    app.connect("build-finished", write_texts)
    app.connect("build-finished", write_index_for_models)
    app.add_html_math_renderer(
        "mathml", (visit_math("inline"), None), (visit_math("block"), None)
    )
