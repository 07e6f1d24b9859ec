"""``stepgraph inspect --ranks``: equal graphs are said to be equal, and a planted difference is found and explained."""

import dataclasses

import pytest

from stepgraph import cli
from stepgraph.inspect.account.command import RankGraph, graphs_of_ranks, places, report
from stepgraph.parallel import MeshSpec
from tests.distributed.ranks import preload
from tests.inspect.account.accounts import config

SPEC = MeshSpec.parse("hsdp=2x2,tp=2")
TEXT = "a = one()  # forward\nb = two(a)  # forward, layers.0\nreturn b\n"


def planted(text_of):
    return [RankGraph(digest=text, text=text) for text in map(text_of, range(SPEC.size))]


def test_places_are_those_of_the_mesh():
    """As a row-major grid counts them."""
    assert [tuple(place.values()) for place in places(SPEC)] == [
        (r, s, t) for r in range(2) for s in range(2) for t in range(2)
    ]
    assert list(places(SPEC)[0]) == ["dp_replicate", "dp_shard", "tp"]


def test_equal_graphs_are_one():
    assert report(SPEC, planted(lambda rank: TEXT)) == [
        "mesh hsdp=2x2,tp=2: all 8 ranks have one graph of 3 lines, which one of them compiles"
    ]


@pytest.mark.parametrize(
    ("axes", "of"),
    [
        ("tp", lambda rank: rank % 2),
        ("dp_shard", lambda rank: rank // 2 % 2),
        ("dp_replicate", lambda rank: rank // 4),
        ("dp_shard and tp", lambda rank: rank % 4),
        ("dp_replicate and tp", lambda rank: (rank // 4) ^ (rank % 2)),
    ],
)
def test_a_difference_is_laid_to_the_axes_that_it_follows(axes, of):
    said = report(SPEC, planted(lambda rank: TEXT.replace("two", f"two{of(rank)}")))
    count = len({of(rank) for rank in range(8)})
    assert f"8 ranks have {count} graphs" in said[0]
    assert said[count + 1].startswith(f"why: the graph depends on the coordinate along {axes}:")
    assert said[count + 3 : count + 5] == [
        "  - b = two0(a)  # forward, layers.0",
        "  + b = two1(a)  # forward, layers.0",
    ]


def test_what_follows_from_no_axis_and_what_the_text_leaves_out():
    odd = report(SPEC, planted(lambda rank: TEXT if rank != 3 else TEXT + "c = three()\n"))
    assert "why: the graph depends on the rank" in odd[3] and odd[-1] == "  +c = three()"
    graphs = planted(lambda rank: TEXT)
    graphs[5] = dataclasses.replace(graphs[5], digest="another")
    assert "the texts are equal: a constant differs" in report(SPEC, graphs)[-1]


@pytest.mark.parametrize("mesh", ["fsdp=2", pytest.param("fsdp=2,tp=2", marks=pytest.mark.long)])
def test_the_ranks_of_a_mesh_have_one_graph(mesh, monkeypatch):
    """Also where ranks' parts differ in size: 131 rows of each tp rank are padded."""
    preload()
    monkeypatch.setattr("multiprocessing.set_forkserver_preload", lambda names: None)  # other tests' ranks need theirs
    chosen = config(mesh)
    rows = 131 * chosen.mesh_spec.tp
    chosen = dataclasses.replace(chosen, model=dataclasses.replace(chosen.model, vocab_size=rows, n_layers=1))
    graphs = graphs_of_ranks(chosen, "h200")
    assert len(graphs) == chosen.mesh_spec.size and "all_gather" in graphs[0].text
    assert f"all {len(graphs)} ranks have one graph" in "\n".join(report(chosen.mesh_spec, graphs))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("llama3-debug --ranks", "--ranks compares the graphs of several ranks, and there is one: add --mesh fsdp=2"),
        (
            "llama3-debug --mesh pp=2 --accumulate 2 --ranks",
            "--ranks: mesh pp=2 is a pipeline, whose stages have graphs of their own: leave pp out",
        ),
        (
            "llama3-debug --mesh fsdp=2 --ranks --html x.html",
            "--ranks compares graphs and writes no page: leave --html out",
        ),
        ("{tmp} --ranks", "{tmp} is not a run folder (it has no config.json): use the folder of a run"),
        ("{tmp} --ranks --batch-size 2", "--batch-size changes a preset, and {tmp} is a run: leave it out"),
    ],
)
def test_errors_of_use_are_one_line(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", *words.format(tmp=tmp_path).split()])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {message.format(tmp=tmp_path)}\n"
