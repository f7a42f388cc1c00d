"""An extension of Griffe: docstrings are written to be read in a terminal, and by doctest; here they become Markdown for the site."""

import re
import textwrap
from typing import Any

import griffe

_INLINE = re.compile(r":math:`([^`]+)`")
_DISPLAY = re.compile(r"^( *)\.\. math::\s*?(?: (\S.*)\n|\n((?:\1 +\S.*\n)+))", re.MULTILINE)


def markdown(docstring: str) -> str:
    """Formulas between dollars, and examples under the heading that Griffe knows."""

    def display(found: re.Match[str]) -> str:
        tex = textwrap.dedent(found[2] or found[3]).strip()
        return textwrap.indent(f"\n$$\n{tex}\n$$\n", found[1])

    text = _DISPLAY.sub(display, docstring + "\n")
    text = _INLINE.sub(r"$\1$", text)
    return re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


class Dialect(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
