"""Colours that can be seen, and told apart by colour-blind readers too."""

import itertools

import numpy as np
import pytest

from bespokefl.report.theme import DARK, DASHES, INKS, LIGHT, MOST_PICKS, SHAPES, default_picks

# Linear RGB as seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
BLIND = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    s = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(s <= 0.04045, s / 12.92, ((s + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of luminances."""
    low, high = sorted(float(TO_XYZ[1] @ linear(colour)) + 0.05 for colour in (one, other))
    return high / low


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(("mode", "palette"), [("light", LIGHT), ("dark", DARK)])
def test_contrast(mode: str, palette: tuple[str, ...]) -> None:
    inks = INKS[mode]
    for colour in (*palette, inks["muted"], inks["good"], inks["bad"]):
        assert contrast(colour, inks["paper"]) >= 3  # WCAG 1.4.11, graphics
    assert contrast(inks["soft"], inks["paper"]) >= 4.5 and contrast(inks["ink"], inks["paper"]) >= 7  # text


@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize(("mode", "palette"), [("light", LIGHT), ("dark", DARK)])
def test_told_apart_by_colour_blind_readers(kind: str, mode: str, palette: tuple[str, ...]) -> None:
    """Either the colours seen differ clearly, or the dash and the shape do; gain and harm differ by colour alone."""
    seen = [lab(np.array(BLIND[kind]) @ linear(colour)) for colour in palette]
    for i, j in itertools.combinations(range(len(palette)), 2):
        differs = np.linalg.norm(seen[i] - seen[j]) > 20
        assert differs or (DASHES[i] != DASHES[j] and SHAPES[i] != SHAPES[j]), (palette[i], palette[j])
    good, bad = (lab(np.array(BLIND[kind]) @ linear(INKS[mode][name])) for name in ("good", "bad"))
    assert np.linalg.norm(good - bad) > 60


def test_who_has_a_colour_at_first() -> None:
    labels = [f"m{k}" for k in range(12)]
    assert default_picks(labels[:MOST_PICKS], ["m3"]) == labels[:MOST_PICKS]
    assert default_picks(labels, ["m11", "m9"]) == ["m0", "m1", "m2", "m3", "m4", "m5", "m9", "m11"]
    assert len(LIGHT) == len(DARK) == len(set(map(tuple, DASHES))) == len(set(SHAPES)) == MOST_PICKS
