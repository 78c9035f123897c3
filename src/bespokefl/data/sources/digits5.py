"""Digits5: the same ten digits from five sources, one domain each.

Four are read from files. SynthDigits is read where its file is present, else drawn by the project.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from bespokefl.core.rng import stream
from bespokefl.data.dataset import Dataset
from bespokefl.data.options import NoOptions
from bespokefl.data.sources import idx, npz, sheets, synth_digits
from bespokefl.data.sources.base import (
    DIGITS,
    FilesMissing,
    Source,
    concatenated_domains,
    find,
    folders,
    resized_rgb,
)


@dataclass(frozen=True)
class Digits5Options:
    """Which domains, and how much of each."""

    per_domain: Annotated[int, Field(ge=1)] | None = None  # most samples of a domain, the same draw for every seed
    domains: Annotated[int, Field(ge=2, le=5)] | None = None  # the first so many only, in the order of MNIST to MNIST-M
    drawn: bool = True  # draw SynthDigits where its file is absent


def _load_synthdigits(root: Path | None, options: NoOptions) -> Dataset:
    return npz.dataset_of("synthdigits", find(folders(root, "synthdigits"), "synthdigits.npz"), DIGITS)


DRAWN = "SynthDigits"
DOMAINS: dict[str, Callable[[Path | None, NoOptions], Dataset]] = {
    "MNIST": idx.load_mnist,
    "SVHN": sheets.load_svhn,
    "USPS": npz.load_usps,
    DRAWN: _load_synthdigits,
    "MNIST-M": sheets.load_mnistm,
}


def _load(root: Path | None, options: Digits5Options) -> Dataset:
    found = {}
    wanted = list(DOMAINS)[: options.domains]
    for domain in wanted:
        try:
            found[domain] = DOMAINS[domain](root, NoOptions())
        except FilesMissing as missing:
            if options.domains is not None and not (options.drawn and domain == DRAWN):
                raise FilesMissing(
                    f"data.domains = {options.domains} asks for {', '.join(wanted)}. {missing}"
                ) from None
    draws = options.drawn and DRAWN in wanted and DRAWN not in found
    if len(found) + draws < 2:
        needed = f"one is needed besides {DRAWN}, which is drawn" if draws else "two are needed"
        raise FilesMissing(f"found files of {len(found)} of the domains {', '.join(DOMAINS)}; at least {needed}")
    notes = []
    if draws:
        count = min(options.per_domain or synth_digits.SAMPLES, synth_digits.SAMPLES)
        found[DRAWN] = synth_digits.load_drawn(None, synth_digits.SynthDigitsOptions(count))
        notes.append(f"{DRAWN} is drawn (source synth-digits), not the published set")
    if absent := [domain for domain in wanted if domain not in found]:
        notes.append(f"domains not found and left out: {', '.join(absent)}")
    parts = {}
    for index, domain in enumerate(DOMAINS):
        if domain in found:
            data = _thinned(found[domain], options.per_domain, index)
            parts[domain] = (resized_rgb(data.x.astype(np.uint8, copy=False), 28), data.labels)
    return concatenated_domains("digits5", parts, DIGITS, "; ".join(notes))


def _thinned(data: Dataset, most: int | None, index: int) -> Dataset:
    if most is None or most >= len(data):
        return data
    return data.take(np.sort(stream(0, "per_domain", index).choice(len(data), most, replace=False)))


SOURCE = Source(
    "digits5",
    "digits in up to 5 domains (MNIST, SVHN, USPS, SynthDigits, MNIST-M), 28x28 colour",
    "the files of mnist, svhn, usps and mnistm; domains that are absent are left out. SynthDigits is drawn, unless "
    "there is synthdigits.npz (x_train, y_train, x_test, y_test; uint8)",
    _load,
    Digits5Options,
)
