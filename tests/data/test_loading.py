import json

import numpy as np
import pytest
import torch

from bespokefl.data import NORMALISATIONS, PARTITIONS, SOURCES, load
from bespokefl.data.options import option_names
from bespokefl.errors import InputError


def test_the_default_is_digits_over_twenty_skewed_clients():
    data = load()
    assert data.clients == 20 and data.input_shape == (1, 8, 8) and len(data.classes) == 10
    assert data.x.dtype == torch.float32 and data.x.min() == 0 and data.x.max() == 1
    assert data.sizes("train").sum() + data.sizes("test").sum() == 1797
    largest = data.counts("train").max(axis=1) / data.sizes("train")
    assert largest.mean() > 0.3  # skewed: an even client's largest class would be about a tenth
    record = json.loads(json.dumps(data.record))
    assert record["source"]["name"] == "digits"
    assert record["partition"] | {"alpha": 0.3, "min_samples": 22, "clients": 20} == record["partition"]
    assert record["split"]["test"] == 0.25 and record["normalize"] == "unit"


def test_options_reach_source_and_partition(tmp_path):
    y = np.arange(60) % 3
    np.savez(tmp_path / "own.npz", x=np.random.default_rng(0).normal(5, 3, (60, 4)), y=y)
    data = load("npz", 3, "labels", root=str(tmp_path / "own.npz"), labels_per_client=1, normalize="channel", val=0.2)
    assert (np.count_nonzero(data.counts("train"), axis=1) == 1).all()
    train = data.x[np.concatenate(data.splits["train"])]
    torch.testing.assert_close(train.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(train.std(0, unbiased=False), torch.ones(4))
    assert data.sizes("val").tolist() == [4, 4, 4]


def test_max_samples_thins_the_pool_before_the_partition():
    data = load(clients=5, partition="iid", max_samples=200)
    assert data.sizes("train").sum() + data.sizes("test").sum() == len(data.x) == 200
    assert data.record["source"]["max_samples"] == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "digit"}, r"data\.source = 'digit' is not known\. Did you mean digits"),
        ({"partition": "label"}, r"data\.partition = 'label'.*Did you mean labels"),
        ({"normalize": "units"}, r"data\.normalize = 'units'.*Did you mean unit"),
        ({"alpa": 1}, r"data\.alpa = 1: .*'digits' or partition 'dirichlet'\. Did you mean alpha\?"),
        ({"labels_per_client": 2}, r"data\.labels_per_client = 2: .*Allowed: .*alpha, min_samples, top_up"),
        ({"root": "no/such/folder"}, r"data\.root = 'no/such/folder' does not exist"),
        ({"clients": 899}, r"data\.clients = 899.*allowed: 1 to 898"),
        ({"test": 1.5}, r"data\.test = 1\.5"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        load(**arguments)


def test_option_names_of_sources_and_partitions_never_collide():
    of_partitions = {key for partition in PARTITIONS.values() for key in option_names(partition.options)}
    of_sources = {key for source in SOURCES.values() for key in option_names(source.options)}
    own = {"source", "clients", "partition", "root", "seed", "normalize", "test", "val", "max_samples"}
    assert not of_partitions & of_sources and not (of_partitions | of_sources) & own


def test_registries_describe_their_entries():
    for registry in (SOURCES, PARTITIONS):
        for name, entry in registry.items():
            assert entry.name == name and entry.description
    assert all(NORMALISATIONS.values())
