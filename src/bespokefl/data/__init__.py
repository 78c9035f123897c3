"""Data: sources of pooled datasets, partitions into clients, and the clients' data as the engines read them."""

from bespokefl.data.dataset import Dataset
from bespokefl.data.federated import FederatedData
from bespokefl.data.loading import federate, load
from bespokefl.data.normalisation import NORMALISATIONS
from bespokefl.data.partitions import PARTITIONS, Partition
from bespokefl.data.sources import SOURCES, Source, load_dataset
from bespokefl.data.synthdigits import synth_digits

__all__ = [
    "NORMALISATIONS",
    "PARTITIONS",
    "SOURCES",
    "Dataset",
    "FederatedData",
    "Partition",
    "Source",
    "federate",
    "load",
    "load_dataset",
    "synth_digits",
]
