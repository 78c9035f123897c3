"""Draw the pictures of these pages from an output folder of the demonstration: `python docs/make_images.py DIR`."""

import io
import sys
from pathlib import Path

from PIL import Image

from bespokefl.report.content import gather_content
from bespokefl.report.figures import render
from bespokefl.report.gather import Comparison
from bespokefl.report.panels import figure_spec
from bespokefl.report.publish import publish
from bespokefl.results.files import read_runs

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
FACTS = ("fact-pgfed-A", "fact-lg-mix-lambda")
WIDTH, HEIGHT = 1280, 1680  # of the page's upper part


def main(out: Path) -> None:
    page = publish(out)
    content = gather_content(Comparison(out, read_runs(out)))
    panels = {panel.id: panel for panel in content.panels}
    specs = [figure_spec(panels[name], content.looks, content.tables) | {"width": 420, "height": 330} for name in FACTS]
    beside([Image.open(io.BytesIO(render(spec)["png"])) for spec in specs]).save(IMAGES / "facts.png", optimize=True)
    photograph(page, IMAGES / "report.png")


def beside(images: list[Image.Image], gap: int = 40) -> Image.Image:
    joined = Image.new("RGB", (sum(i.width + gap for i in images) - gap, max(i.height for i in images)), "white")
    left = 0
    for image in images:
        joined.paste(image, (left, 0))
        left += image.width + gap
    return joined


def photograph(page: Path, to: Path) -> None:
    """The top of the page, as a browser shows it."""
    sys.path.insert(0, str(ROOT))
    from tests.browser import browser, find_browser

    program = find_browser()
    if program is None:
        print(f"{to.name} is left as it is: there is no Chromium.")
        return
    with browser(program) as tab:
        tab.open(page, width=WIDTH, height=HEIGHT)
        tab.wait("document.querySelector('[data-panel=\"score-of-clients\"] [data-drawn]')")
        tab.screenshot(to, whole=False)
    Image.open(to).save(to, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
