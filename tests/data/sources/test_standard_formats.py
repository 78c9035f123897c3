"""The standard files of known datasets, in small: written here byte by byte and read back."""

import gzip
import pickle
import struct

import numpy as np
import pytest
from PIL import Image

from bespokefl.data import load_dataset, synth_digits
from bespokefl.data.sources import idx
from bespokefl.data.sources.sheets import read_sheets
from bespokefl.errors import InputError

RNG = np.random.default_rng(0)


def pixels(*shape):
    return RNG.integers(0, 256, shape).astype(np.uint8)


def labels(n, classes=10):
    return RNG.integers(0, classes, n).astype(np.uint8)


def write_idx(folder, values, stem, zipped):
    content = struct.pack(">BBBB", 0, 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    content += values.tobytes()
    name = f"{stem}.gz" if zipped else stem
    (folder / name).write_bytes(gzip.compress(content) if zipped else content)


def write_idx_dataset(folder, zipped):
    folder.mkdir(parents=True, exist_ok=True)
    x_train, y_train, x_test, y_test = pixels(7, 28, 28), labels(7), pixels(3, 28, 28), labels(3)
    write_idx(folder, x_train, "train-images-idx3-ubyte", zipped)
    write_idx(folder, y_train, "train-labels-idx1-ubyte", zipped)
    write_idx(folder, x_test, "t10k-images-idx3-ubyte", zipped)
    write_idx(folder, y_test, "t10k-labels-idx1-ubyte", zipped)
    return np.concatenate([x_train, x_test])[:, None], np.concatenate([y_train, y_test])


def assert_equals(data, x, y, train):
    np.testing.assert_array_equal(data.x, x)
    np.testing.assert_array_equal(data.y, y)
    assert data.x.dtype == np.uint8
    assert data.is_test.tolist() == [False] * train + [True] * (len(y) - train)


@pytest.mark.parametrize("source", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("below", [True, False])
def test_idx(tmp_path, source, zipped, below):
    x, y = write_idx_dataset(tmp_path / source if below else tmp_path, zipped)
    data = load_dataset(source, str(tmp_path))
    assert_equals(data, x, y, 7)
    assert len(data.classes) == 10


def test_fashion_mnist_is_found_where_debian_puts_it(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "DEBIAN_FASHION_MNIST", tmp_path)
    with pytest.raises(InputError, match="Debian's package dataset-fashion-mnist"):
        load_dataset("fashion-mnist")
    x, y = write_idx_dataset(tmp_path, zipped=True)
    assert_equals(load_dataset("fashion-mnist"), x, y, 7)


def test_mnist_npz(tmp_path):
    x, y = pixels(5, 28, 28), labels(5)
    np.savez(tmp_path / "mnist.npz", x_train=x[:3], y_train=y[:3], x_test=x[3:], y_test=y[3:])
    assert_equals(load_dataset("mnist", str(tmp_path)), x[:, None], y, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file of unsigned bytes .it starts with nothing"),
        (b"\0\0\x0d\1\0\0\0\1\0\0\0\0", "not an idx file of unsigned bytes"),
        (b"\0\0\x08\3\0\0", "ends inside its header"),
        (b"\0\0\x08\1\0\0\0\5ab", r"should hold \(5,\) bytes after its header but has 2"),
    ],
)
def test_broken_idx(tmp_path, content, message):
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        idx.read_idx(path)
    (tmp_path / "labels.gz").write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(InputError, match="cannot be read"):
        idx.read_idx(tmp_path / "labels.gz")


@pytest.mark.parametrize("below", ["", "cifar-10-batches-bin"])
def test_cifar10_binary(tmp_path, below):
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    x, y = pixels(12, 3, 32, 32), labels(12)
    for batch in range(6):
        name = "test_batch.bin" if batch == 5 else f"data_batch_{batch + 1}.bin"
        rows = range(2 * batch, 2 * batch + 2)
        (folder / name).write_bytes(b"".join(bytes([y[row]]) + x[row].tobytes() for row in rows))
    data = load_dataset("cifar10", str(tmp_path))
    assert_equals(data, x, y, 10)
    assert data.classes[9] == "truck"
    (folder / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(InputError, match=r"test_batch\.bin has 3 bytes, which is no multiple of a record's 3073"):
        load_dataset("cifar10", str(tmp_path))


def test_cifar100_binary_takes_fine_labels(tmp_path):
    x, coarse, fine = pixels(5, 3, 32, 32), labels(5, 20), labels(5, 100)
    for name, rows in (("train.bin", range(3)), ("test.bin", range(3, 5))):
        content = b"".join(bytes([coarse[row], fine[row]]) + x[row].tobytes() for row in rows)
        (tmp_path / name).write_bytes(content)
    assert_equals(load_dataset("cifar100", str(tmp_path)), x, fine, 3)
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"name{k}" for k in range(100)) + "\n")
    assert load_dataset("cifar100", str(tmp_path)).classes[42] == "name42"


@pytest.mark.parametrize(("source", "name"), [("cifar10", "data_batch_1"), ("cifar100", "meta")])
def test_cifar_pickles_are_refused(tmp_path, source, name):
    (tmp_path / name).write_bytes(pickle.dumps({b"labels": []}))
    with pytest.raises(InputError, match=r"'python version', which is pickled.*binary version.*\.bin"):
        load_dataset(source, str(tmp_path))


def write_sheet(path, tiles, columns):
    """Tiles (n, 3, t, t), row by row on a black canvas."""
    side = tiles.shape[2]
    rows = -(-len(tiles) // columns)
    canvas = Image.new("RGB", (columns * side, rows * side))
    for index, tile in enumerate(tiles):
        canvas.paste(Image.fromarray(tile.transpose(1, 2, 0)), (index % columns * side, index // columns * side))
    canvas.save(path, lossless=True)


def test_sheets(tmp_path):
    first, second = pixels(7, 3, 4, 4), pixels(3, 3, 4, 4)
    write_sheet(tmp_path / "a.webp", first, 3)
    write_sheet(tmp_path / "b.png", second, 3)
    read = read_sheets([(tmp_path / "a.webp", 7), (tmp_path / "b.png", 3)], 4, 3)
    np.testing.assert_array_equal(read, np.concatenate([first, second]))
    with pytest.raises(InputError, match=r"a\.webp is 12x12 pixels; 10 labels need 12x16"):
        read_sheets([(tmp_path / "a.webp", 10)], 4, 3)


def test_cifar10_sheets(tmp_path):
    x, y = pixels(12, 3, 32, 32), labels(12)
    names = np.array([f"class{k}" for k in range(10)])
    np.savez(tmp_path / "cifar10_labels.npz", y_train=y[:10], y_test=y[10:], classes=names)
    for part in range(5):
        write_sheet(tmp_path / f"cifar10_train_{part}.webp", x[2 * part : 2 * part + 2], 100)
    write_sheet(tmp_path / "cifar10_test.webp", x[10:], 100)
    data = load_dataset("cifar10", str(tmp_path))
    assert_equals(data, x, y, 10)
    assert data.classes == tuple(names)


def digit_npz(path, side, n=6):
    x, y = pixels(n, side, side), labels(n)
    np.savez(path, x_train=x[:-1], y_train=y[:-1], x_test=x[-1:], y_test=y[-1:])
    return x, y


def test_digits5_leaves_absent_domains_out_and_says_so(tmp_path):
    nothing = "found files of 0 of the domains MNIST, SVHN, USPS, SynthDigits, MNIST-M; at least"
    with pytest.raises(InputError, match=f"{nothing} one is needed besides SynthDigits, which is drawn"):
        load_dataset("digits5", str(tmp_path))
    with pytest.raises(InputError, match=f"{nothing} two are needed"):
        load_dataset("digits5", str(tmp_path), drawn=False)
    x, y = digit_npz(tmp_path / "mnist.npz", 28)
    flat = np.full((5, 16, 16), 77, np.uint8)  # a flat image stays flat whatever the resizing
    np.savez(tmp_path / "usps.npz", x_train=flat[:4], y_train=labels(4), x_test=flat[4:], y_test=labels(1))
    synth, synth_y = pixels(4, 28, 28, 3), labels(4)
    np.savez(tmp_path / "synthdigits.npz", x_train=synth[:3], y_train=synth_y[:3], x_test=synth[3:], y_test=synth_y[3:])
    data = load_dataset("digits5", str(tmp_path))
    assert data.domains == ("MNIST", "USPS", "SynthDigits") and data.x.shape == (15, 3, 28, 28)
    assert data.note == "domains not found and left out: SVHN, MNIST-M"
    assert np.bincount(data.domain).tolist() == [6, 5, 4]
    np.testing.assert_array_equal(data.x[:6], np.repeat(x[:, None], 3, axis=1))
    assert (data.x[6:11] == 77).all()
    np.testing.assert_array_equal(data.x[11:], synth.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.y[:6], y)

    thinned = load_dataset("digits5", str(tmp_path), per_domain=4)
    assert np.bincount(thinned.domain).tolist() == [4, 4, 4]
    originals = {image.tobytes(): label for image, label in zip(data.x[:6], data.y[:6], strict=True)}
    drawn = [(image.tobytes(), label) for image, label in zip(thinned.x[:4], thinned.y[:4], strict=True)]
    assert len(dict(drawn)) == 4 and all(originals[image] == label for image, label in drawn)


def test_digits5_draws_synthdigits_where_its_file_is_absent(tmp_path):
    digit_npz(tmp_path / "mnist.npz", 28)
    with pytest.raises(InputError, match="found files of 1 of the domains"):
        load_dataset("digits5", str(tmp_path), drawn=False)
    data = load_dataset("digits5", str(tmp_path), per_domain=20)
    assert data.domains == ("MNIST", "SynthDigits") and np.bincount(data.domain).tolist() == [6, 20]
    assert data.note == (
        "SynthDigits is drawn (source synth-digits), not the published set; "
        "domains not found and left out: SVHN, USPS, MNIST-M"
    )
    x, y = synth_digits(20)
    np.testing.assert_array_equal(data.y[6:], y)
    shrunk = [np.asarray(Image.fromarray(image.transpose(1, 2, 0)).resize((28, 28), 2)) for image in x]
    np.testing.assert_array_equal(data.x[6:], np.stack(shrunk).transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("mnist", "train-images-idx3-ubyte.*mnist.npz"),
        ("cifar10", r"data_batch_1\.bin.*cifar-10-batches-bin.*cifar10_train_0\.webp.*cifar10_labels\.npz"),
        ("cifar100", r"train\.bin.*cifar-100-binary"),
        ("svhn", r"svhn_train\.jpg, svhn_test\.jpg, digits_labels\.npz"),
        ("mnistm", r"mnistm_train\.jpg"),
        ("usps", r"usps\.npz"),
        ("organamnist", r"organamnist_6k\.npz"),
        ("office-caltech10", r"office_caltech10_\{amazon,caltech,dslr,webcam\}\.jpg"),
        ("digits5", r"synthdigits\.npz"),
    ],
)
def test_missing_files_are_listed(tmp_path, source, wanted):
    for root in (None, str(tmp_path)):
        with pytest.raises(InputError, match=rf"data\.source = '{source}'.*Place at data\.root: .*{wanted}"):
            load_dataset(source, root)


def test_label_archives_that_lack_a_key_are_named(tmp_path):
    np.savez(tmp_path / "digits_labels.npz", svhn_train=labels(3))
    with pytest.raises(InputError, match=r"digits_labels\.npz lacks svhn_test; it holds svhn_train"):
        load_dataset("svhn", str(tmp_path))
