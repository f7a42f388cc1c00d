"""Every ```python block of the README and of docs/ runs as a reader would paste it, page by page, and prints what is shown behind it.

The blocks of a page share a namespace, in a process of their own in which warnings are errors. A ```text block right behind a ```python
block is what that one prints, with doctest's `...`. A ```py block is not run, since it needs what the tests don't have; it must parse.
"""

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
_LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# runs [[line, code, output or null], ...] from stdin
_RUN = """
import contextlib, doctest, io, json, sys, types
page, like, blocks = json.load(sys.stdin)
namespace = sys.modules["page"] = types.ModuleType("page")
for line, code, wanted in blocks:
    print(f"running {page}:{line}", file=sys.stderr, flush=True)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile("\\n" * line + code, page, "exec"), vars(namespace))
    if wanted is not None and not doctest.OutputChecker().check_output(wanted, said.getvalue(), like):
        sys.exit(f"{page}:{line}: the block prints\\n{said.getvalue()}\\ninstead of\\n{wanted}")
"""


class Block(NamedTuple):
    line: int  # of the fence
    language: str
    code: str
    output: str | None  # None: of no interest


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    fences = list(_FENCE.finditer(text))
    blocks = []
    for i, fence in enumerate(fences):
        behind = fences[i + 1] if i + 1 < len(fences) else None
        shown = behind is not None and behind[2] == "text" and not text[fence.end() : behind.start()].strip()
        output = behind[3] if behind is not None and shown else None
        blocks.append(Block(text.count("\n", 0, fence.start()) + 1, fence[2], fence[3], output))
    return blocks


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_page(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    for block in blocks:
        if block.language == "py":
            compile(block.code, f"{page}:{block.line}", "exec")
    run = [(block.line, block.code, block.output) for block in blocks if block.language == "python"]
    if not run:
        pytest.skip("no python on this page")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "PYTHONWARNINGS"))}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # nearly all the time goes into compiling
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _RUN],
        input=json.dumps([str(page), _LIKE, run]),
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def test_output_is_compared(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n```python\nx = 1\n```\n\n```text\nnot this\n```\n\nWords.\n\n```python\nprint(x)\n```\n\n```text\n1\n```\n"
    )
    first, _, second, _ = blocks_of(page)
    assert (first.line, first.output) == (3, "not this\n")
    assert (second.line, second.code, second.output) == (13, "print(x)\n", "1\n")
