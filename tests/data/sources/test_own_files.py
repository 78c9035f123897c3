"""Users' own files: npz archives and folders of images, written here and read back."""

import re
import zipfile

import numpy as np
import pytest
from PIL import Image

from bespokefl.data import load_dataset
from bespokefl.errors import InputError

RNG = np.random.default_rng(0)


def save(folder, **arrays):
    path = folder / "own.npz"
    np.savez_compressed(path, **arrays)
    return str(path)


def test_npz_pooled_with_everything(tmp_path):
    x, y = RNG.normal(size=(6, 4)), np.array([0, 1, 0, 2, 1, 0])
    is_test, domain = np.array([0, 0, 1, 1, 0, 0]), np.array([0, 0, 0, 1, 1, 1], np.uint8)
    root = save(
        tmp_path, x=x, y=y, is_test=is_test, domain=domain, classes=np.array(["a", "b", "c"]), domains=["u", "v"]
    )
    data = load_dataset("npz", root)
    assert data.x.dtype == np.float32
    np.testing.assert_array_equal(data.x, x.astype(np.float32))
    assert data.y.tolist() == y.tolist() and data.classes == ("a", "b", "c")
    assert data.is_test.tolist() == [False, False, True, True, False, False]
    assert data.domain.tolist() == domain.tolist() and data.domains == ("u", "v")


def test_npz_train_and_test(tmp_path):
    x = RNG.integers(0, 256, (9, 5, 6)).astype(np.uint8)
    data = load_dataset("npz", save(tmp_path, x_train=x[:6], y_train=np.arange(6), x_test=x[6:], y_test=np.arange(3)))
    assert data.x.dtype == np.uint8
    np.testing.assert_array_equal(data.x, x[:, None])
    assert data.y.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert data.is_test.tolist() == [False] * 6 + [True] * 3
    assert data.classes == tuple("012345") and data.domain is None


@pytest.mark.parametrize(("shape", "read"), [((4, 8, 9, 3), (4, 3, 8, 9)), ((4, 3, 8, 9), (4, 3, 8, 9))])
def test_npz_channel_axis(tmp_path, shape, read):
    x = RNG.integers(0, 256, shape).astype(np.uint8)
    data = load_dataset("npz", save(tmp_path, x=x, y=np.zeros(4, int)))
    np.testing.assert_array_equal(data.x, x if shape == read else np.moveaxis(x, 3, 1))
    assert data.x.shape == read


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 2))}, "holds the keys x; allowed: x_train, y_train, x_test, y_test"),
        ({"x": np.zeros((2, 2)), "y": np.zeros(2, int), "z": np.zeros(2)}, "holds the keys x, y, z"),
        ({"x": np.zeros((2, 2), complex), "y": np.zeros(2, int)}, "x has dtype complex128; allowed: numbers"),
        ({"x": np.zeros((2, 2)), "y": np.zeros(2)}, "y has dtype float64; allowed: whole numbers"),
        ({"x": np.zeros((2, 2)), "y": np.zeros(3, int)}, r"y has shape \(3,\)"),
        ({"x": np.zeros((2, 2)), "y": np.array([0, object()])}, "without objects"),
        (
            {"x_train": np.zeros((2, 2)), "y_train": [0, 1], "x_test": np.zeros((2, 3)), "y_test": [0, 1]},
            r"x_train has samples of shape \(2,\)",
        ),
        (
            {"x_train": np.zeros((2, 2)), "y_train": [0, 1, 0], "x_test": np.zeros((2, 2)), "y_test": [0]},
            r"x_train has 2 rows but y_train has shape \(3,\)",
        ),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "classes": 2}, r"npz: classes has shape \(\); allowed: a list of names"),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "domains": [["a"]]}, r"npz: domains has shape \(1, 1\); allowed: a list"),
        (
            {"x": np.zeros((2, 2)), "y": [0, 1], "is_test": ["train", "test"]},
            r"npz: is_test has dtype <U5; allowed: true or false \(or 1 or 0\), one per row of x",
        ),
        ({"x": np.zeros((2, 2)), "y": [0, 1], "is_test": [1, 2]}, r"npz: is_test holds 2; allowed: true or false"),
    ],
)
def test_npz_errors(tmp_path, arrays, message):
    with pytest.raises(InputError, match=message):
        load_dataset("npz", save(tmp_path, **arrays))


def test_npz_needs_a_readable_file(tmp_path):
    for root, seen in ((None, "not set"), (str(tmp_path), re.escape(f"{str(tmp_path)!r}, a folder"))):
        told = (
            rf"^data\.source = 'npz': data\.root is {seen}; it must be the \.npz file\. Place at data\.root: one \.npz"
        )
        with pytest.raises(InputError, match=told):
            load_dataset("npz", root)
    whole = save(tmp_path, x=np.zeros((9, 9)), y=np.zeros(9, int))
    np.save(tmp_path / "single.npy", np.zeros(3))
    contents = (
        b"",
        b"PK\3\4 no archive",
        (tmp_path / "own.npz").read_bytes()[:-40],
        (tmp_path / "single.npy").read_bytes(),
    )
    for content in contents:
        (tmp_path / "own.npz").write_bytes(content)
        with pytest.raises(InputError, match=r"own\.npz cannot be read"):
            load_dataset("npz", whole)


def write_images(folder, count, size=(5, 4), mode="RGB"):
    """`count` random PNG files of (width, height); their pixels as (count, height, width, channels)."""
    folder.mkdir(parents=True)
    shape = (count, size[1], size[0]) + ((3,) if mode == "RGB" else ())
    pixels = RNG.integers(0, 256, shape).astype(np.uint8)
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{index}.png")
    return pixels


def test_image_folders(tmp_path):
    dogs, cats = write_images(tmp_path / "dog", 3), write_images(tmp_path / "cat", 2)
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    data = load_dataset("images", str(tmp_path))
    assert data.classes == ("cat", "dog") and data.y.tolist() == [0, 0, 1, 1, 1] and data.is_test is None
    np.testing.assert_array_equal(data.x, np.concatenate([cats, dogs]).transpose(0, 3, 1, 2))


def test_image_folders_with_an_official_split_in_grey(tmp_path):
    train, test = (
        write_images(tmp_path / "train" / "a", 3, mode="L"),
        write_images(tmp_path / "test" / "b", 2, mode="L"),
    )
    data = load_dataset("images", str(tmp_path), mode="L")
    assert data.classes == ("a", "b") and data.y.tolist() == [0, 0, 0, 1, 1]
    assert data.is_test.tolist() == [False] * 3 + [True] * 2
    np.testing.assert_array_equal(data.x, np.concatenate([train, test])[:, None])


def test_images_of_several_sizes_need_the_size_option(tmp_path):
    write_images(tmp_path / "a", 1, size=(5, 4))
    write_images(tmp_path / "b", 1, size=(6, 7))
    with pytest.raises(InputError, match=r"0\.png is 6x7 pixels but .*0\.png is 5x4: set data\.size"):
        load_dataset("images", str(tmp_path))
    assert load_dataset("images", str(tmp_path), size=8).x.shape == (2, 3, 8, 8)


def test_domain_folders(tmp_path):
    first = write_images(tmp_path / "clinic" / "ill", 2)
    second = write_images(tmp_path / "hospital" / "ill", 1)
    third = write_images(tmp_path / "hospital" / "well", 2)
    data = load_dataset("domains", str(tmp_path))
    assert data.domains == ("clinic", "hospital") and data.classes == ("ill", "well")
    assert data.domain.tolist() == [0, 0, 1, 1, 1] and data.y.tolist() == [0, 0, 0, 1, 1]
    np.testing.assert_array_equal(data.x, np.concatenate([first, second, third]).transpose(0, 3, 1, 2))


def test_image_errors(tmp_path):
    with pytest.raises(
        InputError, match=r"data\.source = 'images': data\.root is not set.*a folder of images per class"
    ):
        load_dataset("images")
    with pytest.raises(InputError, match="found no class folders with images"):
        load_dataset("images", str(tmp_path))
    with pytest.raises(InputError, match="found no domain folders"):
        load_dataset("domains", str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "broken.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"broken\.png cannot be read as an image"):
        load_dataset("images", str(tmp_path))
    with pytest.raises(InputError, match=r"data\.mode = 'CMYK'.*'RGB' or 'L'"):
        load_dataset("images", str(tmp_path), mode="CMYK")
    with pytest.raises(InputError, match=r"data\.sise = 3.*Did you mean size"):
        load_dataset("images", str(tmp_path), sise=3)


# files that are larger than they look ------------------------------------------------------------------
def claiming(path, shape, dtype="<f4"):
    """A .npy header that claims so many numbers, and none of them."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return path


def test_an_archive_that_unpacks_to_gigabytes_is_refused_by_its_header(tmp_path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as file:
            shape = (40_000, 25_000)  # 4 GB of zeros
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            for _ in range(64):
                file.write(bytes(2**20))  # the header decides; the rest may well be missing
        archive.write(claiming(tmp_path / "y.npy", (40_000,), "<i8"), "y.npy")
    with pytest.raises(InputError, match=r"bomb\.npz holds 4 GB of arrays, most of it in x; at most 2 GB.*max_gb = 4"):
        load_dataset("npz", path)


def test_a_claim_of_8e12_numbers_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "claim.npz", "w") as archive:
        archive.write(claiming(tmp_path / "x.npy", (2_000_000, 4_000_000)), "x.npy")
    with pytest.raises(InputError, match=r"holds 3\.2e\+04 GB"):
        load_dataset("npz", tmp_path / "claim.npz")


def test_the_limit_can_be_raised_and_lowered(tmp_path):
    path = save(tmp_path, x=np.zeros((500, 300)), y=np.arange(500) % 2)
    assert len(load_dataset("npz", path, max_gb=0.01)) == 500
    with pytest.raises(InputError, match=r"holds 0\.0012 GB.*at most 0\.001 GB"):
        load_dataset("npz", path, max_gb=0.001)


def test_labels_with_gaps_of_millions_are_refused(tmp_path):
    path = save(tmp_path, x=np.zeros((3, 4)), y=np.array([0, 1_000_000, 2_000_000]))
    with pytest.raises(InputError, match=r"label 2000000; number the classes from 0"):
        load_dataset("npz", path)
