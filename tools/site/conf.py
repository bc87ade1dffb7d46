"""Sphinx' settings for both languages of the site; tools/build_site.py gives the language by `-D`.

The pages stay plain Markdown: what leads out of the language's folder is resolved here.
"""

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

project = "flambeau"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "flambeau"
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_additional_pages = {"search": "search.html"}
html_show_copyright = False
html_copy_source = False
html_domain_indices = False
html_use_index = False
html_theme_options = {"top_of_page_buttons": []}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
highlight_language = "text"
myst_heading_anchors = 6  # the anchors that GitHub gives, Chinese letters included
smartquotes = False  # `--flag` stays two hyphens


class LinksOutOfTheLanguage(SphinxTransform):
    """Links to a page of the other language, to a folder, whose list is its index.md, and to other Markdown.

    MyST looks for all of them among the pages of this language.
    """

    default_priority = 5

    def apply(self, **options: Any) -> None:
        page = Path(self.env.doc2path(self.env.docname))
        docs = Path(self.app.srcdir).parent
        for node in list(self.document.findall(addnodes.pending_xref)):
            target = node["reftarget"]
            if target.endswith("/") and (page.parent / target / "index.md").is_file():
                node["refdomain"] = "doc"
                node["reftarget"] = self.env.path2doc(
                    os.path.normpath(page.parent / target / "index.md")
                )
                node["reftargetid"] = None
            elif Path(target).is_absolute():  # outside of this language, so no page of this build
                path = os.path.relpath(f"{target}.md", page.parent)
                if Path(target).is_relative_to(docs):
                    anchor = f"#{node['reftargetid']}" if node["reftargetid"] else ""
                    url = path.removesuffix(".md") + ".html" + anchor
                    made: nodes.Element = nodes.reference(refuri=url, internal=True)
                else:
                    made = addnodes.download_reference(reftarget=path, refdoc=self.env.docname)
                node.replace_self(made)
                made.extend(node.children)


class ChineseLines(SphinxTransform):
    """A sentence per line in the source is no space between two Chinese sentences on the page."""

    default_priority = 5

    def apply(self, **options: Any) -> None:
        for paragraph in self.document.findall(nodes.paragraph):
            parts = paragraph.children
            paragraph.children = parts[:1] + [
                part
                for before, part in pairwise(parts)
                if part.astext() != "\n"
                or not re.search(r"[\u3000-\u9fff\uff00-\uffef]$", before.astext())
            ]


def without_search_of_sphinx(app: Sphinx) -> None:
    app.builder.search = False  # type: ignore[attr-defined]  # static/search.js takes its place


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", without_search_of_sphinx)
    app.add_transform(LinksOutOfTheLanguage)
    app.add_transform(ChineseLines)
