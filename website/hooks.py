"""Hooks of MkDocs: generate pages, and rewrite links that lead out of docs/."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "website"), str(ROOT / "src")]

import commands  # noqa: E402
import notebooks  # noqa: E402
import reference  # noqa: E402
import search  # noqa: E402
import setups  # noqa: E402

OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/reporting.md",
    "benchmarks/README.md": "project/benchmarks.md",
}
"""Pages of the repository that are not in docs/, and where they are in the site."""

_FENCE_LINK_OR_CODE = re.compile(
    r"^ *```.*?^ *```|(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)|`[^`\n]+`", re.S | re.M
)


def on_config(config: Any) -> Any:
    """Put the pages that are made into the navigation, and the version into the foot of each page."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    config["extra"]["release"] = version
    config["copyright"] = f"dtrain {version}, Apache-2.0"
    listed = [{page.title: f"reference/{page.file}.md"} for page in reference.all_pages()]
    made = {
        "REFERENCE": ["reference/index.md", *listed],
        "RECIPES": ["recipes/index.md", *recipes()],
        "EXAMPLES": ["examples/index.md", *(f"examples/{path.stem}.md" for path in examples())],
    }
    config["nav"] = _with_pages(config["nav"], made)
    return config


def recipes() -> list[dict[str, list[str]]]:
    """Return the recipe cards in the groups of their index."""
    parts = re.split(r"^## (.+)\n", (ROOT / "docs" / "recipes" / "index.md").read_text(), flags=re.M)[1:]
    groups = zip(parts[::2], parts[1::2], strict=True)
    return [
        {title: [f"recipes/{name}" for name in re.findall(r"^\| \[.*?\]\((\w+\.md)\)", text, re.M)]} for title, text in groups
    ]


def _with_pages(nav: Any, made: dict[str, Any]) -> Any:
    """Return a navigation with the generated pages in place of their names."""
    if isinstance(nav, list):
        return [_with_pages(entry, made) for entry in nav]
    if isinstance(nav, dict):
        return {title: _with_pages(entry, made) for title, entry in nav.items()}
    return made.get(nav, nav)


def on_files(files: Files, config: Any) -> Files:
    """Add what is made: reference, commands, examples, pages of the repository, the style."""
    for uri, text in made():
        files.append(File.generated(config, uri, content=text))
    return files


def made() -> Iterator[tuple[str, str]]:
    """Yield the path in the site and the Markdown of each generated page."""
    yield from reference.pages()
    yield from notebooks.pages()
    yield "examples/index.md", index_of_examples()
    for path in examples():
        yield f"examples/{path.stem}.md", f"# {path.name}\n\n{summary(path)}\n\n```python\n{path.read_text()}```\n"
    for path, uri in OUTSIDE.items():
        if uri != "index.md" and (ROOT / path).exists():
            yield uri, (ROOT / path).read_text()
    yield "stylesheets/site.css", (ROOT / "website" / "site.css").read_text()


def examples() -> list[Path]:
    """The scripts that can be launched first, then the modules beside them."""
    paths = sorted((ROOT / "examples").glob("*.py"))
    return sorted(paths, key=lambda path: "__main__" not in path.read_text())


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    match = re.search(r'^"""(.*?)(?:\n\n|""")', path.read_text(), re.S)
    return " ".join(match[1].split()).replace("``", "`") if match else ""


GUIDES = {
    "pretrain_bert": "pretraining",
    "finetune_bert": "finetuning",
    "train_diffusion": "diffusion",
    "train_embeddings": "embeddings",
    "train_dpo": "preferences",
    "train_moe": "experts",
    "train_grpo": "reinforcement",
    "tensor_parallel": "parallelism",
    "plan_gpt": "planning",
    "on_ray": "nodes",
}
"""By example, the page of docs/ that goes through it."""


def index_of_examples() -> str:
    """Return a table with one line for each example."""
    links = {path.stem: f"[guide](../{GUIDES[path.stem]}.md)" if path.stem in GUIDES else "" for path in examples()}
    rows = [f"| [`{path.name}`]({path.stem}.md) | {summary(path)} | {links[path.stem]} |" for path in examples()]
    head = (
        "Each is one file with public names only, on data that is at hand: `dtrain launch -n 2 examples/NAME.py`, or "
        "`python examples/NAME.py`. It resumes by the same command and ends by printing its figure beside a baseline. "
        "`dtrain new loop.py --task lm` writes a smaller loop to start from.\n"
    )
    return "\n".join(["# Examples\n", head, "| file | subject | |", "|---|---|---|", *rows, ""])


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Give a page its place in the search, and follow links as they are in the repository, wherever its target is."""
    uri = page.file.src_uri
    page.meta = {**search.settings(uri), **page.meta}
    origin = next((path for path, there in OUTSIDE.items() if there == uri and uri != "index.md"), f"docs/{uri}")
    if uri.startswith(("reference/", "examples/")):
        return markdown
    if uri == "names.md":
        markdown = _linked_names(markdown, uri)
    if uri == "cli.md":
        markdown = commands.with_options(markdown)
    markdown = setups.fold(markdown.replace("<!-- anew -->\n", ""))
    return _FENCE_LINK_OR_CODE.sub(lambda match: _link(match, origin, uri, files), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keep the words of inline code, such as `--node-rank`, on one line: a browser would break them behind a hyphen."""
    return re.sub(r"(?<!</span>)<code>([^<]*-[^<]*)</code>", _whole_words, html)


def _whole_words(match: re.Match[str]) -> str:
    words = [f'<span class="word">{word}</span>' if "-" in word and len(word) <= 32 else word for word in match[1].split(" ")]
    return f"<code>{' '.join(words)}</code>"


def _link(match: re.Match[str], origin: str, uri: str, files: Files) -> str:
    """A link to a file of the repository, as one to its page; as plain text where the site has no page of it."""
    path, _, anchor = (match["target"] or "").partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return match[0]
    path = os.path.normpath(os.path.join(os.path.dirname(origin), path))
    if path.startswith("src/dtrain"):
        return _reference_link(match["text"], uri)
    there = _in_site(path)
    if there is None:
        return match["text"]
    if files.get_file_from_path(there) is None:
        return match[0]  # of which MkDocs says that it leads nowhere
    text = _words(match["text"], ROOT / "docs" / there)
    relative = os.path.relpath(there, os.path.dirname(uri) or ".")
    return f"{match['picture']}[{text}]({relative}{'#' + anchor if anchor else ''})"


def _reference_link(text: str, uri: str) -> str:
    """Return a link to source code as a link to the reference of the public name in its text, or to the index."""
    name = re.fullmatch(r"`dt\.([\w.]+)`", text)
    there = "reference/index.md" if name is None else reference.places()[f"dtrain.{name[1]}"]
    return f"[{text}]({os.path.relpath(there, os.path.dirname(uri) or '.')})"


def _linked_names(markdown: str, uri: str) -> str:
    """Return the page of all names with a link from each name to its entry in the reference."""
    package, rows = "dtrain", []
    for row in markdown.split("\n"):
        if head := re.match(r"## `dt([.\w]*)`", row):
            package = f"dtrain{head[1]}"
        rows.append(re.sub(r"^\| `(\w+)`", partial(_name_link, package, uri), row))
    return "\n".join(rows)


def _name_link(package: str, uri: str, match: re.Match[str]) -> str:
    """Return the first cell of a row with a link from the name to its entry, or unchanged for another word."""
    there = reference.places().get(f"{package}.{match[1]}")
    return f"| [`{match[1]}`]({os.path.relpath(there, os.path.dirname(uri) or '.')})" if there else match[0]


def _words(text: str, target: Path) -> str:
    """Return the title of the page in place of a link text that is the name of its file."""
    if text != target.name or not target.exists():
        return text
    title = re.match(r"# (.+)", target.read_text())
    return title[1] if title else text


def _in_site(path: str) -> str | None:
    """Return the path in the site of a file of the repository, or None if the site does not have it."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/"):
        path = path.removeprefix("docs/")
        return f"{path.removesuffix('.ipynb')}.md" if path.endswith(".ipynb") else path
    if re.fullmatch(r"examples/\w+\.py", path):
        return path.removesuffix(".py") + ".md"
    return "examples/index.md" if path == "examples" else None
