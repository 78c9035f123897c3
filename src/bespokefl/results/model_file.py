"""A model as a safetensors file."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from bespokefl.results.files import write_atomically


def write_model(model: Mapping[str, Tensor], note: Mapping[str, str], path: Path) -> None:
    """The tensors by name, and a note of what they are in the file's metadata."""
    plain = {name: value.detach().cpu().contiguous() for name, value in model.items()}
    write_atomically(path, _with_sorted_note(save(plain, dict(note))))


def is_whole(path: Path) -> bool:
    """Whether a file is as long as its header says; of the numbers it knows nothing."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def _with_sorted_note(content: bytes) -> bytes:
    """The same file with its metadata in order: the library's own order changes from call to call."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    return len(text).to_bytes(8, "little") + text + content[8 + size :]
