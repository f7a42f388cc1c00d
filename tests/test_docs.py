"""Every ```python block of the README and of docs/ runs as a reader would paste it, page by page, and prints what is shown behind it.

The blocks of a page share a namespace, in a process of their own in which warnings are errors. A ```text block right behind a ```python
block is what that one prints, with doctest's `...`. A ```py block is not run, since it needs what the tests don't have; it must parse. A
block behind `<!-- needs JAX x.y.z -->` is run from that version on.
"""

import doctest
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

from compiling import environment

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
_NEEDS = re.compile(r"<!-- needs JAX (\d+)\.(\d+)\.(\d+) -->\s*\Z")
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
    needs: tuple[int, ...]  # the version of JAX


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    fences = list(_FENCE.finditer(text))
    blocks = []
    for i, fence in enumerate(fences):
        behind = fences[i + 1] if i + 1 < len(fences) else None
        shown = behind is not None and behind[2] == "text" and not text[fence.end() : behind.start()].strip()
        output = behind[3] if behind is not None and shown else None
        needs = _NEEDS.search(text[: fence.start()])
        version = tuple(map(int, needs.groups())) if needs else ()
        blocks.append(Block(text.count("\n", 0, fence.start()) + 1, fence[2], fence[3], output, version))
    return blocks


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run(page: Path, directory: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Runs a page's blocks in a process of their own, in this directory; pages share what they compile."""
    able = [block for block in blocks_of(page) if block.language == "python" and block.needs <= jax.__version_info__]
    blocks = [(block.line, block.code, block.output) for block in able]
    path = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    command = [sys.executable, "-W", "error", "-c", _RUN]
    sent = json.dumps([str(page), _LIKE, blocks])
    return subprocess.run(command, input=sent, text=True, capture_output=True, cwd=directory, env=environment(path, cache), timeout=900)


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compiled_once: Path
) -> Iterator[dict[Path, Future[Any]]]:
    """The pages to test, two at a time; one at a time under xdist, whose other worker has other tests."""
    chosen = [item.callspec.params["page"] for item in request.session.items if getattr(item, "originalname", "") == "test_page"]
    with ThreadPoolExecutor(1 if "PYTEST_XDIST_WORKER" in os.environ else 2) as pool:
        yield {page: pool.submit(run, page, tmp_path_factory.mktemp("page"), compiled_once) for page in chosen}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_page(page: Path, started: dict[Path, Future[Any]]) -> None:
    for block in blocks_of(page):
        if block.language == "py":
            compile(block.code, f"{page}:{block.line}", "exec")
    done = started[page].result()
    assert done.returncode == 0, done.stderr


def test_output_is_compared(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n```python\nx = 1\n```\n\n```text\nnot this\n```\n\nWords.\n\n```python\nprint(x)\n```\n\n```text\n1\n```\n"
    )
    first, _, second, _ = blocks_of(page)
    assert (first.line, first.output) == (3, "not this\n")
    assert (second.line, second.code, second.output) == (13, "print(x)\n", "1\n")
