"""Links of the pages lead somewhere, as they stand on a forge: files, headings in them, pictures."""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from pathlib import Path

import pytest

from pages.fences import PAGES, called, prose

LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_CODE = re.compile(r"`[^`\n]+`")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that a forge makes of a page's headings; a second heading of one name has a number."""
    counts: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ +(.*?) *$", prose(page), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        kept = (c for c in plain.strip().lower() if c in " -_" or unicodedata.category(c)[0] in "LN")
        slug = "".join(kept).replace(" ", "-")
        names.add(f"{slug}-{counts[slug]}" if slug in counts else slug)
        counts[slug] = counts.get(slug, 0) + 1
    return frozenset(names | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", prose(page))))


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere. Those to other hosts are not followed."""
    links = []
    for target in LINK.findall(_CODE.sub("code", prose(page))):  # code may look like a link
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            links.append(f"{called(page)}: {target}")
    return links


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_markdown_links_have_existing_targets(page: Path) -> None:
    assert broken(page) == []


def test_broken_link_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pages.test_links.called", lambda page: page.name)
    (tmp_path / "b.md").write_text("# One `two`: three\n\n## Again\n\n## Again\n")
    page = tmp_path / "a.md"
    page.write_text(
        "[x](b.md#one-two-three) [x](b.md#again-1) ![p](p.png) [x](b.md#two) [x](c.md) [x](#none) [x](https://a.b/c)\n"
    )
    assert broken(page) == [f"a.md: {target}" for target in ("p.png", "b.md#two", "c.md", "#none")]
