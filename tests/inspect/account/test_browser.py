"""The page in a real browser: Debian's chromium, without a window. Each test adds a script to the page that does what a
reader does, and reads what it found from the browser's copy of the page."""

import copy
import dataclasses
import json
import re
import shutil
import subprocess

import pytest

from stepgraph.config.presets import PRESETS
from stepgraph.config.train import TrainConfig
from stepgraph.graph.step_graph import Call, Kind
from stepgraph.inspect.account.account import account_of, pipeline_account
from stepgraph.inspect.account.command import preset_account
from stepgraph.inspect.account.page import page_of
from stepgraph.inspect.forecast.forecast import simulated
from tests.inspect.account.accounts import GPU, account, config

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium"),
]

_WATCH = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => problems.push(event.blockedURI));
</script>"""
_DO = """<script>
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
addEventListener("load", async () => {
  const result = {ms: performance.now()};
  try { await (async () => {%s})(); } catch (error) { problems.push(String(error.stack)); }
  result.loaded = performance.getEntriesByType("resource").length;
  result.problems = problems;
  const out = document.createElement("script");
  out.type = "application/json"; out.id = "result";
  out.textContent = JSON.stringify(result).replaceAll("<", "\\\\u003c");
  document.body.append(out);
});
</script>"""


def in_browser(page, script, folder, *, width=1280, hash=""):
    """What ``script``, which runs when the page has loaded, puts into ``result``."""
    file = folder / "page.html"
    whole = page.replace("<head>", "<head>" + _WATCH, 1).replace("</body>", _DO % script + "</body>", 1)
    file.write_text(whole, encoding="utf-8")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},900", "--virtual-time-budget=8000", "--dump-dom", f"file://{file}{hash}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    found = re.search(r'<script type="application/json" id="result">(.*?)</script>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    result = json.loads(found[1])
    assert result["problems"] == [] and result["loaded"] == 0
    return result


@pytest.mark.parametrize("width", [390, 1400, 2560])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_loads_and_fits(width, theme, tmp_path):
    script = """
      document.documentElement.dataset.theme === "THEME" || document.getElementById("theme").click();
      result.theme = document.documentElement.dataset.theme;
      result.parts = [...document.querySelectorAll("section")].map((s) => s.id);
      result.overflow = document.documentElement.scrollWidth - innerWidth;
      const data = (canvas) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const collectives = document.getElementById("collectives"), right = (cell) => cell.getBoundingClientRect().right;
      result.clipped = collectives.querySelector(".wide").scrollWidth - collectives.querySelector(".wide").clientWidth;
      result.why = [...collectives.querySelectorAll(".why")].filter((cell) => right(cell) > innerWidth).length;
      await wait(300);
      result.drawn = [...document.querySelectorAll("canvas")].map((canvas) => new Set(data(canvas)).size);
    """.replace("THEME", theme)
    result = in_browser(page_of(account("fsdp=4", inductor="full")[0]), script, tmp_path, width=width)
    assert result["theme"] == theme
    assert result["parts"] == ["summary", "timeline", "memory", "modules", "passes", "collectives", "runs"]
    assert result["overflow"] <= 0 and result["clipped"] <= 0 and result["why"] == 0
    assert len(result["drawn"]) == 2 and min(result["drawn"]) > 10


def test_a_peak_that_was_asked_for_is_drawn_as_a_curve(tmp_path):
    script = """
      const budget = document.getElementById("budget");
      result.figures = [...budget.querySelectorAll(".figure")].map((f) => f.textContent);
      result.rows = [...budget.querySelectorAll("tbody")].map((body) => body.rows.length);
      result.chosen = [...budget.querySelectorAll("td")].filter((cell) => cell.textContent === "asked for").length;
      await wait(300);
      const canvas = budget.querySelector("canvas");
      result.drawn = new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size;
    """
    made, _ = account("fsdp=2", batch_size=2048, memory="peak=0.3GiB,layers.*.attn=offload")
    result = in_browser(page_of(made), script, tmp_path)
    assert result["figures"][0] == "peak asked for307 MiB" and result["chosen"] == 1 and result["drawn"] > 10
    assert result["rows"][0] == len(made["head"]["over_peak"]["others"]) + 1 and result["rows"][1] >= 1


def test_search_finds_a_node_and_a_click_opens_its_card(tmp_path):
    made, _ = account("fsdp=4", inductor="full")
    graph = made["graphs"][0]
    name = next(n for n in graph["nodes"]["name"] if n.startswith("mm_"))
    script = """
      const search = document.getElementById("search");
      search.focus(); search.value = "NAME layers"; search.dispatchEvent(new Event("input"));
      const hit = document.querySelector("#found li a");
      result.hit = hit.textContent;
      hit.click(); await wait(200);
      const card = document.getElementById("card");
      result.card = card.textContent; result.hidden = card.hidden; result.hash = location.hash;
      card.querySelector("dl a.node").click(); await wait(200);
      result.next = card.querySelector("h2").textContent; result.nextHash = location.hash;
      search.value = "decoder.py"; search.dispatchEvent(new Event("input"));
      result.lines = document.querySelectorAll("#found li").length;
      search.value = "layers.1.mlp"; search.dispatchEvent(new Event("input"));
      document.querySelector("#found li a").click(); await wait(200);
      result.module = location.hash;
    """.replace("NAME", name)
    result = in_browser(page_of(made), script, tmp_path)
    assert result["hit"].startswith(name) and result["hash"] == f"#node/step/{name}" and not result["hidden"]
    at = graph["nodes"]["name"].index(name)
    assert graph["types"][graph["nodes"]["type"][at]] in result["card"]
    assert graph["paths"][graph["nodes"]["path"][at]] in result["card"]
    assert result["nextHash"] == f"#node/step/{result['next']}"
    assert result["lines"] > 5 and result["module"] == "#module/step/layers.1.mlp"


def test_a_card_shows_the_kernels_that_were_generated(tmp_path):
    made = copy.deepcopy(account("fsdp=4", inductor="full")[0])
    graph = made["graphs"][0]
    name = next(n for n in graph["nodes"]["name"] if n.startswith("silu"))
    graph["generated"] = [["triton_one", "@triton.jit\ndef triton_one():\n    a < " + "b" * 200], ["triton_two", "two"]]
    graph["made"] = [[graph["nodes"]["name"].index(name), [0, 1]]]
    script = """
      const kernels = () => [...document.querySelectorAll("#card details")];
      await wait(200);
      result.closed = kernels().every((k) => !k.open);
      kernels()[0].querySelector("summary").click(); await wait(100);
      result.names = kernels().map((k) => k.querySelector("summary").textContent);
      result.open = kernels().map((k) => k.open); result.text = kernels()[0].querySelector("pre").textContent;
      result.wide = document.getElementById("card").scrollWidth <= document.getElementById("card").clientWidth;
    """
    result = in_browser(page_of(made), script, tmp_path, hash=f"#node/step/{name}")
    assert result["closed"] and result["wide"] and result["open"] == [True, False]
    assert result["names"] == ["triton_one", "triton_two"] and result["text"] == graph["generated"][0][1]


def test_the_memory_and_the_modules_add_up(tmp_path):
    made, _ = account("fsdp=4", inductor="full")
    script = """
      const memory = memoryOver(graphs[0]);
      result.peak = memory.total[memory.peak];
      result.live = sum(liveAt(graphs[0], memory.peak).map((row) => row.bytes));
      result.tree = sum(moduleTree(graphs[0]).ns);
      result.why = graphs[0].collectives.filter((c) => c.exposed).map((c) => whyExposed(graphs[0], c));
      const row = [...document.querySelectorAll("#memory tbody tr")].find((r) => r.querySelector(".toggle"));
      const before = document.querySelectorAll("#memory tbody tr").length;
      row.querySelector(".toggle").click();
      result.more = document.querySelectorAll("#memory tbody tr").length - before;
      const details = document.querySelector("details[id='pass/step/remove_noop_views']");
      details.open = true; await wait(200);
      result.sides = [...details.querySelectorAll(".sides h4")].map((h) => h.textContent);
    """
    result = in_browser(page_of(made), script, tmp_path)
    assert result["peak"] == result["live"] == made["head"]["forecast"]["peak_bytes"]
    assert result["tree"] == sum(made["graphs"][0]["nodes"]["ns"])
    assert result["why"] and all(result["why"])
    assert result["more"] > 0 and result["sides"][:2] == ["before", "after"]


def test_regions_have_their_time(tmp_path):
    made = copy.deepcopy(account("fsdp=4", inductor="full")[0])
    graph = made["graphs"][0]
    graph["regions"].append("feed-forward")
    for i, path in enumerate(graph["nodes"]["path"]):
        if "mlp" in graph["paths"][path].split("."):
            graph["nodes"]["region"][i] = len(graph["regions"]) - 1
    script = """
      const { ns, region } = graphs[0].nodes;
      const rows = [...document.querySelectorAll("#regions tbody tr")];
      result.rows = rows.map((row) => [...row.cells].slice(0, 2).map((cell) => cell.textContent));
      result.expected = [1, 0].map((k) => time(sum(ns.filter((_, i) => region[i] === k))));
    """
    result = in_browser(page_of(made), script, tmp_path)
    assert [name for name, _ in result["rows"]] == ["feed-forward", "outside regions"]
    assert all(text.startswith(time) for (_, text), time in zip(result["rows"], result["expected"], strict=True))


def test_a_modules_link_opens_the_module(tmp_path):
    made, _ = account(inductor="full")
    nodes, paths = made["graphs"][0]["nodes"], made["graphs"][0]["paths"]
    script = """
      const links = (where) => [...document.querySelectorAll(`${where} a.module`)];
      const link = (where, text) => links(where).find((a) => a.textContent === text);
      link("#modules", "all 2 blocks").click(); await wait(200);
      const card = document.getElementById("card");
      result.hash = location.hash; result.title = card.querySelector("h2").textContent;
      link("#card", "layers.*.mlp").click(); await wait(200);
      result.text = card.textContent; result.next = location.hash;
      result.ns = graphs[0].nodes.ns.filter((_, i) => inside(graphs[0], i, "layers.*.mlp"));
      result.time = time(sum(result.ns));
      const lane = () => stretches(graphs[0], xOf(graphs[0], 1400), 1400).map((piece) => piece.path);
      result.whole = lane(); state.from = 0.1; state.to = 0.15; result.closer = lane();
    """
    result = in_browser(page_of(made), script, tmp_path, width=1400)
    assert (result["hash"], result["title"]) == ("#module/step/layers.*", "layers.*")
    assert result["next"] == "#module/step/layers.*.mlp" and result["time"] in result["text"]
    own = [i for i, p in enumerate(nodes["path"]) if re.fullmatch(r"layers\.\d\.mlp(\..*)?", paths[p])]
    assert result["ns"] == [nodes["ns"][i] for i in own]
    assert {"layers.0", "layers.1"} < set(result["whole"])
    assert any(path.startswith(("layers.0.", "layers.1.")) for path in result["closer"]), result["closer"]


@pytest.mark.parametrize(("device", "figures"), [
    ("CPU with 2 threads", ["peak memory", "nodes"]),
    ("NVIDIA H200", ["step", "tokens/s", "MFU", "peak memory", "exposed communication", "nodes"]),
])  # fmt: skip
def test_what_was_measured_comes_first(device, figures, tmp_path):
    with simulated(config(inductor="full"), GPU) as (program, groups):
        made = account_of(program, config(inductor="full"), GPU, groups, device=device)
    made["head"]["measured"] = {"step_ms": 500.0, "mfu": None, "tokens_per_s": 128.0, "loss": 2.5, "val_loss": None,
                                "bubble": None, "peak_bytes": None}  # fmt: skip
    made["curves"] = {"loss": [[i, 4 - i / 100] for i in range(1, 101)], "val_loss": [[100, 3.1]],
                      "tokens_per_s": [[i, 100 + i] for i in range(1, 101)]}  # fmt: skip
    script = """
      const summary = document.getElementById("summary");
      result.titles = [...summary.querySelectorAll("h2")].map((h) => h.textContent);
      const names = (row) => [...row.querySelectorAll(".figure > small:first-child")].map((s) => s.textContent);
      result.figures = [...summary.querySelectorAll(".figures")].map(names);
      result.curves = [...summary.querySelectorAll(".curves h3")].map((h) => h.textContent);
      result.first = summary.querySelector(".figure b").textContent;
      result.named = document.body.innerText.match(/Forecast for/g).length;
    """
    result = in_browser(page_of(made), script, tmp_path)
    forecast = "Forecast for H200 SXM" + ("; the run used a CPU" if device.startswith("CPU") else "")
    assert result["titles"] == [f"Measured on {device}", forecast] and result["named"] == 1
    assert result["figures"] == [["step", "tokens/s", "training loss"], figures] and result["first"] == "500 ms"
    assert len(result["curves"]) == 2


def test_a_link_to_a_pass_that_did_nothing_opens_it(tmp_path):
    made, _ = account("fsdp=4", inductor="full")
    idle = next(report["name"] for report in made["passes"] if not report["matched"] or report["skipped"])
    script = """
      const pass = document.getElementById("pass/step/NAME");
      result.open = [pass.open, pass.closest(".idle").open];
    """.replace("NAME", idle)
    assert in_browser(page_of(made), script, tmp_path, hash=f"#pass/step/{idle}")["open"] == [True, True]


def test_the_schedule_leads_to_a_stages_graph(tmp_path):
    made = copy.deepcopy(account("ddp=2", accumulate=3, inductor="full")[0])
    made["graphs"].append(copy.deepcopy(made["graphs"][0]))
    calls = Call(Kind.FORWARD, 0), Call(Kind.UPDATE), Call(Kind.BACKWARD, 0)
    for graph, call in zip(made["graphs"], calls, strict=True):
        graph |= {"name": call.graph, "kind": call.kind, "stage": call.stage}
    made["schedule"] = [["forward.0", 0], ["backward.0", 0], ["update", None]]
    chosen = TrainConfig(mesh="pp=4", accumulate=8)
    made["pipeline"] = pipeline_account(made["graphs"], chosen, GPU)
    # Measured, a step of twice the time, in which the last rank still computes at the end.
    spans = [[3, "backward", 3, 7, 10, 2 * made["pipeline"]["ns"]], [0, "gather", 0, None, 0, 10]]
    made["head"]["measured"] = {"bubble": 0.5}
    made["pipeline"]["measured"] = {"spans": spans, "ns": 2 * made["pipeline"]["ns"]}
    script = """
      await wait(200);
      const [measured, canvas] = document.querySelectorAll("#pipeline canvas"), box = canvas.getBoundingClientRect();
      const click = (x) => {
        const now = canvas.getBoundingClientRect(); // a click scrolls
        canvas.dispatchEvent(new MouseEvent("click", { clientX: now.left + x, clientY: now.top + 14 }));
      };
      click(box.width - 3); result.last = shown().name;
      click(LABEL + 3); result.first = shown().name;
      const shades = (y, canvas) => {
        const x = Math.round((box.width - 20) * devicePixelRatio), at = Math.round(y * devicePixelRatio);
        return new Set(new Uint32Array(canvas.getContext("2d").getImageData(x, at, 12, 12).data.buffer)).size;
      };
      result.bubble = [shades(8, canvas), shades(3 * 28 + 8, canvas)];
      result.measured = [shades(8, measured), shades(3 * 28 + 8, measured)];
      result.rows = document.querySelectorAll("#pipeline tbody tr").length;
    """
    result = in_browser(page_of(made), script, tmp_path)
    assert (result["last"], result["first"], result["rows"]) == ("backward.0", "forward.0", 4)
    assert result["bubble"][0] == 1 < result["bubble"][1]  # at the end the last rank waits, striped
    assert result["measured"][0] > 1 == result["measured"][1]


def test_the_canvas_leads_to_a_node(tmp_path):
    script = """
      await wait(200);
      const canvas = document.querySelector("#timeline canvas"), box = canvas.getBoundingClientRect();
      const at = { clientX: box.left + box.width * 0.6, clientY: box.top + 15 + LANE, pointerId: 1, bubbles: true };
      canvas.setPointerCapture = () => {};
      for (const kind of ["pointerdown", "pointerup"]) canvas.dispatchEvent(new PointerEvent(kind, at));
      await wait(200);
      result.hash = location.hash; result.hidden = document.getElementById("card").hidden;
      const now = canvas.getBoundingClientRect(); // the card makes it narrower
      Object.assign(at, { clientX: now.left + now.width * 0.3, clientY: now.top + 15 });
      for (const kind of ["pointerdown", "pointerup"]) canvas.dispatchEvent(new PointerEvent(kind, at));
      await wait(200); result.module = location.hash;
    """
    result = in_browser(page_of(account(inductor="full")[0]), script, tmp_path)
    assert result["hash"].startswith("#node/step/") and not result["hidden"]
    assert result["module"].startswith("#module/step/")


def test_a_link_opens_the_node_of_the_other_graph(tmp_path):
    made, _ = account("ddp=2", accumulate=3, inductor="full")
    name = made["graphs"][1]["nodes"]["name"][-2]
    script = """
      result.card = document.querySelector("#card h2").textContent;
      result.pressed = [...document.querySelectorAll("[data-graph]")].map((b) => b.getAttribute("aria-pressed"));
    """
    result = in_browser(page_of(made), script, tmp_path, hash=f"#node/update/{name}")
    assert result["card"] == name and result["pressed"] == ["false", "true"]


def test_llama3_8b_opens_within_two_seconds(tmp_path):
    chosen = dataclasses.replace(PRESETS["llama3-8b"](), mesh="fsdp=2", memory="none")
    page = page_of(preset_account(chosen, GPU))
    assert len(page.encode()) < 4e6 and page.count("layers.31") > 0
    result = in_browser(page, "result.nodes = graphs[0].size;", tmp_path)
    assert result["nodes"] > 7_200 and result["ms"] < 2_000
