"""Data whose labels are masks: checked, cut into clients, split; the sources that have them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bespokefl.data import Dataset, FederatedData, load, load_dataset
from bespokefl.data.sources.blobs import LOOKS
from bespokefl.engines.base import Resident
from bespokefl.errors import InputError
from bespokefl.tuning.validation import without_test_samples


def masks(n: int = 6, side: int = 4, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 1, side, side)).astype(np.float32), rng.integers(0, classes, (n, side, side))


def test_own_arrays_with_masks() -> None:
    x, y = masks()
    data = FederatedData.from_arrays([(x, y), (x, y)], test=0.5, classes=["ground", "thing"])
    assert data.has_masks and data.y.dtype == torch.uint8 and data.y.shape == (12, 4, 4)
    assert data.sizes("test").tolist() == [3, 3]
    rows = data.splits["train"][1]
    np.testing.assert_array_equal(data.y[rows].numpy(), np.concatenate([y, y])[rows])
    with pytest.raises(InputError, match="counts needs class labels, but these data have masks"):
        data.counts("train")
    resident = Resident(data.x, data.y, torch.device("cpu"), torch.float32)
    assert resident.gather(torch.as_tensor(rows))[1].dtype == torch.int64  # as labels are


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (masks()[0], masks(side=3)[1], r"shape \(6, 3, 3\) beside x of shape \(6, 1, 4, 4\)"),
        (masks()[0][:, 0, 0], masks()[1], "masks"),
        (masks()[0], masks()[1] + 300, "at most 256 classes"),
    ],
)
def test_masks_that_do_not_fit(x: np.ndarray, y: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FederatedData.from_arrays([(x, y)])


def test_a_dataset_checks_its_masks() -> None:
    x, y = masks()
    assert Dataset("d", x, y.astype(np.uint8), ("a", "b")).has_masks
    with pytest.raises(InputError, match="holds the label 1, with 1 classes"):
        Dataset("d", x, y.astype(np.uint8), ("a",))
    with pytest.raises(InputError, match="masks"):
        Dataset("d", x, y.astype(np.uint8)[:, :2], ("a", "b"))
    with pytest.raises(InputError, match="no label of a whole sample"):
        _ = Dataset("d", x, y.astype(np.uint8), ("a", "b")).labels


@pytest.mark.parametrize("split", [False, True])
def test_masks_in_an_npz(tmp_path: Path, split: bool) -> None:
    x, y = masks()
    arrays = {"x_train": x[:4], "y_train": y[:4], "x_test": x[4:], "y_test": y[4:]} if split else {"x": x, "y": y}
    np.savez(tmp_path / "mine.npz", **arrays)
    data = load("npz", 2, "iid", root=str(tmp_path / "mine.npz"))
    assert data.has_masks and data.classes == ("0", "1")
    np.testing.assert_array_equal(data.y.numpy(), y)


@pytest.mark.parametrize("partition", ["dirichlet", "labels", "pathological"])
def test_partitions_by_label_are_refused(partition: str) -> None:
    with pytest.raises(InputError, match=rf"data\.partition = '{partition}'.*masks; allowed: iid, domain"):
        load("blobs", 4, partition, samples=24)


def test_tuning_holds_out_whole_images() -> None:
    data = load("blobs", 4, "iid", samples=40)
    held = without_test_samples(data, 0.25, seed=0)
    assert held.sizes("test").tolist() == [1] * 4
    for own, rest, before in zip(held.splits["test"], held.splits["train"], data.splits["train"], strict=True):
        assert sorted([*own, *rest]) == sorted(before)


# blobs ----------------------------------------------------------------------------------------------


def test_blobs_are_the_same_everywhere_and_different_by_domain() -> None:
    data = load_dataset("blobs", samples=40, domains=4)
    assert data.x.shape == (40, 3, 32, 32) and data.x.dtype == np.uint8
    assert data.domains == ("bright", "dim", "stained", "inverted") and data.classes == ("background", "blob")
    assert np.bincount(data.domain).tolist() == [10] * 4  # type: ignore[arg-type]
    assert (data.y.reshape(40, -1).any(1)).all() and 0.03 < data.y.mean() < 0.4
    more = load_dataset("blobs", samples=80, domains=4)
    for domain in range(4):
        mine, theirs = data.domain == domain, more.domain == domain
        np.testing.assert_array_equal(data.x[mine], more.x[theirs][:10])
        inside, outside = (data.x[mine].transpose(0, 2, 3, 1)[data.y[mine] == k].mean(0) for k in (1, 0))
        look = LOOKS[data.domains[domain]]
        seen, drawn = inside - outside, 255 * (np.array(look.blob) - np.array(look.ground))
        assert np.abs(seen - drawn).max() < 30


def test_blobs_by_domain() -> None:
    data = load("blobs", partition="domain", samples=60, domains=3, size=16)
    assert data.client_names == ("bright", "dim", "stained") and data.input_shape == (3, 16, 16)
    assert [data.sizes(split).tolist() for split in ("train", "val", "test")] == [[12] * 3, [4] * 3, [4] * 3]


@pytest.mark.parametrize(("option", "value"), [("size", 4), ("domains", 9), ("samples", 1)])
def test_blobs_that_cannot_be_drawn(option: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"data\.{option} = {value}"):
        load_dataset("blobs", **{option: value})


# nuclei ---------------------------------------------------------------------------------------------


def write_nuclei(folder: Path, n: int = 30) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = -(-n // 26)
    sheet = rng.integers(0, 256, (rows * 128, 26 * 128, 3), dtype=np.uint8)
    Image.fromarray(sheet).save(folder / "nuclei_dsb2018.jpg", quality=95, subsampling=0)
    mask = np.zeros((n, 128, 128), dtype=np.uint8)
    mask[:, 20:60, 30:90] = 1
    site = np.sort(rng.integers(0, 2, n)).astype(np.uint8)
    np.savez(folder / "nuclei_dsb2018_masks.npz", mask=mask, site=site, sites=np.array(["one", "two"]))
    return np.asarray(Image.open(folder / "nuclei_dsb2018.jpg").convert("RGB")), site


def test_nuclei_are_read_from_their_sheet(tmp_path: Path) -> None:
    sheet, site = write_nuclei(tmp_path)
    data = load_dataset("nuclei", str(tmp_path))
    assert data.x.shape == (30, 3, 128, 128) and data.domains == ("one", "two")
    np.testing.assert_array_equal(data.x[27].transpose(1, 2, 0), sheet[128:, 128:256])
    np.testing.assert_array_equal(data.domain, site)
    assert data.y[:, 20:60, 30:90].all() and data.y.sum() == 30 * 40 * 60
    small = load_dataset("nuclei", str(tmp_path), size=32)
    assert small.x.shape == (30, 3, 32, 32) and set(np.unique(small.y)) == {0, 1}
    assert small.y.mean() == pytest.approx(data.y.mean(), abs=0.01)


def test_nuclei_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"found no nuclei_dsb2018_masks\.npz"):
        load_dataset("nuclei", str(tmp_path))
    np.savez(tmp_path / "nuclei_dsb2018_masks.npz", mask=np.zeros((3, 9, 9)), site=np.zeros(3), sites=["a"])
    with pytest.raises(InputError, match=r"mask has shape \(3, 9, 9\)"):
        load_dataset("nuclei", str(tmp_path))


def test_the_nuclei_of_the_data_pack(data_pack: Path) -> None:
    data = load_dataset("nuclei", str(data_pack))
    assert data.domain is not None
    assert np.bincount(data.domain).tolist() == [334, 90, 90, 107, 16, 27]
    shares = [round(float(data.y[data.domain == site].mean()), 3) for site in range(6)]
    assert shares == pytest.approx([0.081, 0.279, 0.177, 0.224, 0.018, 0.122], abs=0.0015)
