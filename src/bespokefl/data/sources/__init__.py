"""Sources: where pooled datasets come from. The registry is the list of entries that the modules here declare."""

from pathlib import Path

from bespokefl.data.dataset import Dataset
from bespokefl.data.options import lookup, parse_options
from bespokefl.data.sources import blobs, cifar, digits, digits5, idx, images, npz, nuclei, sheets, synth_digits
from bespokefl.data.sources.base import FilesMissing, Source

__all__ = ["SOURCES", "Source", "load_dataset"]

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        digits.SOURCE,
        *npz.SOURCES,
        *images.SOURCES,
        *idx.SOURCES,
        *cifar.SOURCES,
        *sheets.SOURCES,
        digits5.SOURCE,
        synth_digits.SOURCE,
        nuclei.SOURCE,
        blobs.SOURCE,
    )
}


def load_dataset(source: str, root: str | None = None, **options: object) -> Dataset:
    """The pooled dataset of that name; `root` is the file or folder that holds it, options are the source's own."""
    entry = lookup("data.source", source, SOURCES)
    chosen = parse_options(entry.options, options, f"source {source!r}")
    path = None if root is None else Path(root).expanduser()
    if path is not None and not path.exists():
        raise FilesMissing(
            f"data.root = {root!r} does not exist. data.source = {source!r} needs: {entry.files or 'nothing'}."
        )
    try:
        return entry.load(path, chosen)
    except FilesMissing as missing:
        raise FilesMissing(f"data.source = {source!r}: {missing}. Place at data.root: {entry.files}.") from None
