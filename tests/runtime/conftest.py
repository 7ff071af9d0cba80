"""A model that all tests of runs share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models.random_models import make_model, make_tokenizer

VOCABULARY = 300
NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}  # of every Ray head
NODE["_system_config"] = {"worker_niceness": 0}  # else whatever else runs here comes first


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with a tokenizer of as many tokens; token 0 ends a text."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, "llama", seed=1, vocab_size=VOCABULARY, eos_token_id=0, bos_token_id=0)
    make_tokenizer(VOCABULARY).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Of a Ray cluster with one node, whose CPUs are numbers alone.

    Its object store can be full: nothing is moved to a disk.
    """
    from ray.cluster_utils import Cluster

    bounded = {"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 0.0}
    arguments = {"num_cpus": 8, **NODE, "_system_config": bounded}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    yield cluster.address
    cluster.shutdown()
