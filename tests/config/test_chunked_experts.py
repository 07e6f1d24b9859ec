"""``--expert-chunks auto``: what it chooses for a configuration, says, and does to the model."""

import dataclasses

import torch

from stepgraph.config import build
from stepgraph.config.presets import PRESETS
from stepgraph.costs.expert_chunks import Layer, choose
from stepgraph.parallel.experts import ChunkedExchange, expert_layers
from stepgraph.train.start import mesh_line
from tests.distributed.ranks import in_fake_world, make_mesh

LAYER = Layer(16384, 6, 2048, 1408, 32, 2, 2816, 2.0, 2, False, False)


def config_of(preset, **changes):
    given = {"mesh": "fsdp=2,ep=2", "batch_size": 4, "seq_len": 4096, "precision": "bf16", "expert_chunks": "auto"}
    return dataclasses.replace(PRESETS[preset](), **given | changes)


def test_of_a_configuration():
    config = config_of("deepseek-v3-16b")
    chosen = build.chosen_chunks(config)
    assert chosen == choose(LAYER) and mesh_line(config).endswith(f"\n{chosen.line()}")
    symmetric = build.chosen_chunks(dataclasses.replace(config, expert_exchange="symmetric"))
    assert symmetric == choose(LAYER._replace(room=1.0))
    assert build.chosen_chunks(dataclasses.replace(config, expert_chunks=2)) is None


def _built():
    config = config_of("deepseek-v3-debug", batch_size=2**14)
    model = build.empty_model(config, torch.device("cpu"), make_mesh(config.mesh))
    exchanges = {type(layer.owner.exchange): layer.owner.exchange.chunks for layer in expert_layers(model)}
    assert exchanges == {ChunkedExchange: build.chosen_chunks(config).chunks}, exchanges


def test_the_model_takes_its_tokens_so():
    in_fake_world(0, 2, _built)
