"""Python that reads values to store them, on a GPU: eager's numbers, by CUDA graphs, one step late."""

import pytest
import torch

import stepgraph
from tests.capture.test_replay import Storing, batches, linear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_stores_what_eager_stores_by_cuda_graphs():
    given = [{name: value.cuda() for name, value in batch.items()} for batch in batches()]
    plain, storing, model = Storing(), Storing(), linear().cuda()
    for batch in given:  # the weights stay: lr is 0
        plain(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = stepgraph.capture(model, storing, given[0], optimizer, passes="exact", replay=True)
    after = step.after
    for batch in given:
        step(batch)
        after()
        after = step.after
    after()
    assert storing.metrics == plain.metrics and storing.seen == plain.seen
