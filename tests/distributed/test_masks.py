"""An attention mask that hides nothing on one rank alone: all ranks take the same form of an exact step."""

import warnings

import pytest
import torch
import torch.distributed as dist

import stepgraph
from stepgraph.parallel import parallelize
from tests.distributed.ranks import make_mesh, on_ranks


def check():
    from tests.distributed.hf_ranks import build

    mesh, rank = make_mesh("fsdp=2"), dist.get_rank()
    model = parallelize(build("qwen3"), mesh)
    ids = torch.randint(67, (2, 12), generator=torch.Generator().manual_seed(rank))
    ones, padded = torch.ones_like(ids), (torch.arange(12) < torch.tensor([[12], [7]])).long()

    def batch(mask):
        return {"input_ids": ids, "labels": ids, "attention_mask": mask}

    step = stepgraph.capture(model, lambda m, b: m(**b).loss, batch(ones), passes="exact")
    dropped = step.graph.text()
    for masks, kept in (((ones, ones), 0), ((ones, padded), 1), ((padded, ones), 1), ((padded, padded), 1)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step(batch(masks[rank]))
        alone = masks[rank] is ones and masks[1 - rank] is padded
        assert [str(w.message).partition(" hides")[0] for w in said] == ["batch['attention_mask']"] * alone
        texts = [None, None]
        dist.all_gather_object(texts, step.graph.text())
        assert texts[0] == texts[1] and (texts[0] != dropped) == kept
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = step.verify(batch(masks[rank]))
        assert report.close and (report.bitwise or masks[0] is not masks[1]), str(report)
    assert len(step._forms) == 2


def test_ranks_agree_on_a_mask_that_hides_nothing():
    pytest.importorskip("transformers")
    on_ranks(2, check)
