"""No recipe is exported without its evidence and its card in the docs."""

import itertools
import re

import pytest
import torch

from battery import cards, curves, pages, pictures
from old_torch import torch_before

NAMES = {name: value for members in pages.exported().values() for name, value in members}
ALGORITHMS = [name for name, value in NAMES.items() if pages.is_algorithm(value)]
SURGERIES = [name for name, value in NAMES.items() if value.__module__.startswith("dtrain.surgery.") and pages.rows_of(name)]


def test_every_listed_package_exports_names():
    assert all(pages.exported().values())
    assert ALGORITHMS
    assert SURGERIES


@pytest.mark.parametrize("section", ["Formula", "Source", "Example"])
def test_every_recipe_docstring_has_the_required_section(section):
    assert [name for name, value in NAMES.items() if not pages.section(value, section)] == []


def test_every_docstring_example_shows_its_output():
    for name, value in NAMES.items():
        lines = pages.section(value, "Example").splitlines()
        assert any(line.startswith(">>>") for line in lines), name
        assert any(line and not line.startswith((">>>", "...")) for line in lines), f"{name}: its example shows nothing"


@pytest.mark.parametrize("name", [*ALGORITHMS, *SURGERIES])
def test_every_algorithm_has_reference_numbers_a_row_and_a_cost(name):
    rows = pages.rows_of(name)
    assert any(row.points for row in rows), f"{name}: no row with numbers that are known by hand"
    assert rows, f"{name}: no row, so it is run neither on two ranks nor resumed"
    assert name in pages.costs()["costs"], f"{name}: no figure of its cost; run benchmarks/algorithms.py --out"


def test_long_signature_is_wrapped_and_keeps_its_quotes():
    def short(a: int, *rest: str, b: float = 0.5) -> None: ...

    assert pages.signature("short", short) == "short(a: int, *rest: str, b: float = 0.5) -> None"
    assert pages.signature("wsd", NAMES["warmup_stable_decay"]).splitlines() == [
        "wsd(",
        "    peak: float,",
        "    *,",
        "    warmup: float,",
        "    decay_start: float | None = None,",
        "    decay: float = 0,",
        "    end: float = 0.0,",
        "    shape: Literal['linear', 'cosine', '1-sqrt', 'exponential'] = 'linear',",
        ") -> Schedule",
    ]


def test_docstring_section_ends_before_the_next_paragraph():
    def described():
        """Multiply by a factor.

        Formula: ``a``
        (and so on)

        A paragraph.

        Example:
            >>> 1
            1
        """

    assert pages.section(described, "Formula") == "``a``\n(and so on)"
    assert pages.section(described, "Example") == ">>> 1\n1"


@pytest.mark.skipif(torch_before("2.13"), reason="the page shows signatures of torch's norms: an older GroupNorm has no bias=")
def test_generated_cards_are_up_to_date():
    made = dict(cards.files())
    assert {path.name for path in cards.FOLDER.iterdir()} == {path.name for path in made}
    stale = [path.name for path, text in made.items() if path.read_text() != text]
    assert stale == [], "run python tests/written.py"


def test_every_card_has_a_title_of_its_own_for_people():
    titles = {name: cards.title(card) for name, card in cards.cards().items()}
    assert len(set(titles.values())) == len(titles)
    assert [name for name, title in titles.items() if "_" in title or title[0].islower()] == []
    assert set(cards.TITLES) <= set(titles)


def test_every_exported_recipe_is_on_one_card():
    shown = [name for card in cards.cards().values() for name in (card.name, *card.parts)]
    assert sorted(shown) == sorted([*NAMES, "combine_schedules", "dt.clip_grad_norm_"])


VALUED = [name for name, card in cards.cards().items() if name not in ("combine_schedules", "replace_modules")]


@pytest.mark.parametrize("name", VALUED)
def test_every_card_suggests_values_with_a_source_and_says_when_not_to_use_it(name):
    value = cards.cards()[name].value
    rows = cards.suggested(value)
    assert rows, f"{name} has no section Suggested values: in its docstring"
    assert all(all(row) for row in rows)
    assert pages.section(value, "When not to use"), f"{name} has no section When not to use: in its docstring"


def test_suggested_values_are_parsed_and_a_line_without_a_source_is_refused():
    def described():
        """Do it.

        Suggested values:
            ImageNet, ResNet: ``alpha=0.2`` and
                more (A 2018, table 1 (b))
            CIFAR: ``alpha=1`` (B 2019)
        When not to use: never.
        """

    def bare():
        """Do it.

        Suggested values:
            ImageNet: ``alpha=0.2``
        """

    assert cards.suggested(described) == [
        ("ImageNet, ResNet", "`alpha=0.2` and more", "A 2018, table 1 (b)"),
        ("CIFAR", "`alpha=1`", "B 2019"),
    ]
    assert pages.section(described, "When not to use") == "never."
    with pytest.raises(ValueError, match="is not 'setting: value"):
        cards.suggested(bare)


def test_measured_effects_belong_to_cards():
    assert set(cards.METHODS.values()) <= set(cards.cards())
    assert set(cards.alone()) - {"off"} <= set(cards.cards())


def test_every_schedule_and_every_augmentation_has_a_picture():
    room = [card.name for card in cards.cards().values() if card.room == "schedules"]
    assert set(room) == set(curves.SCHEDULES)
    named = {*curves.NAMES, *(path.stem for path, _ in pictures.pictures())}
    assert (
        {"mixup", "cutmix", "cutout", "colout", "augmix", "rand_augment", "progressive_resizing"} <= named <= set(cards.cards())
    )
    assert {path.stem for path in curves.IMAGES.iterdir()} == named


NUMBER = re.compile(r"-?\d+\.?\d*")


# Curves train models, so a test makes them, not the collection in each worker.
@pytest.mark.parametrize("name", curves.NAMES)
def test_curve_is_up_to_date(name):
    text = curves.svg(curves.plots()[name])
    kept = (curves.IMAGES / f"{name}.svg").read_text()
    assert NUMBER.sub("#", kept) == NUMBER.sub("#", text), "run python tests/written.py"
    numbers = itertools.zip_longest(*(map(float, NUMBER.findall(svg)) for svg in (kept, text)))
    assert max(abs(a - b) for a, b in numbers) <= 0.11  # coordinates are rounded to a tenth of a pixel


@pytest.mark.parametrize(("path", "pixels"), [pytest.param(path, pixels, id=path.stem) for path, pixels in pictures.pictures()])
def test_picture_is_up_to_date(path, pixels):
    data = path.read_bytes()
    assert len(data) < 30_000
    assert pictures.alike(pixels, pictures.decode(data)), "run python tests/written.py"


def test_picture_survives_its_file_and_a_changed_picture_is_noticed():
    with torch.device("cpu"):  # files are read into the host's memory
        pixels = pictures.picture(*[pictures.drawn()] * 2)
    assert torch.equal(pictures.decode(pictures.encode(pixels)), pixels)
    assert pictures.alike(pixels, pixels)
    changed = pixels.clone()
    changed[:60, :60] = 255 - changed[:60, :60]
    assert not pictures.alike(changed, pixels)
    assert not pictures.alike(pixels[1:], pixels)
