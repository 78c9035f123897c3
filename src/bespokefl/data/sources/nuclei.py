"""Nuclei of the Data Science Bowl 2018: microscope images and masks, one domain for each way they were taken."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image
from pydantic import Field

from bespokefl.data.dataset import Dataset, Masks
from bespokefl.data.sources.base import Source, find, folders, resized_rgb
from bespokefl.data.sources.npz import read_npz
from bespokefl.data.sources.sheets import read_sheets
from bespokefl.errors import InputError

CLASSES = ("background", "nucleus")
TILE, COLUMNS = 128, 26


@dataclass(frozen=True)
class NucleiOptions:
    """The images' side."""

    size: Annotated[int, Field(ge=8, le=TILE)] = TILE  # pixels; below 128, images are shrunk and masks thinned out


def _load(root: Path | None, options: NucleiOptions) -> Dataset:
    places = folders(root, "nuclei")
    path = find(places, "nuclei_dsb2018_masks.npz")
    arrays = read_npz(path, "mask", "site", "sites")
    mask, site = arrays["mask"], arrays["site"]
    if mask.shape != (len(site), TILE, TILE):
        raise InputError(f"{path}: mask has shape {mask.shape}; needed: ({len(site)}, {TILE}, {TILE}), one per site.")
    x = read_sheets([(find(places, "nuclei_dsb2018.jpg"), len(site))], TILE, COLUMNS)
    y = mask.astype(np.uint8)
    if options.size != TILE:
        x, y = resized_rgb(x, options.size), _resized(y, options.size)
    domains = tuple(str(name) for name in arrays["sites"])
    return Dataset("nuclei", x, y, CLASSES, domain=site.astype(np.int64), domains=domains)


def _resized(masks: Masks, size: int) -> Masks:
    """Each pixel takes the label of the nearest old one, so that there are no labels in between."""
    nearest = Image.Resampling.NEAREST
    return np.stack([np.asarray(Image.fromarray(mask).resize((size, size), nearest)) for mask in masks])


SOURCE = Source(
    "nuclei",
    "segmentation: 664 microscope images of nuclei (Data Science Bowl 2018), 128x128 colour, 6 domains",
    "nuclei_dsb2018.jpg, nuclei_dsb2018_masks.npz (mask, site, sites)",
    _load,
    NucleiOptions,
)
