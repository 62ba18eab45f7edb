"""What the site needs beyond the pages: the list of changes as a page, links to files that are no pages, dark pictures.

A link from a page to a file of the repository (`../examples/x.py`, `../README.md`) is right where the repository is
read. On the site it would lead nowhere, so examples become pages of their own, and other files are named only.
A picture `x.png` that has an `x-dark.png` beside it is shown as the one or the other, by the reader's colour scheme.
The first line of a quotation (`# from examples/x.py`) leads to the whole program, the search puts guides first, and a
guide that sends calls ends with a link to what does so without operators.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+|/[^)\s#]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s#]*pictures/[^)\s#]+)\.png\)")
_QUOTED = re.compile(r'(<span class="c1">)# from (examples/[\w/]+)\.py(</span>)')
_SENDS = re.compile(r"(>>|@|(?<![-=>])>) (?:pool|sky)\b")
_METHODS = "\n\nEach operator is also a method: [without operators](../concepts.md#without-operators).\n"
_WEIGHTS = {  # in the search: what tells how something is done stands before what lists everything
    "index.md": 4.0,
    "tutorial.md": 3.0,
    "guides/resume.md": 2.0,  # it says `pool.map` more often than the page that tells what that is
    "guides/": 4.0,
    "errors.md": 4.0,
    "faq.md": 3.0,
    "pool-methods.md": 8.0,
    "concepts.md": 1.5,
    "reference.md": 0.3,
    "changes.md": 0.1,
    "a-call.md": 0.0001,
    "what-ends-what.md": 0.0001,
    "architecture.md": 0.0001,
    "map.md": 0.0001,
}
_RENAMED = {"CHANGELOG.md": "changes.md", "README.md": "index.md"}


def on_files(files: Files, config: Any) -> Files:
    """Adds pages that are made from other files of the repository."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    files.append(File.generated(config, "changes.md", content=changes))
    for example in sorted((ROOT / "examples").rglob("*.py")):
        path = example.relative_to(ROOT).with_suffix(".md").as_posix()
        text = f"---\nsearch:\n  exclude: true\n---\n\n# {example.name}\n\n```python\n{example.read_text()}```\n"
        page = File.generated(config, path, content=text)
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Has links to files outside the documentation lead to their pages, if they have some."""
    here = Path(page.file.src_uri).parent
    weight = next((weight for start, weight in _WEIGHTS.items() if page.file.src_uri.startswith(start)), None)
    if weight is not None:
        page.meta.setdefault("search", {"boost": weight})

    def led(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        base = (ROOT / target.lstrip("/")) if target.startswith("/") else (ROOT / "docs" / here / target)
        path = base.resolve()
        if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "docs"):
            return match[0]
        inside = path.relative_to(ROOT).as_posix()
        inside = _RENAMED.get(inside, inside.removesuffix(".py") + ".md" if inside.startswith("examples/") else "")
        if not inside or files.get_file_from_path(inside) is None:
            return text
        up = "../" * (len(here.parts))
        return f"{picture}[{text}]({up}{inside}{anchor or ''})"

    def both(match: re.Match[str]) -> str:
        text, target = match.groups()
        if not (ROOT / "docs" / here / f"{target}-dark.png").exists():
            return match[0]
        return f"![{text}]({target}.png#only-light)![{text}]({target}-dark.png#only-dark)"

    if page.file.src_uri.startswith("guides/") and _SENDS.search(markdown) and "#without-operators" not in markdown:
        markdown += _METHODS
    return _PICTURE.sub(both, _LINK.sub(led, markdown))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Has the first line of a quotation lead to the page of the whole program."""
    up = "../" * (len(Path(page.file.src_uri).parts) - 1)

    def led(match: re.Match[str]) -> str:
        before, path, after = match.groups()
        if files.get_file_from_path(f"{path}.md") is None:
            return match[0]
        return f'{before}# from <a href="{up}{path}.html">{path}.py</a>{after}'

    return _QUOTED.sub(led, html)
