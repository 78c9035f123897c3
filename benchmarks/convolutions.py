"""Three ways to do the convolutions of many clients on a GPU: what `bespokefl.nn.convolution` chooses among, measured.

    python benchmarks/convolutions.py

For every convolution of a ResNet-18 on images of 32 x 32: milliseconds of the result, of the input's gradient and of
the weight's, as one grouped convolution, client by client, and as a batched product of patches laid out as rows (which
has no input's gradient where the stride is not 1). The layouts are those of the engine, and what must be copied for a
way to take them is part of its time. Each is captured as a CUDA graph, so that launches do not count.
"""

from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bespokefl.experiments.bench import BATCH
from bespokefl.nn import convolution
from bespokefl.nn.convolution import Geometry, stacked_by_rows

LAYERS = {  # of a ResNet-18: input channels, output channels, side of the input, kernel, stride
    "stem": (3, 64, 32, 3, 1),
    "stage 1": (64, 64, 32, 3, 1),
    "stage 2, first": (64, 128, 32, 3, 2),
    "stage 2, shortcut": (64, 128, 32, 1, 2),
    "stage 2": (128, 128, 16, 3, 1),
    "stage 3, first": (128, 256, 16, 3, 2),
    "stage 3, shortcut": (128, 256, 16, 1, 2),
    "stage 3": (256, 256, 8, 3, 1),
    "stage 4, first": (256, 512, 8, 3, 2),
    "stage 4, shortcut": (256, 512, 8, 1, 2),
    "stage 4": (512, 512, 4, 3, 1),
}
RESULTS = ("result", "input's gradient", "weight's gradient")
CALLS, REPEATS = 3, 5
Way = Callable[[], Tensor]


def main(
    clients: Annotated[int, typer.Option(help="Clients, each with weights of its own.")] = 10,
    device: Annotated[str, typer.Option(help="cuda; on a CPU the ways are only compared, not timed.")] = "cuda",
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU here; --device cpu compares the ways without timing them")
    torch.set_float32_matmul_precision("high")  # TF32, as engines have it
    for dtype in (torch.float32, torch.bfloat16):
        shown = Table(title=f"{clients} clients x {BATCH} images, {str(dtype)[6:]}, ms: grouped / one by one / rows")
        for heading in ("convolution", *RESULTS):
            shown.add_column(heading, justify="left" if heading == "convolution" else "right")
        for name, layer in LAYERS.items():
            shown.add_row(name, *map(_times, _work(layer, clients, dtype, device)))
        Console().print(shown)


def _work(layer: tuple[int, ...], clients: int, dtype: torch.dtype, device: str) -> list[tuple[Way, ...]]:
    """The ways to each of the results."""
    channels, out, side, kernel, stride = layer
    geometry = Geometry((kernel, kernel), (stride, stride), (kernel // 2, kernel // 2))
    size = (side, side)

    def images(channels: int, side: int) -> Tensor:
        """As engines hold them: the clients' channels side by side, last in memory."""
        lying = torch.randn(BATCH, side, side, clients, channels, device=device, dtype=dtype)
        return lying.permute(3, 0, 4, 1, 2)

    x, grad = images(channels, side), images(out, geometry.output(size)[0])
    w = torch.randn(clients, out, channels, kernel, kernel, device=device, dtype=dtype)
    turned = (lambda: _input_grad_by_rows(grad, w, geometry),) if stride == 1 else ()
    return [
        (
            lambda: convolution.stacked_grouped(x, w, geometry),
            lambda: _one_by_one(x, w, geometry),
            lambda: stacked_by_rows(x, w, geometry),
        ),
        (
            lambda: convolution.stacked_input_grad_grouped(grad, w, size, geometry),
            lambda: _input_grad_one_by_one(grad, w, geometry, size),
            *turned,
        ),
        (
            lambda: convolution.stacked_weight_grad_grouped(x, grad, geometry),
            lambda: _weight_grad_one_by_one(x, grad, geometry),
            lambda: convolution.stacked_weight_grad_by_rows(x, grad, geometry),
        ),
    ]


def _times(ways: tuple[Way, ...]) -> str:
    expected = ways[0]().float()
    for way in ways[1:]:
        off = (way().float() - expected).abs().max() / expected.abs().max()
        if off > 0.02:
            raise RuntimeError(f"two ways differ by {float(off):.2g} of the largest value")
    return " / ".join(f"{_milliseconds(way):.3f}" for way in ways) if expected.is_cuda else "equal"


def _milliseconds(work: Way) -> float:
    """The least of some repeats."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(REPEATS):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / CALLS)
    return min(found)


# client by client -------------------------------------------------------------------------------------
def _one_by_one(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    return _side_by_side([convolution._plain(_last(a), _last(b), geometry) for a, b in zip(x, w, strict=True)])


def _input_grad_one_by_one(grad: Tensor, w: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    pairs = zip(grad, w, strict=True)
    return _side_by_side([convolution._plain_input_grad(_last(a), _last(b), size, geometry) for a, b in pairs])


def _weight_grad_one_by_one(x: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
    pairs = zip(x, grad, strict=True)
    return torch.stack([convolution._plain_weight_grad(_last(a), _last(b), geometry) for a, b in pairs])


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.permute(0, 2, 3, 1) for part in parts], 3).permute(3, 0, 4, 1, 2)


def _input_grad_by_rows(grad: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """Of stride 1 it is a convolution with the kernels turned round."""
    padding = tuple(k - 1 - p for k, p in zip(geometry.kernel, geometry.padding, strict=True))
    return stacked_by_rows(grad, w.flip(-1, -2).transpose(1, 2), geometry._replace(padding=padding))


if __name__ == "__main__":
    typer.run(main)
