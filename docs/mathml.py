"""A hook of MkDocs: formulas become MathML while the site is built, so that browsers need no script, and no network, to show them."""

import html
import logging
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_log = logging.getLogger("mkdocs.hooks.mathml")  # `mkdocs build --strict` fails if it warns


def on_page_content(content: str, page: Any, **_: Any) -> str:
    if ":math:" in content or ".. math::" in content:
        _log.warning("%s: a formula of a docstring was not understood by dialect.py.", page.file.src_uri)
    return _FORMULA.sub(lambda found: _mathml(html.unescape(found[3]).strip(), found[2] == "[", page.file.src_uri), content)


def _mathml(tex: str, display: bool, source: str) -> str:
    formula = convert(tex, display="block" if display else "inline")
    if "\\" in formula:  # a command that the converter doesn't know is left as it is
        _log.warning("%s: the formula %s can't be shown; write it with other commands.", source, tex)
    return formula
