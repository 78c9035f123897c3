"""docs/reproduction.md says what its runs say."""

import re

from docs.make_reproduction import BLOCK, COLLECTION, COMMAND, IMAGES, PAGE, filled, percent, read_table


def test_the_page_is_what_the_runs_make() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled(text), f"docs/reproduction.md is not up to date; run: {COMMAND}"
    assert len(list(BLOCK.finditer(text))) >= 4


def test_its_pictures_exist_and_its_runs_are_small() -> None:
    for name in re.findall(r"\]\(images/([^)]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (IMAGES / name).is_file(), name
    assert sum(path.stat().st_size for path in COLLECTION.iterdir()) < 5e6


def test_the_models_that_methods_are_scored_by_are_among_those_measured() -> None:
    found = read_table("pgfed-table1", "cifar10-100")
    fedavg = found.runs["fedavg"]
    assert percent(fedavg, "personal:mean@last") == percent(fedavg, "global:mean@last")  # as the paper scores it
    for label in ("local", "pgfed", "pgfedmo", "fedfomo"):  # what a client trained is what it is scored by
        assert percent(found.runs[label], "personal:mean@last") == percent(found.runs[label], "before_agg:mean@last")
    assert percent(found.runs["local"], "global:mean@last") is None
