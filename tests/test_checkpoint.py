import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bespokefl.errors import RunError
from bespokefl.experiments import checkpoint
from bespokefl.experiments.checkpoint import load_newest, save


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3, 4), float(step)), "count": torch.tensor(step)}


def fill(folder: Path, *steps: int, keep: int = 2) -> None:
    for step in steps:
        save(folder, step, tensors_of(step), {"step": step}, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_every_kind_of_tensor_comes_back_bit_by_bit(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "z zero-dim": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "int64": torch.tensor([-(2**62), 2**62 + 1]),
        "uint8": torch.tensor([0, 255], dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "bf16": torch.randn(5, dtype=torch.bfloat16),
        "float16": torch.randn(5, dtype=torch.float16),
        "float64": torch.tensor([1 / 3, float("nan"), float("-inf"), -0.0, 5e-324], dtype=torch.float64),
        "base": base,
        "the same again": base,
        "transposed": base.T,
        "slice": base[1:3],
        "strided": base[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "a parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }
    before = {name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in tensors.items()}
    save(tmp_path, 0, tensors, {})
    loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.warnings == []
    assert list(loaded.tensors) == list(tensors)  # in the order given
    assert {name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in loaded.tensors.items()} == before


def test_meta_comes_back_equal(tmp_path: Path) -> None:
    meta = {"z": 0.1 + 0.2, "a": [1, 2.5, None, True, "Größe"], "nested": {"b": {}, "a": []}, "big": 2**80}
    save(tmp_path, 7, {}, meta)
    loaded = load_newest(tmp_path)
    assert loaded is not None
    assert (loaded.step, loaded.tensors, loaded.meta) == (7, {}, meta)
    assert list(loaded.meta) == list(meta)


def test_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    fill(tmp_path, 12)
    assert names(tmp_path) == ["round-000012.json", "round-000012.safetensors"]
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    assert torch.equal(load_file(tmp_path / "round-000012.safetensors")["w"], tensors_of(12)["w"])
    assert json.loads((tmp_path / "round-000012.json").read_text())["meta"] == {"step": 12}


def test_contiguous_tensors_of_the_cpu_are_written_without_a_copy() -> None:
    whole, view = torch.zeros(1000), torch.zeros(10, 10)
    separate = checkpoint.separate({"whole": whole, "view": view[2:4], "twice": whole})
    assert separate["whole"].data_ptr() == whole.data_ptr()
    assert separate["view"].data_ptr() == view[2:4].data_ptr()
    assert separate["twice"].data_ptr() != whole.data_ptr()


def test_loaded_tensors_do_not_follow_the_file(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    loaded = load_newest(tmp_path)
    path = tmp_path / "round-000001.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert loaded is not None and torch.equal(loaded.tensors["w"], tensors_of(1)["w"])


def test_no_checkpoint(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "nowhere") is None
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / "round-1.json").write_text("not ours either")
    assert load_newest(tmp_path) is None


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    (tmp_path / "notes.txt").write_text("not ours")
    fill(tmp_path, 1, 2, 3, 4, 5, keep=keep)
    pairs = [f"round-{step:06d}.{suffix}" for step in left for suffix in ("json", "safetensors")]
    assert names(tmp_path) == ["notes.txt", *pairs]


def test_numbers_order_checkpoints_not_names(tmp_path: Path) -> None:
    fill(tmp_path, 999_999, 1_000_000)
    loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.step == 1_000_000


def test_saving_an_earlier_step_drops_the_later_ones(tmp_path: Path) -> None:
    fill(tmp_path, 10, 12)
    fill(tmp_path, 11)
    assert names(tmp_path)[::2] == ["round-000010.json", "round-000011.json"]
    loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.step == 11


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    save(tmp_path, 3, {"w": torch.ones(2)}, {"second": True})
    loaded = load_newest(tmp_path)
    assert loaded is not None and (loaded.meta, list(loaded.tensors)) == ({"second": True}, ["w"])


def test_stale_temporaries_and_unfinished_saves_are_removed_by_the_next_save(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "round-000002.safetensors").write_bytes(b"never committed")
    (tmp_path / ".unfinished").mkdir()
    (tmp_path / ".unfinished" / "round-000003.safetensors").write_bytes(b"half")
    (tmp_path / ".unfinished" / "something").write_bytes(b"half")
    fill(tmp_path, 4)
    assert names(tmp_path)[::2] == ["round-000001.json", "round-000004.json"]
    assert len(names(tmp_path)) == 4


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit_meta(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 9\n', '"step": 8\n'))


def newer_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


def not_an_object(path: Path) -> None:
    path.write_text("[1, 2]")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\xfa")


DAMAGES = [
    ("safetensors", truncate, "does not match the checksum"),
    ("safetensors", flip_last_bit, "does not match the checksum"),
    ("safetensors", empty, "does not match the checksum"),
    ("safetensors", Path.unlink, "FileNotFoundError"),
    ("json", truncate, "JSONDecodeError"),
    ("json", empty, "JSONDecodeError"),
    ("json", not_text, "UnicodeDecodeError"),
    ("json", not_an_object, "cannot be read"),
    ("json", edit_meta, "does not match its checksum"),
    ("json", newer_format, "its format is 2, this version reads 1"),
]


@pytest.mark.parametrize(("suffix", "damage", "reason"), DAMAGES)
def test_a_damaged_newest_is_reported_and_the_one_before_used(
    tmp_path: Path, suffix: str, damage: Callable[[Path], None], reason: str
) -> None:
    fill(tmp_path, 7, 9)
    path = tmp_path / f"round-000009.{suffix}"
    before = path.read_bytes()
    damage(path)
    assert not path.exists() or path.read_bytes() != before
    loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.step == 7 and loaded.meta == {"step": 7}
    assert torch.equal(loaded.tensors["w"], tensors_of(7)["w"])
    assert len(loaded.warnings) == 1 and str(path) in loaded.warnings[0] and reason in loaded.warnings[0]


def test_a_missing_commit_mark_is_reported(tmp_path: Path) -> None:
    fill(tmp_path, 7, 9)
    (tmp_path / "round-000009.json").unlink()
    loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.step == 7
    assert len(loaded.warnings) == 1 and "round-000009.json is missing" in loaded.warnings[0]


def test_a_first_save_that_never_finished_is_no_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "round-000001.json").unlink()
    assert load_newest(tmp_path) is None


def test_a_renamed_checkpoint_is_noticed(tmp_path: Path) -> None:
    fill(tmp_path, 7, 9)
    for suffix in ("safetensors", "json"):
        (tmp_path / f"round-000007.{suffix}").rename(tmp_path / f"round-000010.{suffix}")
    loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.step == 9 and "round-000010.json" in loaded.warnings[0]


def test_if_all_are_damaged_the_error_names_them(tmp_path: Path) -> None:
    fill(tmp_path, 7, 9)
    truncate(tmp_path / "round-000007.safetensors")
    truncate(tmp_path / "round-000009.json")
    with pytest.raises(RunError) as caught:
        load_newest(tmp_path)
    for part in ("round-000007.safetensors", "round-000009.json", "start afresh"):
        assert part in str(caught.value)


def test_a_failed_save_leaves_the_old_checkpoint_and_no_leftovers(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "round-000002.json").mkdir()  # the rename onto it fails
    with pytest.raises(RunError, match=r"could not write the checkpoint .*round-000002\.json"):
        fill(tmp_path, 2)
    (tmp_path / "round-000002.json").rmdir()
    assert not (tmp_path / ".unfinished").exists()
    loaded = load_newest(tmp_path)
    assert loaded is not None and loaded.step == 1


SAVE_FOREVER = """
import itertools, sys
from pathlib import Path
import torch
from bespokefl.experiments.checkpoint import save
for step in itertools.count(1):
    tensors = {"a": torch.full((50_000,), float(step)), "b": torch.full((7,), step)}
    save(Path(sys.argv[1]), step, tensors, {"step": step})
    print(step, flush=True)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    moments = random.Random(5)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        with subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(folder)], stdout=subprocess.PIPE) as saver:
            assert saver.stdout is not None and saver.stdout.readline() == b"1\n"
            time.sleep(moments.uniform(0, 0.2))
            saver.send_signal(signal.SIGKILL)
            done = [1, *(int(line) for line in saver.stdout.read().split())]
        assert saver.returncode == -signal.SIGKILL
        loaded = load_newest(folder)
        assert loaded is not None and loaded.step in (done[-1], done[-1] + 1)
        assert loaded.meta == {"step": loaded.step}
        assert (loaded.tensors["a"] == loaded.step).all() and (loaded.tensors["b"] == loaded.step).all()
        save(folder, loaded.step + 1, loaded.tensors, {})  # and the run goes on
        assert len(names(folder)) == 4
