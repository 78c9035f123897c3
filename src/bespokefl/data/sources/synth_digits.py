"""Synthetic digits as a source; the project draws them itself, so no files are needed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from bespokefl.data.dataset import Dataset
from bespokefl.data.sources.base import DIGITS, Source
from bespokefl.data.synthdigits import GREATEST_SIZE, LEAST_SIZE, synth_digits

SAMPLES = 10_000


@dataclass(frozen=True)
class SynthDigitsOptions:
    """What is drawn."""

    samples: Annotated[int, Field(ge=2)] = SAMPLES  # as many of each digit, within one
    size: Annotated[int, Field(ge=LEAST_SIZE, le=GREATEST_SIZE)] = 32  # pixels of an image's side
    draw_seed: Annotated[int, Field(ge=0)] = 0  # which images; data.seed deals them to the clients


def load_drawn(root: Path | None, options: SynthDigitsOptions) -> Dataset:
    """The first images of the seed."""
    x, y = synth_digits(options.samples, options.draw_seed, options.size)
    return Dataset("synth-digits", x, y, DIGITS)


SOURCE = Source(
    "synth-digits",
    "drawn digits in varied typefaces, colours and backgrounds, 32x32 colour, no files",
    "",
    load_drawn,
    SynthDigitsOptions,
)
