"""The documentation hangs together: every public name is on the reference page, links lead somewhere, pictures show what the library does.

What needs MkDocs is checked by `mkdocs build --strict`, which `.ci/run` runs.
"""

import html
import inspect
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import exdyna_jax
import pictures

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(DOCS.rglob("*.md"))]
PUBLIC = sorted(name for name, value in vars(exdyna_jax).items() if not name.startswith("_") and not inspect.ismodule(value))
FUNCTIONS = [name for name in PUBLIC if not inspect.isclass(getattr(exdyna_jax, name))]

_CODE = re.compile(r"^( *)```.*?^\1``` *$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_DOCUMENTED = re.compile(r"^::: (\S+)$", re.MULTILINE)
_SNIPPET = re.compile(r'^ *--8<-- "([^":]+)(?::(\w+))?"$', re.MULTILINE)


class Link(NamedTuple):
    path: str  # "" is the page itself
    anchor: str


def links_of(text: str) -> list[Link]:
    """The links to files of this project, outside of code."""
    targets = _LINK.findall(_CODE.sub("", text))
    return [Link(*target.partition("#")[::2]) for target in targets if "://" not in target and not target.startswith("mailto:")]


def anchors_of(text: str) -> set[str]:
    """What a link to this page may name: a heading, as GitHub and MkDocs write it, or what the page documents."""
    headings = _HEADING.findall(re.sub(r"^( *)```.*?^\1``` *$", "", text, flags=re.MULTILINE | re.DOTALL))
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings} | set(
        _DOCUMENTED.findall(text)
    )


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for path, anchor in links_of(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors_of(target.read_text())):
            found.append(f"{path}#{anchor}" if anchor else path)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One thing: `a`, (b)\n\n```bash\n# no heading\n```\n\n::: a.b\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](other.md) [b](other.md#one-thing-a-b) [c](other.md#a.b) [d](#top) [e](https://example.org/x) `[f](g.md)`\n"
        "[g](nowhere.md) ![h](other.md#no-heading) [i](#other)\n"
    )
    assert broken(page) == ["nowhere.md", "other.md#no-heading", "#other"]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_snippets_are_there(page: Path) -> None:
    for file, section in _SNIPPET.findall(page.read_text()):
        text = (ROOT / file).read_text()
        assert not section or all(text.count(f"<!-- --8<-- [{end}:{section}] -->") == 1 for end in ("start", "end"))


def test_every_public_name_is_on_the_reference_page() -> None:
    documented = _DOCUMENTED.findall((DOCS / "reference.md").read_text())
    assert sorted(name.removeprefix("exdyna_jax.") for name in documented) == PUBLIC
    for name in PUBLIC:
        assert inspect.getdoc(getattr(exdyna_jax, name))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_documented(name: str) -> None:
    function = getattr(exdyna_jax, name)
    arguments = re.search(r"^Args:\n(.*?)\n(?=\S)", inspect.getdoc(function) or "", re.MULTILINE | re.DOTALL)
    assert arguments is not None
    documented = [each for entry in re.findall(r"^  (\w[\w, ]*):", arguments[1], re.MULTILINE) for each in entry.split(", ")]
    assert sorted(documented) == sorted(inspect.signature(function).parameters)


def test_every_method_is_on_the_page_of_methods() -> None:
    text = (DOCS / "methods.md").read_text()
    takes = {name: inspect.signature(getattr(exdyna_jax, name)).parameters.keys() for name in FUNCTIONS}
    methods = [name for name in FUNCTIONS if takes[name] >= {"axis_name", "num_workers"}]
    assert [name for name in methods if f"(reference.md#exdyna_jax.{name})" not in text] == []
    sparsifiers = [name for name in methods if "density" in takes[name]]
    assert sorted(pictures.METHODS) == sorted([*sparsifiers, "dense"])
    assert [name for name in pictures.METHODS if f"(pictures/{name}.svg)" not in text] == []


@pytest.mark.parametrize("picture", ["exdyna", "step"])
def test_pictures_show_what_the_library_does(picture: str, observed: pictures.Seen) -> None:
    described = re.search(r"<dc:description>(.*?)</dc:description>", (DOCS / "pictures" / f"{picture}.svg").read_text(), re.DOTALL)
    assert described is not None
    assert html.unescape(described[1]) == pictures.described(observed), "python docs/pictures.py draws them anew"


@pytest.fixture(scope="module")
def observed() -> pictures.Seen:
    return pictures.observe("exdyna")


def test_what_is_observed_is_what_is_sent(observed: pictures.Seen) -> None:
    chosen = [i for mine in observed.chosen for i in mine]
    assert len(chosen) == len(set(chosen))
    assert sorted(chosen) == observed.update.nonzero()[0].tolist()
    for mine, ((start, stop),), row in zip(observed.chosen, observed.looked, observed.accumulator, strict=True):
        assert all(start <= i < stop for i in mine)
        assert list(mine) == [i for i in range(start, stop) if abs(row[i]) >= observed.threshold]


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {exdyna_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
