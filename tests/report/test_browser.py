"""The page in a real browser: it fits a phone, and its table sorts and filters."""

import re
from pathlib import Path

import pytest

from patchcert.report.page import write_report


@pytest.fixture
def page(run, tmp_path) -> Path:
    return write_report([run], tmp_path / "page.html")


def test_the_table_sorts_and_filters(page, evaluate):
    answer = evaluate(
        page,
        """
        const rows = () => [...document.querySelectorAll("table.rows tbody tr")];
        const shown = () => rows().map(row => row.cells[0].textContent);
        const head = document.querySelector('th[data-key="margin"]');
        const before = shown();
        head.querySelector("button").click();
        const rising = shown();
        const sort = head.getAttribute("aria-sort");
        head.querySelector("button").click();
        const falling = shown();
        const form = document.querySelector("form.filters");
        form.elements.verdict.value = "2";
        form.dispatchEvent(new Event("input"));
        const wrong = shown();
        form.elements.outcome.value = "2";
        form.dispatchEvent(new Event("input"));
        const count = document.querySelector("form.filters output").textContent;
        return {before, rising, sort, falling, wrong, broken: shown(), count};
        """,
    )
    everything = [str(number) for number in range(40)]
    assert answer["before"] == everything
    assert answer["rising"][:2] == ["39", "38"]
    assert answer["sort"] == "ascending"
    assert answer["falling"][:2] == ["27", "26"]
    assert sorted(answer["wrong"]) == ["36", "37", "38", "39"]
    assert sorted(answer["broken"]) == ["36", "38"]
    assert answer["count"] == "2 of 40 images"


def test_columns_are_those_of_the_certificates(voted_run, tmp_path, evaluate):
    page = write_report([voted_run], tmp_path / "voted.html")
    cells = evaluate(
        page,
        """
        const row = document.querySelector("table.rows tbody tr:last-child");
        return [...row.cells].map(cell => cell.textContent);
        """,
    )
    assert cells == ["39", "class 9", "abstained", "abstained", "-1", "991", "not attacked"]


@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_sticks_out_of_the_window(page, evaluate, width):
    size = evaluate(page, "return [document.documentElement.scrollWidth, window.innerWidth];", width)
    assert size[0] <= size[1] == width


def test_outlines_are_whole_and_wide_tables_show_that_they_scroll(page, evaluate):
    overflow, attachment, focus = evaluate(
        page,
        """
        const picture = getComputedStyle(document.querySelector("svg.picture"));
        const scroll = document.querySelector(".scroll");
        return [picture.overflow, getComputedStyle(scroll).backgroundAttachment, scroll.tabIndex];
        """,
        390,
    )
    assert overflow == "visible"
    assert {"local", "scroll"} <= set(attachment.split(", "))
    assert focus == 0


def test_a_page_that_complains_is_noticed(page, evaluate):
    with pytest.raises(AssertionError, match="out of order"):
        evaluate(page, 'console.error("out of order"); return 1;')


def test_text_has_enough_contrast(page):
    schemes = re.findall(r":root \{(.*?)\}", page.read_text(encoding="utf-8"), re.S)
    assert len(schemes) == 3  # light, dark and print
    for scheme in schemes:
        colour = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})\b", scheme))
        for ink in ("--text", "--muted", "--accent", "--alarm", "--warm"):
            for paper in ("--paper", "--raised"):
                assert contrast(colour[ink], colour[paper]) >= 4.5, (ink, paper, scheme)


def contrast(front: str, back: str) -> float:
    """The ratio of relative luminances by WCAG 2."""
    lighter, darker = sorted((luminance(front), luminance(back)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
