"""The page as a file: whole, well-formed, small, and without anything from elsewhere."""

import copy
import json
import re
from html.parser import HTMLParser

import pytest

from stepgraph import cli
from stepgraph.inspect.account.page import page_of, read_page, write_page
from stepgraph.inspect.forecast.tables import new_console, peak_table
from tests.inspect.account.accounts import account

VOID = {"meta", "link", "input", "br"}


class Tags(HTMLParser):
    """Opens and closes each tag in turn; collects what could load something."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for key, value in attrs if key in ("src", "href", "action", "srcset", "data")]
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def made():
    return account("fsdp=4", inductor="full")[0]


def test_it_is_well_formed_and_loads_nothing(made):
    page = page_of(made)
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == [] and len(tags.ids) == len(set(tags.ids))
    assert all(link.startswith(("#", "data:")) for link in tags.links)
    code = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    for word in ("http:", "https:", "//cdn", "@import", "url(", "fetch(", "XMLHttpRequest", "import(", "WebSocket"):
        assert word not in code, word


def test_it_gives_its_account_back(made, tmp_path):
    file = tmp_path / "page.html"
    write_page(file, made)
    assert read_page(file) == json.loads(json.dumps(made))
    assert [child.name for child in tmp_path.iterdir()] == ["page.html"]


def test_text_of_a_model_cannot_end_the_data(made, tmp_path):
    """Source lines and names are anybody's text."""
    hostile = copy.deepcopy(made)
    hostile["graphs"][0]["sources"][0] = ["x.py:1", 'print("</script><script>alert(1)</script>")']
    hostile["graphs"][0]["sources"][1] = ["x.py:2", "a = '<!--<script>'"]
    hostile["head"]["title"] = "<!--<script>"
    page = page_of(hostile)
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and "<!--" not in page and page.count("</script>") == page_of(made).count("</script>")
    write_page(tmp_path / "page.html", hostile)
    assert read_page(tmp_path / "page.html") == json.loads(json.dumps(hostile))


def test_it_is_small(made):
    """7,200 nodes in 4 MB are 550 bytes a node; what draws them is the same for all."""
    nodes = len(made["graphs"][0]["nodes"]["name"])
    data = len(json.dumps(made, separators=(",", ":")))
    assert len(page_of(made)) - data < 100_000
    assert data < 400 * nodes


def test_a_peak_that_was_asked_for_shows_what_others_would_cost():
    memory = "peak=0.3GiB,layers.*.attn=offload"
    made = json.loads(json.dumps(account("fsdp=2", batch_size=2048, memory=memory)[0]))
    found, graph = made["head"]["over_peak"], made["graphs"][0]
    assert found["asked"] == round(0.3 * 2**30) >= found["chosen"][0] and found["chosen"][1] > 0
    peaks, changes = zip(*found["others"], strict=True)
    assert peaks[0] == found["curve"][0][0] > found["asked"] > peaks[-1] == found["curve"][-1][0]
    assert changes[0] == -found["chosen"][1] and changes[-1] > 0 and list(changes) == sorted(changes)
    away = [c for c in graph["copies"] if not c[1]]
    assert away and 2 * len(away) == len(graph["copies"])
    assert all("offload_begin" in graph["calls_text"][graph["nodes"]["call"][node]] for node, *_ in away)
    shown = new_console()
    with shown.capture() as capture:
        shown.print(peak_table(found))
    lines = capture.get().splitlines()
    assert sum("asked for" in line for line in lines) == 2 and any(re.search(r"0 ms +-[\d.]+ ms", x) for x in lines)


def test_another_version_is_refused(made, tmp_path):
    file = tmp_path / "page.html"
    write_page(file, made | {"format": 0})
    with pytest.raises(ValueError, match="another version of stepgraph"):
        read_page(file)


def test_the_command(tmp_path, capsys):
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    words = "inspect llama3-debug --mesh fsdp=2 --seq-len 32 --model.n-layers 2 --html"
    with pytest.raises(SystemExit) as stop:
        cli.main([*words.split(), str(first)])
    assert stop.value.code == 0 and "page" in capsys.readouterr().out
    assert read_page(first)["head"]["mesh"] == "fsdp=2" and read_page(first)["head"]["model"]["n_layers"] == 2
    folder = tmp_path / "run"
    folder.mkdir()
    first.rename(folder / "page.html")
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", str(folder), "--html", str(second)])
    assert stop.value.code == 0 and read_page(second) == read_page(folder / "page.html")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "inspect takes a run folder or a preset first: write stepgraph inspect llama3-8b --mesh fsdp=4"),
        (
            "llama3-debug --mesh pp=2 --accumulate 2 --stage 2",
            "stage=2 of a pipeline of 2 stages: use 0 to 1",
        ),
        ("llama3-debug --mesh fsdp=2 --stage 1", "stage=1 needs a pipeline: add pp=2 to --mesh"),
        (
            "llama3-debug --mesh fsdp=2 --ranks --text x.txt",
            "--ranks compares graphs and writes no page: leave --text out",
        ),
        ("llama3-8c", "unknown preset or run 'llama3-8c': did you mean 'llama3-8b'?"),
        ("llama3-8b --mesh fdsp=2", "unknown mesh axis 'fdsp': did you mean 'fsdp'?"),
        ("llama3-8b --gpu h300", "--gpu: 'h300' is not one of h100, h200, b200"),
        ("llama3-8b --html no/x.html", "html=no/x.html: the folder no does not exist; make it first"),
        ("{tmp} --mesh fsdp=2", "--mesh changes a preset, and {tmp} is a run: leave it out"),
        ("{tmp}", "{tmp} has no page.html: use the folder of a run that has finished its first steps"),
        ("{tmp} --model.n-layers 2", "--model.n-layers changes a preset, and {tmp} is a run: leave it out"),
        (
            "{tmp}/none.html",
            "{tmp}/none.html does not exist: use a page of stepgraph inspect, a run folder or a preset",
        ),
        (
            "{tmp}/notes.txt",
            "{tmp}/notes.txt is not a page of stepgraph inspect: use a run folder, a preset or such a page",
        ),
    ],
)
def test_errors_of_use_are_one_line(words, message, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", *words.format(tmp=tmp_path).split()])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {message.format(tmp=tmp_path)}\n"
