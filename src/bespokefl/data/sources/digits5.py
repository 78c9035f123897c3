"""Digits5: the same ten digits from five sources, one domain each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from bespokefl.data.dataset import Dataset
from bespokefl.data.options import NoOptions
from bespokefl.data.sources import idx, npz, sheets
from bespokefl.data.sources.base import (
    DIGITS,
    FilesMissing,
    Source,
    concatenated_domains,
    find,
    folders,
    resized_rgb,
)
from bespokefl.rng import stream


@dataclass(frozen=True)
class Digits5Options:
    """How much of each domain is used."""

    per_domain: Annotated[int, Field(ge=1)] | None = None  # most samples of a domain, the same draw for every seed


def _load_synthdigits(root: Path | None, options: NoOptions) -> Dataset:
    return npz.dataset_of("synthdigits", find(folders(root, "synthdigits"), "synthdigits.npz"), DIGITS)


DOMAINS: dict[str, Callable[[Path | None, NoOptions], Dataset]] = {
    "MNIST": idx.load_mnist,
    "SVHN": sheets.load_svhn,
    "USPS": npz.load_usps,
    "SynthDigits": _load_synthdigits,
    "MNIST-M": sheets.load_mnistm,
}


def _load(root: Path | None, options: Digits5Options) -> Dataset:
    parts, absent = {}, []
    for index, (domain, load) in enumerate(DOMAINS.items()):
        try:
            data = load(root, NoOptions())
        except FilesMissing:
            absent.append(domain)
            continue
        if options.per_domain is not None and options.per_domain < len(data):
            rows = stream(0, "per_domain", index).choice(len(data), options.per_domain, replace=False)
            data = data.take(np.sort(rows))
        parts[domain] = (resized_rgb(data.x.astype(np.uint8, copy=False), 28), data.labels)
    if len(parts) < 2:
        raise FilesMissing(f"found {len(parts)} of the domains {', '.join(DOMAINS)}; at least two are needed")
    note = f"domains not found and left out: {', '.join(absent)}" if absent else ""
    return concatenated_domains("digits5", parts, DIGITS, note)


SOURCE = Source(
    "digits5",
    "digits in up to 5 domains (MNIST, SVHN, USPS, SynthDigits, MNIST-M), 28x28 colour",
    "the files of mnist, svhn, usps and mnistm, and synthdigits.npz (x_train, y_train, x_test, y_test; uint8); "
    "domains that are absent are left out",
    _load,
    Digits5Options,
)
