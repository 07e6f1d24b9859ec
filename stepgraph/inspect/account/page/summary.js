// The head: figures of the step, and short answers to what a newcomer asks.

function headPart() {
  const head = account.head, options = head.options;
  const what = [head.mesh ? `${head.ranks.toLocaleString("en")} ranks (${head.mesh})` : "one device", options.precision,
    `${options.accumulate > 1 ? `${options.accumulate} x ` : ""}${options.batch_size} x ${options.seq_len} tokens a rank`,
    `memory ${options.memory}`, head.profile_note].filter(Boolean);
  const made = Object.entries(head.versions).filter(([, v]) => v).map(([name, v]) => `${name} ${v}`).join(", ");
  return el("section", { id: "summary" },
    el("h1", {}, head.title),
    el("p", {}, what.join(" · ")),
    el("p.muted", {}, head.device ? `It ran on ${head.device}. ` : "Nothing ran: this is a forecast. ",
      `Times are forecast for ${head.gpu} GPUs unless they are called measured. ${made}.`,
      account.pipeline ? ` Of the pipeline, its graphs and memory are those of rank ${account.pipeline.rank}.` : ""),
    el("div.figures", {}, figures(head)),
    graphChoice(),
    el("div.answers", { id: "answers" }));
}

function figures(head) {
  const { forecast, measured } = head, m = measured || {};
  const rows = [
    ["step", time(forecast.step_ms * 1e6), m.step_ms && time(m.step_ms * 1e6)],
    ["MFU", percent(forecast.mfu), m.mfu && percent(m.mfu)],
    ["tokens/s", big(forecast.tokens_per_s, ""), m.tokens_per_s && big(m.tokens_per_s, "")],
    ["peak memory", bytes(forecast.peak_bytes), m.peak_bytes && bytes(m.peak_bytes), account.head.ranks > 1 && !m.peak_bytes ? "of one rank, forecast" : null],
    ["exposed communication", forecast.exposed_ms ? time(forecast.exposed_ms * 1e6) : "none", null, forecast.exposed_ms ? `${percent(forecast.exposed_ms / forecast.step_ms)} of the step, forecast` : "forecast"],
    ...(account.pipeline ? [["bubble", percent(account.pipeline.bubble), m.bubble !== undefined && m.bubble !== null && percent(m.bubble)]] : []),
    ["nodes", sum(graphs.map((g) => g.size)).toLocaleString("en"), null, graphs.length > 1 ? `in ${graphs.length} graphs` : "in one graph"],
  ];
  return rows.map(([name, planned, real, note]) => el("div.figure", {}, el("small", {}, name),
    el("b", {}, real || planned), el("small", {}, note || (real ? `measured; forecast ${planned}` : "forecast"))));
}

/** Which graph the parts below are about, where a step has several; the step's calls in order. */
function graphChoice() {
  if (graphs.length === 1) return null;
  const box = el("div.tools", { role: "group", "aria-label": "Graph" }, "A step calls: ");
  const buttons = graphs.map((graph, k) => el("button", { type: "button", "data-graph": graph.name, onclick: () => choose(k) },
    `${graph.name} × ${graph.calls} (${time(graph.step_ns)} each)`));
  box.append(...buttons);
  follow("graph", () => buttons.forEach((b, k) => b.setAttribute("aria-pressed", k === state.graph)));
  if (account.pipeline) return box; // its own part draws the calls
  const whole = sum(account.schedule.map(([name]) => graphs.find((g) => g.name === name).step_ns)) || 1;
  const bar = el("div.bar", { title: "the calls of one step, in order" }, account.schedule.map(([name]) => {
    const k = graphs.findIndex((g) => g.name === name);
    return el("i", { style: `--c: var(--${["forward", "backward", "update", "attention"][k % 4]}); width: ${100 * graphs[k].step_ns / whole}%`, title: name });
  }));
  return el("div", {}, box, bar);
}
function choose(k) { if (k !== state.graph) { state.graph = k; state.from = 0; state.to = 1; changed("graph"); } }

function drawAnswers() {
  const graph = shown();
  document.getElementById("answers").replaceChildren(whereTime(graph), whatMemory(graph), whatPasses(), whyExposedAll(graph));
}
const answer = (title, target, ...children) => el("div.answer", {}, el("h3", {}, el("a", { href: target }, title)), ...children);
function shares(parts, whole) {
  const real = parts.filter(([, , value]) => value > 0);
  return [el("div.bar", {}, real.map(([name, tone, value]) => el("i", { style: `--c: var(--${tone}); width: ${100 * value / whole}%`, title: `${name} ${percent(value / whole)}` }))),
    el("p.legend", {}, real.filter(([, , v]) => v / whole >= 0.005).map(([name, tone, value]) => el("span", {}, swatch(tone, tone === "exposed"), `${name} ${percent(value / whole)}`)))];
}

function whereTime(graph) {
  const { ns, work, phase } = graph.nodes, byWork = WORK.map(() => 0), byPhase = PHASES.map(() => 0);
  for (let i = 0; i < graph.size; i++) { byWork[work[i]] += ns[i]; byPhase[phase[i]] += ns[i]; }
  const exposed = sum(graph.collectives.map((c) => c.exposed)), whole = sum(byWork) + exposed || 1;
  const top = PHASES.map((name, k) => [name, byPhase[k]]).filter(([, v]) => v).sort((a, b) => b[1] - a[1]);
  return answer("Where does the time go?", "#timeline",
    shares([...WORK.map((name, k) => [WORK_NAMES[name], name, byWork[k]]), ["waiting for communication", "exposed", exposed]], whole),
    el("p", {}, top.map(([name, v], k) => `${k ? ", " : ""}${name} ${time(v)}`).join(""), exposed ? `, and ${time(exposed)} of waiting for other ranks.` : "."),
    el("p.note", {}, el("a", { href: "#modules" }, "module by module"), " · ", el("a", { href: "#kernels" }, "the most expensive kernels")));
}

function whatMemory(graph) {
  const memory = memoryOver(graph), i = memory.peak, whole = memory.total[i];
  const rows = liveAt(graph, i).slice(0, 3);
  return answer("What fills the memory?", "#memory",
    shares(KINDS.map((name, k) => [name, name, memory.kinds[k][i]]), whole),
    el("p", {}, `Most is held in ${graph.phase(i)}${graph.path(i) ? ` of ${graph.path(i)}` : ""}: ${bytes(whole)}`, account.head.gpu_memory && !String(account.head.device).startsWith("CPU") ? ` of ${bytes(account.head.gpu_memory)}` : "", ". The largest:"),
    el("ul", {}, rows.map((row) => el("li", {}, `${bytes(row.bytes)} `, nodeLink(graph, row.node, row.members.length > 1 ? `${row.path || graph.nodes.name[row.node]} (${row.members.length} alike)` : tensorName(graph, row.node)), `: ${keptWhy(graph, row.members[0], i).short}`))));
}

function whatPasses() {
  const ran = account.passes.filter((p) => p.changed);
  const most = [...ran].sort((a, b) => Math.abs(b.nodes_after - b.nodes_before) - Math.abs(a.nodes_after - a.nodes_before)).slice(0, 4);
  return answer("What did the passes do?", "#passes",
    el("p", {}, `${ran.length} of ${count(account.passes.length, "pass")} changed the graph; each of the others says why not.`),
    el("ul", {}, most.map((p) => el("li", {}, el("a", { href: `#pass/${p.graph || "step"}/${p.name}` }, p.name), `: ${p.summary}`))));
}

function whyExposedAll(graph) {
  const all = graph.collectives, exposed = sum(all.map((c) => c.exposed));
  if (!all.length) return answer("Why is communication exposed?", "#collectives", el("p", {}, account.head.ranks > 1 ? "This graph has no collectives." : "There is one rank: nothing is communicated."));
  const worst = alikeCollectives(graph).slice(0, 3).filter((row) => row.exposed);
  return answer("Why is communication exposed?", "#collectives",
    el("p", {}, `${count(all.length, "collective")} take ${time(sum(all.map((c) => c.ns)))}; computation waits for ${time(exposed)} of it, and the rest is hidden. `, worst.length ? "The most:" : ""),
    el("ul", {}, worst.map(({ members, exposed: all, worst: c }) => el("li", {}, `${time(all)} `, nodeLink(graph, c.node, `${c.kind} over ${c.axis}${members.length > 1 ? ` (${members.length} alike)` : ""}`), `: ${whyExposed(graph, c)}`))));
}
