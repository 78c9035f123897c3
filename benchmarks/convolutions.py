"""Three ways to do the convolutions of many clients on a GPU: what `bespokefl.convolution` chooses among, measured.

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

from bespokefl import convolution
from bespokefl.bench import BATCH
from bespokefl.convolution import Geometry, channels_as_clients, clients_as_channels

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
Way = Callable[[Tensor, Tensor, Geometry, tuple[int, int]], Tensor]  # of the two tensors that it takes


def main(
    clients: Annotated[int, typer.Option(help="Clients, each with weights of its own.")] = 10,
    device: Annotated[str, typer.Option(help="cuda; on a CPU the ways are only compared, not timed.")] = "cuda",
) -> None:
    torch.set_float32_matmul_precision("high")  # TF32, as engines have it
    for dtype in (torch.float32, torch.bfloat16):
        shown = Table(title=f"{clients} clients x {BATCH} images, {str(dtype)[6:]}, ms: grouped / one by one / rows")
        for heading in ("convolution", *RESULTS):
            shown.add_column(heading, justify="left" if heading == "convolution" else "right")
        for name, layer in LAYERS.items():
            shown.add_row(name, *(_times(tensors, ways) for tensors, ways in _work(layer, clients, dtype, device)))
        Console().print(shown)


def _work(
    layer: tuple[int, ...], clients: int, dtype: torch.dtype, device: str
) -> list[tuple[tuple[Tensor, Tensor, Geometry, tuple[int, int]], tuple[Way, ...]]]:
    """What each of the results is made from, and how."""
    channels, out, side, kernel, stride = layer
    geometry = Geometry((kernel, kernel), (stride, stride), (kernel // 2, kernel // 2))
    smaller = geometry.output((side, side))[0]

    def images(channels: int, side: int) -> Tensor:
        """As engines hold them: the clients' channels side by side, last in memory."""
        lying = torch.randn(BATCH, side, side, clients, channels, device=device, dtype=dtype)
        return lying.permute(3, 0, 4, 1, 2)

    x, grad = images(channels, side), images(out, smaller)
    w = torch.randn(clients, out, channels, kernel, kernel, device=device, dtype=dtype)
    by_rows = (_input_grad_by_rows,) if stride == 1 else ()
    return [
        ((x, w, geometry, (side, side)), (_grouped, _one_by_one, _by_rows)),
        ((grad, w, geometry, (side, side)), (_input_grad_grouped, _input_grad_one_by_one, *by_rows)),
        ((x, grad, geometry, (side, side)), (_weight_grad_grouped, _weight_grad_one_by_one, _weight_grad_by_rows)),
    ]


def _times(args: tuple[Tensor, Tensor, Geometry, tuple[int, int]], ways: tuple[Way, ...]) -> str:
    expected = ways[0](*args)
    for way in ways:
        off = (way(*args).float() - expected.float()).abs().max() / expected.float().abs().max()
        if off > 0.02:
            raise RuntimeError(f"{way.__name__} is off by {float(off):.2g} of the largest value")
    if not expected.is_cuda:
        return "equal"
    return " / ".join(f"{_milliseconds(lambda way=way: way(*args)):.3f}" for way in ways)


def _milliseconds(work: Callable[[], Tensor]) -> float:
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


# one grouped convolution ------------------------------------------------------------------------------
def _grouped(x: Tensor, w: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    n = len(w)
    found = convolution._plain(clients_as_channels(x), convolution._grouped_weight(w), geometry, n)
    return channels_as_clients(found, n)


def _input_grad_grouped(grad: Tensor, w: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    n = len(w)
    weight = convolution._grouped_weight(w)
    return channels_as_clients(convolution._plain_input_grad(clients_as_channels(grad), weight, size, geometry, n), n)


def _weight_grad_grouped(x: Tensor, grad: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    n = len(x)
    found = convolution._plain_weight_grad(clients_as_channels(x), clients_as_channels(grad), geometry, n)
    return torch.unflatten(found, 0, (n, -1))


# client by client -------------------------------------------------------------------------------------
def _one_by_one(x: Tensor, w: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    return _side_by_side([convolution._plain(_last(a), _last(b), geometry) for a, b in zip(x, w, strict=True)])


def _input_grad_one_by_one(grad: Tensor, w: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    pairs = zip(grad, w, strict=True)
    return _side_by_side([convolution._plain_input_grad(_last(a), _last(b), size, geometry) for a, b in pairs])


def _weight_grad_one_by_one(x: Tensor, grad: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    pairs = zip(x, grad, strict=True)
    return torch.stack([convolution._plain_weight_grad(_last(a), _last(b), geometry) for a, b in pairs])


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.permute(0, 2, 3, 1) for part in parts], 3).permute(3, 0, 4, 1, 2)


# patches as rows --------------------------------------------------------------------------------------
def _by_rows(x: Tensor, w: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    product = convolution._patches(x, geometry) @ w.permute(0, 3, 4, 2, 1).flatten(1, 3)
    return torch.unflatten(product, 1, (x.shape[1], *geometry.output(x.shape[-2:]))).movedim(-1, 2)


def _input_grad_by_rows(grad: Tensor, w: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    """Of stride 1 it is a convolution with the kernels turned round."""
    padding = tuple(k - 1 - p for k, p in zip(geometry.kernel, geometry.padding, strict=True))
    turned = w.flip(-1, -2).transpose(1, 2)
    return _by_rows(grad, turned, geometry._replace(padding=padding), size)


def _weight_grad_by_rows(x: Tensor, grad: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    product = convolution._patches(x, geometry).mT @ grad.movedim(2, -1).flatten(1, 3)
    return torch.unflatten(product, 1, (*geometry.kernel, x.shape[2])).permute(0, 4, 3, 1, 2)


if __name__ == "__main__":
    typer.run(main)
