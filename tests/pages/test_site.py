"""The built site: every name has an entry, links lead somewhere, and a browser shows it without asking anybody else.

``nox -s docs`` builds it and runs this; ``DTRAIN_SITE`` is the folder. ``DTRAIN_SHOTS`` is one for screenshots.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import public
from browser import PROGRAM, Browser, browser
from pages.site_served import served

SITE = Path(os.environ.get("DTRAIN_SITE", "")).absolute()
SHOTS = os.environ.get("DTRAIN_SHOTS")
pytestmark = pytest.mark.skipif("DTRAIN_SITE" not in os.environ, reason="needs the built site: nox -s docs")
in_a_browser = pytest.mark.skipif(PROGRAM is None, reason="needs chromium")


# The built files.


class Page(HTMLParser):
    """Links of a page, and the anchors that a link can name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("img", "script", "iframe", "source") and "src" in given:
            self.fetched.append(given["src"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.fetched.append(given.get("href", ""))


@cache
def page(path: Path) -> Page:
    return Page(path)


def every_page() -> list[Path]:
    return [path for path in sorted(SITE.rglob("*.html")) if path.name != "404.html"]


def lost(path: Path, link: str) -> bool:
    """Return True if a link of a page leads nowhere; links to other hosts are not followed."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return True
    return bool(parts.fragment) and target.suffix == ".html" and unquote(parts.fragment) not in page(target).anchors


def test_site_links_have_existing_targets() -> None:
    pages = every_page()
    assert pages
    dead = [f"{path.relative_to(SITE)}: {link}" for path in pages for link in page(path).links if lost(path, link)]
    assert dead == [], f"{len(dead)} links lead nowhere"
    assert lost(SITE / "index.html", "none.html")
    assert lost(SITE / "index.html", "loop.html#none-of-this-name")


def test_missing_page_leads_to_pages_that_exist() -> None:
    text = (SITE / "404.html").read_text()
    assert "This page does not exist" in text
    links = [
        link.lstrip("/") for link in re.findall(r'<li><a href="([^"]+)"', text.split("<h1>This page")[1].split("</ul>")[0])
    ]
    assert len(links) >= 6
    assert [link for link in links if not (SITE / link).exists()] == []


def test_site_fetches_no_external_resources() -> None:
    assert [(path.name, url) for path in every_page() for url in page(path).fetched if urlsplit(url).netloc] == []


def test_every_exported_name_has_an_entry() -> None:
    inventory = zlib.decompress((SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    entries = set(re.findall(r"^(\S+) py:", inventory, re.M))
    names = set(public.all_names())
    assert names
    assert names - entries == set()


def test_docstring_sections_are_rendered() -> None:
    heads = "Args|Returns|Raises|Example|Examples|Mutates|Collective|Host sync|Formula|Source|Yields"
    left = re.compile(rf"<p>({heads}|Suggested values|When not to use):")
    assert [(path.name, match[0]) for path in every_page() if (match := left.search(path.read_text()))] == []


def test_command_reference_has_every_command() -> None:
    text = (SITE / "cli.html").read_text()
    for name in ("launch", "env", "hang", "plan", "report", "top", "checkpoints convert", "data inspect", "plot schedule"):
        assert f'id="options-of-dtrain-{name.replace(" ", "-")}"' in text
    assert "--hang-timeout" in text


# The pages in a browser.

SCREENS = {"wide": {"width": 1280}, "dark": {"width": 1280, "dark": True}, "phone": {"width": 390, "height": 844}}
LOOKED_AT = (
    "index",
    "quickstart",
    "concepts",
    "loop",
    "evidence",
    "notebooks/quick_start",
    "recipes/index",
    "recipes/mixup",
    "recipes/cosine",
    "from_composer",
    "reference/index",
    "reference/step",
    "reference/transforms-batches",
    "cli",
)


class _Address:
    """Stands for a file, for ``Browser.open``."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def as_uri(self) -> str:
        return self.uri


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, str]]:
    with served(SITE) as address, browser(tmp_path_factory.mktemp("browser")) as shown:
        yield shown, address


def until(shown: Browser, expression: str, seconds: float = 60.0) -> None:
    """Wait until an expression is true in the page."""
    end = time.monotonic() + seconds
    while not shown.ask(expression):
        assert time.monotonic() < end, f"not true after {seconds} s: {expression}"
        time.sleep(0.05)


def search_results(shown: Browser, address: str, words: str) -> list[str]:
    """Return the addresses that the search of the site shows for some words, best first.

    A page loads the index of the search once, so all searches of a test run use one page.
    """
    if shown.ask("document.querySelector('.md-search__input') === null"):
        shown.open(_Address(f"{address}index.html"))  # type: ignore[arg-type]
        until(shown, "document.readyState === 'complete'")
    field = "document.querySelector('.md-search__input')"
    # The site reads the field when a key is released, and text inserted by the browser releases none.
    released = f"{field}.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}}))"
    links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    shown.ask(f"{field}.focus(), {field}.value = ''")
    until(shown, f"{released} && {links}.length === 0")
    shown.call("Input.insertText", text=words)
    until(shown, f"{released} && {links}.length > 0")
    time.sleep(0.5)  # results of the whole phrase replace those of its beginning
    results: list[str] = shown.ask(links)
    return results


@in_a_browser
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", LOOKED_AT)
def test_page_renders_without_browser_errors(chromium: tuple[Browser, str], name: str, screen: str) -> None:
    shown, address = chromium
    shown.open(_Address(f"{address}{name}.html"), **SCREENS[screen])  # type: ignore[arg-type]
    until(shown, "document.readyState === 'complete' && document.querySelector('h1') !== null")
    if SHOTS:
        time.sleep(1)
        shown.picture(Path(SHOTS) / f"{name.replace('/', '-')}-{screen}.png", whole=False)
    assert shown.errors == []
    assert [request for request in shown.requests if not request.startswith((address, "data:"))] == []
    assert shown.ask("document.documentElement.scrollWidth <= innerWidth"), "wider than the screen"
    bright = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number).reduce((a, b) => a + b)"
    assert (shown.ask(bright) < 384) == (screen == "dark")


@in_a_browser
def test_search_finds_a_function_and_opens_its_page(chromium: tuple[Browser, str]) -> None:
    shown, address = chromium
    results = search_results(shown, address, "clip_grad_norm_")
    assert any("dtrain.clip_grad_norm_" in link for link in results), results
    assert shown.errors == []


SEARCHES = {
    "gradient clipping": {"recipes/adaptive_clip", "recipes/clip_by_norm", "recipes/clip_by_value"},
    "NCCL timeout": {"errors", "gpu", "hangs"},
    "OOM": {"errors", "memory", "microbatch"},
    "HSDP": {"distributed", "reference/sharding", "sharding"},
    "FSDP": {"distributed", "reference/sharding", "sharding"},
    "DataLoader": {"data", "reference/loader"},
    "activation checkpointing": {"memory", "reference/memory", "reference/sharding"},
    "validation": {"packing", "reference/step"},
    "multi node": {"nodes"},
    "quantization": {"precision", "scope"},
    "gradient accumulation": {"microbatch"},
    "mixed precision": {"precision", "recipes/autocast"},
    "DDP": {"distributed", "from_ddp"},
    "resume": {"checkpoints", "quickstart"},
    "out of memory": {"errors", "memory", "microbatch"},
    "LoRA": {"finetuning"},
    "multi-node": {"nodes"},
    "learning rate schedule": {"recipes/scale_lr", "reference/schedules", "schedules"},
    "warmup": {"recipes/warmup", "schedules"},
    "bf16": {"precision", "recipes/autocast"},
    "torchrun": {"launch", "nodes"},
    "Slurm": {"launch", "nodes", "preemption"},
    "checkpoint": {"checkpoints", "reference/checkpoints"},
    "early stopping": {"observing", "reference/monitors"},
    "wandb": {"observing", "reference/loggers"},
    "random seed": {"determinism", "reference/random"},
    "EMA": {"recipes/ema"},
    "tensor parallel": {"parallelism"},
    "pipeline parallel": {"distributed", "parallelism", "scope"},
    "mixture of experts": {"experts", "scope"},
    "torch.compile": {"memory", "reference/sharding", "sharding"},
    "CPU offload": {"memory"},
    "fp8": {"precision"},
    "deadlock": {"hangs"},
    "spot instance": {"preemption"},
    "streaming dataset": {"data", "reference/streaming"},
    "S3": {"checkpoints", "data"},
    "sequence packing": {"packing"},
    "throughput": {"observing", "reference/monitors"},
    "profiler": {"profiling", "reference/profiling"},
    "Hugging Face": {"checkpoints", "finetuning"},
    "Lightning": {"from_fabric"},
    "Kubernetes": {"nodes", "preemption"},
    "weight decay": {"optimizers", "recipes/DecoupledAdamW", "recipes/param_groups"},
    "NaN loss": {"errors", "observing", "recipes/nonfinite"},
    "ZeRO": {"distributed", "from_deepspeed", "sharding"},
    "RLHF": {"preferences"},
    "contrastive loss": {"embeddings"},
}
"""Words that people search for, and the pages of which one has to be among the first three results."""


@in_a_browser
@pytest.mark.parametrize("words", SEARCHES)
def test_search_finds_a_page_for_common_words(chromium: tuple[Browser, str], words: str) -> None:
    shown, address = chromium
    search_results(shown, address, words)
    pages = "[...document.querySelectorAll('.md-search-result__item > a')].slice(0, 3).map(link => link.pathname.slice(1))"
    first = {name.removesuffix(".html") for name in shown.ask(pages)}
    assert first & SEARCHES[words], first


def test_search_leaves_out_lists_of_everything() -> None:
    index = json.loads((SITE / "search" / "search_index.json").read_text())
    pages = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert pages & {"project/changelog.html", "log.html", "evidence.html", "names.html"} == set()
    assert {"microbatch.html", "recipes/ema.html", "reference/step.html"} <= pages


@in_a_browser
def test_copied_code_has_neither_prompts_nor_output(chromium: tuple[Browser, str]) -> None:
    """The copy button takes the text that is displayed while the block has this attribute."""
    shown, address = chromium
    shown.open(_Address(f"{address}recipes/mixup.html"))  # type: ignore[arg-type]
    block = "document.querySelector('.language-pycon code')"
    seen = shown.ask(f"{block}.innerText")
    shown.ask(f"{block}.setAttribute('data-md-copying', '')")
    copied = shown.ask(f"{block}.innerText")
    assert ">>> " in seen
    assert "\nTrue" in seen
    assert ">>>" not in copied
    assert "..." not in copied
    assert "\nTrue" not in copied
    compile(copied, "copied", "exec")


@in_a_browser
def test_color_scheme_can_be_switched(chromium: tuple[Browser, str]) -> None:
    shown, address = chromium
    shown.open(_Address(f"{address}index.html"))  # type: ignore[arg-type]
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    seen = [shown.ask(scheme)]
    for _ in range(2):
        shown.ask("[...document.querySelectorAll('[data-md-component=palette] label')].find(l => !l.hidden).click()")
        seen.append(shown.ask(scheme))
    assert set(seen) == {"default", "slate"}
