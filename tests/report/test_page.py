"""The page in a real browser: what it draws, what it does, what it asks of the network (nothing)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser import Page, browser, find_browser
from tests.report.folders import CLIENTS, accuracies, write_comparison, write_run

from bespokefl.report.content import gather_content
from bespokefl.report.gather import Comparison
from bespokefl.report.page import page
from bespokefl.results.facts import read_facts
from bespokefl.results.files import read_runs, write_atomically

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium; `make browser` installs one, or BESPOKE_BROWSER names one"
)
METHODS = ["local", "fedavg", "pgfed", "fedpg-0", "fedpg-0.5"]


def write_page(out: Path) -> Path:
    write_atomically(out / "report.html", page(gather_content(Comparison(out, read_runs(out)))))
    return out / "report.html"


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    assert PROGRAM is not None
    with browser(PROGRAM) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(write_comparison(tmp_path_factory.mktemp("page") / "out"))


@pytest.fixture
def shown(tab: Page, report: Path) -> Page:
    """The page as somebody opens it, with all its charts drawn."""
    tab.open(report)
    tab.evaluate("localStorage.clear()")
    tab.open(report)
    tab.wait("window.bespokeReport")
    tab.evaluate("bespokeReport.drawAll()")
    return tab


def marks(tab: Page, chart: str, kind: str = "symbol") -> int:
    """How many items of a kind are in a chart that is drawn as SVG."""
    return int(tab.evaluate(f"document.querySelectorAll('[data-panel=\"{chart}\"] .mark-{kind} path').length"))


def visible_rows(tab: Page) -> list[str]:
    rows = "[...document.querySelectorAll('.ranking tbody tr')].filter((row) => !row.hidden)"
    found: list[str] = tab.evaluate(f"{rows}.map((row) => row.dataset.method)")
    return found


def numbers(tab: Page, chart: str) -> list[dict[str, str]]:
    """The table under a chart, opened as a reader opens it."""
    tab.evaluate(f"document.querySelector('[data-panel=\"{chart}\"] summary').click()")
    tab.wait(f"document.querySelector('[data-panel=\"{chart}\"] table')")
    lines = f"[...document.querySelectorAll('[data-panel=\"{chart}\"] tr')]"
    header, *rows = tab.evaluate(f"{lines}.map((row) => [...row.cells].map((cell) => cell.textContent))")
    return [dict(zip(header, row, strict=True)) for row in rows]


def settle(tab: Page) -> None:
    """Until every chart has followed the last choice."""
    tab.evaluate(
        "Promise.all([...bespokeReport.charts.values()].map((chart) => chart.view?.runAsync())).then(() => null)"
    )


def test_everything_is_drawn_without_complaint_or_network(shown: Page, report: Path) -> None:
    assert shown.complaints == []
    assert shown.requests == [report.as_uri()]
    charts = shown.evaluate("document.querySelectorAll('.chart').length")
    drawn = shown.evaluate("document.querySelectorAll('.drawing[data-drawn] svg, .drawing[data-drawn] canvas').length")
    assert charts == drawn >= 17
    assert marks(shown, "score-of-clients") == 5 * 2 * CLIENTS + 5  # a dot a client and seed, a triangle a method
    titles = shown.evaluate("[...document.querySelectorAll('h3')].map((title) => title.textContent)")
    for title in ("pgfed: change of A from round 1 to 3", "FedPG: own data and everybody's, by gamma"):
        assert title in titles


def test_the_histograms_over_the_global_model_have_a_bar_for_each_width(tab: Page, tmp_path: Path) -> None:
    of_global = {"global_accuracy": [0.5] * 4}
    write_run(tmp_path, "pgfed", accuracy=[0.8, 0.45, 0.52, 0.5], more=of_global)
    write_run(tmp_path, "ditto", accuracy=[0.6, 0.61, 0.6, 0.6], more=of_global)
    tab.open(write_page(tmp_path))
    tab.wait("window.bespokeReport")
    tab.evaluate("bespokeReport.drawAll()")
    assert tab.complaints == []
    assert marks(tab, "over-global-pgfed", "rect") == 4 and marks(tab, "over-global-ditto", "rect") == 1
    told = [tuple(row.values()) for row in numbers(tab, "over-global-pgfed")]
    assert told == [("-6.0", "-4.0", "1"), ("0.0", "2.0", "1"), ("2.0", "4.0", "1"), ("30.0", "32.0", "1")]
    tab.evaluate("document.querySelector('.chip[data-method=\"ditto\"] input').click()")
    assert tab.evaluate("document.querySelector('[data-panel=\"over-global-ditto\"]').hidden")


def test_charts_are_drawn_when_they_come_into_sight(tab: Page, report: Path) -> None:
    tab.open(report, height=600)
    tab.evaluate("document.querySelector('[data-panel=\"score-of-clients\"]').scrollIntoView()")
    tab.wait("document.querySelector('[data-panel=\"score-of-clients\"] [data-drawn]')")
    assert not tab.evaluate("Boolean(document.querySelector('[data-panel=\"gamma\"] [data-drawn]'))")
    tab.evaluate("document.querySelector('[data-panel=\"gamma\"]').scrollIntoView()")
    tab.wait("document.querySelector('[data-panel=\"gamma\"] [data-drawn]')")


def test_the_filter_reaches_charts_tables_and_ranking(shown: Page) -> None:
    assert sorted(visible_rows(shown)) == sorted(METHODS)
    shown.evaluate("document.querySelector('.chip[data-method=\"pgfed\"] input').click()")
    settle(shown)
    assert "pgfed" not in visible_rows(shown) and len(visible_rows(shown)) == 4
    assert marks(shown, "score-of-clients") == 4 * 2 * CLIENTS + 4
    assert {row["method"] for row in numbers(shown, "score-of-clients")} == set(METHODS) - {"pgfed"}
    assert shown.evaluate("document.querySelector('[data-panel=\"fact-pgfed-A\"]').hidden")
    assert shown.evaluate("document.getElementById('count').textContent") == "4 of 5 shown"
    shown.evaluate("document.querySelector('[data-quick=\"none\"]').click()")
    settle(shown)
    assert visible_rows(shown) == [] and marks(shown, "score-of-clients") == 0
    shown.evaluate("document.querySelector('[data-quick=\"all\"]').click()")
    settle(shown)
    assert marks(shown, "score-of-clients") == 5 * 2 * CLIENTS + 5
    assert shown.complaints == []


def test_tables_under_the_charts_hold_what_the_files_hold(shown: Page, report: Path) -> None:
    rows = numbers(shown, "score-of-clients")
    assert len(rows) == 5 * 2 * CLIENTS
    for row in rows:
        value = accuracies(row["method"], int(row["seed"]))[int(row["client"])]
        assert row["accuracy, %"] == f"{100 * value:.2f}"
    for row in numbers(shown, "gain-of-clients"):
        own, alone = (accuracies(name, int(row["seed"])) for name in (row["method"], "local"))
        gain = 100 * (own - alone)[int(row["client"])]
        assert float(row["gain over Local"]) == pytest.approx(gain, abs=0.006)
    final = [row for row in numbers(shown, "rounds-mean") if row["round"] == "3"]
    for row in final:
        means = [100 * accuracies(row["method"], seed).mean() for seed in (0, 1)]
        assert float(row["mean accuracy, %"]) == pytest.approx(sum(means) / 2, abs=0.006)
        assert float(row["lowest seed"]) == pytest.approx(min(means), abs=0.006)
    values = read_facts(report.parent / "pgfed" / "seed-0")["A"].values
    for row in numbers(shown, "fact-pgfed-A"):
        i, j = int(row["client i"]), int(row["client j"])
        assert float(row["change"]) == pytest.approx((values[-1] - values[0])[i, j], abs=6e-6)
    shown.evaluate("document.querySelectorAll('.numbers summary').forEach((summary) => summary.click())")
    shown.evaluate("document.querySelectorAll('.numbers:not([open]) summary').forEach((summary) => summary.click())")
    shown.wait("[...document.querySelectorAll('.numbers')].every((part) => part.querySelector('tbody tr'))")


def test_the_method_the_reference_and_the_seed_to_look_at(shown: Page) -> None:
    def choose(name: str, value: str) -> None:
        control = f"document.querySelector('[data-choice=\"{name}\"]')"
        shown.evaluate(f"{control}.value = '{value}'; {control}.dispatchEvent(new Event('change'))")
        settle(shown)

    choose("focus", "fedavg")
    assert {row["method"] for row in numbers(shown, "sorted-gains")} == {"fedavg"}
    unlike = sum(int((accuracies("fedavg", s) != accuracies("local", s)).sum()) for s in (0, 1))
    bars = "[...document.querySelectorAll('[data-panel=\"sorted-gains\"] .mark-rect path')]"
    heights = f"{bars}.filter((bar) => bar.getBBox().height > 0).length"
    assert shown.evaluate(heights) == unlike
    choose("reference", "over_fedavg")
    assert shown.evaluate(heights) == 0  # nobody gains over itself
    choose("seed", "1")
    assert {row["seed"] for row in numbers(shown, "labels")} == {"1"}


def test_sorting_by_click_and_by_key(shown: Page) -> None:
    order = "[...document.querySelectorAll('.ranking tbody tr')].map((row) => row.dataset.method)"
    heading = "[...document.querySelectorAll('.ranking thead th')].find((th) => th.textContent.startsWith('{}'))"
    shown.evaluate(f"{heading.format('sent')}.querySelector('button').click()")
    assert shown.evaluate(order) == sorted(shown.evaluate(order), key=len)
    assert shown.evaluate(f"{heading.format('sent')}.getAttribute('aria-sort')") == "ascending"
    shown.evaluate(f"{heading.format('method')}.querySelector('button').focus()")
    shown.press("Enter")
    assert shown.evaluate(order) == sorted(METHODS)
    shown.press("Space")
    assert shown.evaluate(order) == sorted(METHODS, reverse=True)
    shown.evaluate(f"{heading.format('gain')}.querySelector('button').click()")
    assert shown.evaluate(order)[-1] == "local"  # which has no gain over itself
    assert "gain over Local" in shown.evaluate("document.getElementById('said').textContent")


def test_light_and_dark(tab: Page, report: Path) -> None:
    paper = "getComputedStyle(document.querySelector('.chart')).backgroundColor"
    drawn = 'document.querySelector(\'[data-panel="score-of-clients"] [data-drawn="{}"]\')'
    tab.open(report, dark=True)
    tab.evaluate("localStorage.clear()")
    tab.open(report, dark=True)
    tab.wait(drawn.format("dark"))
    dark = tab.evaluate(paper)
    tab.evaluate("document.getElementById('theme').click()")
    tab.wait(drawn.format("light"))
    assert (dark, tab.evaluate(paper)) == ("rgb(23, 27, 32)", "rgb(255, 255, 255)")
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    tab.open(report, dark=True)  # the choice outlives a visit
    tab.wait(drawn.format("light"))
    assert tab.complaints == []
    tab.evaluate("localStorage.clear()")


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_is_wider_than_the_page(shown: Page, width: int) -> None:
    shown.resize(width)
    shown.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    shown.evaluate("new Promise((done) => setTimeout(done, 300))")
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    sizes = shown.evaluate(
        "[...document.querySelectorAll('.drawing')].filter((d) => d.offsetParent).map((d) => "
        "[d.querySelector('svg, canvas').getBoundingClientRect().width, d.clientWidth])"
    )
    assert all(drawn <= room + 1 for drawn, room in sizes)


def test_the_keyboard_reaches_everything_in_order(shown: Page) -> None:
    shown.resize(1280)
    shown.evaluate("document.activeElement.blur()")
    met: list[str] = []
    for _ in range(40):
        shown.press("Tab")
        met.append(
            shown.evaluate(
                "(document.activeElement.closest('nav') && 'nav') || document.activeElement.id || "
                "document.activeElement.className || document.activeElement.textContent"
            )
        )
    order = ["skip", "theme", "nav", "Methods 5 of 5 shown", "All", "scroll", "method"]
    places = [met.index(name) for name in order]
    assert places == sorted(places)
    assert shown.evaluate("document.querySelectorAll('[tabindex]:not([tabindex=\"0\"])').length") == 0


def test_everything_has_a_name(shown: Page) -> None:
    """Names as Chromium tells a screen reader: every control, and every chart."""
    nodes: list[dict[str, Any]] = shown.send("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "checkbox", "combobox", "image", "img", "region", "link")
    named = [node for node in nodes if node.get("role", {}).get("value") in roles and not node.get("ignored")]
    assert len(named) > 40
    assert [node for node in named if not node.get("name", {}).get("value", "").strip()] == []
    charts = [n["name"]["value"] for n in named if n["name"]["value"].startswith("Chart: ")]
    assert len(charts) == shown.evaluate("document.querySelectorAll('.chart').length")


def test_a_tooltip_tells_the_client(shown: Page) -> None:
    dot = "document.querySelector('[data-panel=\"score-of-clients\"] .mark-symbol path')"
    shown.evaluate(f"{dot}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = shown.evaluate(
        f"(() => {{ const b = {dot}.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }})()"
    )
    shown.move(*box)
    shown.wait("!document.getElementById('tip').hidden")
    assert "train samples" in shown.evaluate("document.getElementById('tip').textContent")


def test_clients_that_never_took_part_are_rings(tab: Page, tmp_path: Path) -> None:
    counts = {"rounds_asked": [3, 0, 2, 1, 1, 1], "rounds_failed": [0, 0, 0, 1, 0, 0]}
    write_run(tmp_path, "ditto", more=counts)
    tab.open(write_page(tmp_path))
    tab.wait("window.bespokeReport")
    tab.evaluate("bespokeReport.drawAll()")
    clients = "[...document.querySelectorAll('[data-panel=\"score-of-clients\"] .mark-symbol path')]"
    fills = tab.evaluate(f"{clients}.map((mark) => mark.getAttribute('fill'))")
    assert len(fills) == CLIENTS + 1  # and the triangle
    assert [fill in (None, "none", "transparent") for fill in fills].count(True) == 2
    asked = [row["rounds taken part"] for row in numbers(tab, "score-of-clients")]
    assert sorted(asked) == ["0", "0", "1", "1", "2", "3"]


def test_many_methods_stay_fluent(tab: Page, tmp_path: Path) -> None:
    """34 methods, 100 clients, 3 seeds, 100 rounds: a small file, eight colours at a time, and quick answers."""
    labels = ["local", "fedavg", *(f"method-{k:02d}" for k in range(32))]
    for label in labels:
        for seed in range(3):
            write_run(tmp_path, label, seed, clients=100, rounds=100)
    path = write_page(tmp_path)
    assert path.stat().st_size < 6_000_000
    tab.open(path)
    tab.wait("window.bespokeReport")
    tab.evaluate("bespokeReport.drawAll()")
    assert tab.complaints == []
    pressed = (
        "[...document.querySelectorAll('.pick[aria-pressed=\"true\"]')].map((b) => b.parentElement.dataset.method)"
    )
    before = tab.evaluate(pressed)
    assert len(before) == 8 and {"local", "fedavg"} <= set(before)
    grey = next(label for label in labels if label not in before)
    tab.evaluate(f"document.querySelector('.chip[data-method=\"{grey}\"] .pick').click()")
    tab.wait(f"{pressed}.includes('{grey}')")
    assert len(tab.evaluate(pressed)) == 8
    seconds = tab.evaluate(
        "(async () => { const began = performance.now(); document.querySelector('[data-quick=\"best\"]').click();"
        "await new Promise((done) => setTimeout(done)); await Promise.all([...bespokeReport.charts.values()]"
        ".map((chart) => chart.view.runAsync())); return (performance.now() - began) / 1000; })()"
    )
    assert seconds < 5  # well below one on a calm machine
    assert len(visible_rows(tab)) == 8


def test_a_name_that_looks_like_code_stays_a_name(tab: Page, tmp_path: Path) -> None:
    write_run(tmp_path, "<img src=x onerror=window.hacked=1>")
    write_run(tmp_path, "local")
    tab.open(write_page(tmp_path))
    tab.wait("window.bespokeReport")
    tab.evaluate("bespokeReport.drawAll()")
    assert tab.complaints == [] and tab.evaluate("window.hacked") is None
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
