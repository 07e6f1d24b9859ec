"""Initial weights drawn through pinned buffers: a seed gives on a GPU what it gives on a CPU."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from stepgraph.models import Llama3
from stepgraph.models.init import CHUNK
from stepgraph.models.llama3 import llama3_debug


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_gives_the_same_model_on_every_device(dtype):
    config = replace(llama3_debug(), vocab_size=5003)  # some parameters of several chunks, one that ends inside one
    here = Llama3(config).to(dtype)
    there = Llama3(config).to(dtype).cuda()
    here.init_weights(7)
    with patch("stepgraph.models.init.STAGED", CHUNK + 1000):  # several copies of each of the buffers
        there.init_weights(7)
    for (name, a), b in zip(here.named_parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b.cpu()), name
