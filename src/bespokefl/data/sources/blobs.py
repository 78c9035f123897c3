"""Blobs: drawn discs and ellipses on textured backgrounds, for segmentation without any files.

Each domain has a look of its own (colours, texture, shape, size, noise), as images of one thing from several
microscopes do. Every image has its own random stream: the same image whatever the number of samples and domains.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field
from scipy.ndimage import gaussian_filter

from bespokefl.core.rng import stream
from bespokefl.data.dataset import Dataset, Masks
from bespokefl.data.sources.base import Pixels, Source

CLASSES = ("background", "blob")
Colour = tuple[float, float, float]
Image = npt.NDArray[np.float64]


class Look(NamedTuple):
    """How a domain's images are drawn; colours from 0 to 1, lengths as shares of the image's side."""

    blob: Colour
    ground: Colour
    texture: float  # strength of the cloudy pattern on everything
    grain: float  # its length
    noise: float  # standard deviation of a pixel's own noise
    longest: float  # of a blob's axes, over the shorter one; 1 draws discs
    radius: tuple[float, float]  # least and greatest
    most: int  # blobs of an image; the least is 1


LOOKS = {
    "bright": Look((0.85, 0.85, 0.85), (0.10, 0.10, 0.10), 0.10, 0.15, 0.03, 1.0, (0.08, 0.18), 4),
    "dim": Look((0.38, 0.38, 0.38), (0.18, 0.18, 0.18), 0.12, 0.10, 0.06, 1.5, (0.08, 0.16), 5),
    "stained": Look((0.45, 0.25, 0.60), (0.90, 0.75, 0.85), 0.15, 0.08, 0.03, 2.0, (0.06, 0.14), 6),
    "inverted": Look((0.15, 0.15, 0.18), (0.70, 0.70, 0.66), 0.20, 0.25, 0.04, 1.0, (0.10, 0.22), 3),
    "warm": Look((0.75, 0.30, 0.15), (0.45, 0.40, 0.25), 0.15, 0.06, 0.05, 2.5, (0.06, 0.12), 6),
    "blue": Look((0.25, 0.45, 0.90), (0.15, 0.20, 0.40), 0.20, 0.12, 0.08, 1.2, (0.10, 0.20), 3),
}


@dataclass(frozen=True)
class BlobsOptions:
    """What is drawn."""

    size: Annotated[int, Field(ge=8, le=512)] = 32  # pixels of an image's side
    samples: Annotated[int, Field(ge=4)] = 400  # images of all domains together, as even as can be
    domains: Annotated[int, Field(ge=1, le=len(LOOKS))] = 4


def draw(look: Look, size: int, rng: np.random.Generator) -> tuple[Pixels, Masks]:
    """One image (3, size, size) and its mask (size, size)."""
    inside = np.zeros((size, size), dtype=np.bool_)
    down, right = np.meshgrid(np.arange(size) + 0.5, np.arange(size) + 0.5, indexing="ij")
    for _ in range(rng.integers(1, look.most + 1)):
        centre, angle = rng.uniform(0.1, 0.9, 2) * size, rng.uniform(0, np.pi)
        short = rng.uniform(*look.radius) * size
        along = (down - centre[0]) * np.cos(angle) + (right - centre[1]) * np.sin(angle)
        across = (right - centre[1]) * np.cos(angle) - (down - centre[0]) * np.sin(angle)
        inside |= (along / rng.uniform(1, look.longest)) ** 2 + across**2 <= short**2
    colour = np.where(inside, np.array(look.blob)[:, None, None], np.array(look.ground)[:, None, None])
    clouds: Image = gaussian_filter(rng.normal(size=(size, size)), look.grain * size, mode="wrap")
    image = colour + look.texture * clouds / clouds.std() / 2 + look.noise * rng.normal(size=colour.shape)
    return np.round(255 * image.clip(0, 1)).astype(np.uint8), inside.astype(np.uint8)


def _load(root: Path | None, options: BlobsOptions) -> Dataset:
    names = tuple(LOOKS)[: options.domains]
    domain = np.arange(options.samples) * options.domains // options.samples
    first = np.searchsorted(domain, domain)  # where the image's domain begins
    drawn = [
        draw(LOOKS[names[d]], options.size, stream(0, "blobs", int(d), row - int(start)))
        for row, (d, start) in enumerate(zip(domain, first, strict=True))
    ]
    x, y = (np.stack(arrays) for arrays in zip(*drawn, strict=True))
    return Dataset("blobs", x, y, CLASSES, domain=domain.astype(np.int64), domains=names)


SOURCE = Source("blobs", "segmentation: drawn ellipses in up to 6 looks, colour, no files", "", _load, BlobsOptions)
