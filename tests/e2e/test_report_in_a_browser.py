"""report.html in a real browser: light, dark, on a phone, printed; nothing called for, nothing empty."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright
from recorded import record

from stoker.events.report import write_report

ARTEFACTS = Path(__file__).resolve().parents[1] / "artefacts"
VIEWS = {"light": (1200, "light"), "dark": (1200, "dark"), "phone": (375, "light")}

EMPTY = """() => [...document.querySelectorAll('figure svg[role=img]')].filter(svg => {
  const box = svg.getBBox();
  const drawn = svg.querySelector('polyline,rect,circle') && svg.querySelector('title');
  return box.width < 20 || box.height < 5 || !drawn;
}).length"""
CONTRAST = """() => {
  const style = getComputedStyle(document.body);
  const light = color => {
    const part = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = color.match(/\\d+/g).map(v => part(v / 255));
    return .2126 * r + .7152 * g + .0722 * b + .05;
  };
  const [ink, paper] = [light(style.color), light(style.backgroundColor)];
  return Math.max(ink, paper) / Math.min(ink, paper);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    assert program, "make setup installs Chromium on Debian; elsewhere install it by hand"
    with sync_playwright() as player:
        opened = player.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    lost = {"time": 14.0, "event": "host_lost", "host": "algo-3", "group": "cpu", "node": "n"}
    runs = [
        record(folder / "a", 10_000, epochs=12, hosts=6, extra=(lost,)),
        record(folder / "b", 1, epochs=1),
        record(folder / "c", 60, hosts=1, gpu=False, status="failed"),
    ]
    for run in runs:
        write_report([run], run / "report.html")
    write_report(runs, folder / "all.html")
    return folder


@pytest.mark.parametrize(
    ("name", "view"),
    [
        *(("a/report.html", view) for view in VIEWS),
        *(
            ("b/report.html", "phone"),
            ("c/report.html", "dark"),
            ("all.html", "light"),
            ("all.html", "phone"),
        ),
    ],
)
def test_every_figure_is_drawn(browser: Any, report: Path, name: str, view: str) -> None:
    width, scheme = VIEWS[view]
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(180_000)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((report / name).as_uri())
    assert not said
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    figures = page.locator("figure svg[role=img]").count()
    assert figures >= (8 if name.startswith("a") else 4)
    assert page.evaluate(EMPTY) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scrolling"
    assert page.evaluate(CONTRAST) > 7
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('svg .tick')].map(t => t.getBoundingClientRect().height))"
    )
    assert smallest > 8, "labels that can be read"
    folder = ARTEFACTS / "report"
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(
        path=folder / f"{name.replace('/', '-').removesuffix('.html')}-{view}.png", full_page=True
    )
    context.close()


def test_it_prints(browser: Any, report: Path) -> None:
    page = browser.new_page()
    page.set_default_timeout(180_000)
    page.goto((report / "a/report.html").as_uri())
    printed = page.pdf(
        path=ARTEFACTS / "report" / "printed.pdf", format="A4", print_background=True
    )
    assert printed[:4] == b"%PDF" and len(printed) > 20_000
    page.close()


def test_the_tables_behind_the_charts_open_by_keyboard(browser: Any, report: Path) -> None:
    page = browser.new_page()
    page.set_default_timeout(180_000)
    page.goto((report / "a/report.html").as_uri())
    first = page.locator("figure details").first
    first.locator("summary").focus()
    page.keyboard.press("Enter")
    first.locator("table").wait_for()  # until it is visible
    page.close()
