"""Networks for 8 x 8 images, as a user's own factories."""

from collections.abc import Sequence

from torch import Tensor, nn


def convolutional(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    hidden = nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, classes)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *hidden)


def normalised(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """BatchNorm of maps and of features, and dropout."""
    hidden = nn.Linear(144, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, classes)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), *hidden)


def one_logit(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """For two classes: the logit of class 1."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 1))


def spare_output(input_shape: tuple[int, ...], classes: int, hidden: Sequence[int] = ()) -> nn.Module:
    """One output more than there are classes; no layer is hidden."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes + 1))


class Words(nn.Module):
    """The mean of a text's embeddings, and a linear layer."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(words, 4), nn.Linear(4, classes)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids).mean(1))
        return out


def words(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Words(20, classes)
