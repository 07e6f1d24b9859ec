// The head: figures of the step, and short answers to what a newcomer asks.

function headPart() {
  const head = account.head, options = head.options, m = head.measured, f = head.forecast;
  const what = [head.mesh ? `${head.ranks.toLocaleString("en")} ranks (${head.mesh})` : "one device", options.precision,
    `${options.accumulate > 1 ? `${options.accumulate} microbatches x ` : ""}${options.batch_size} x ${options.seq_len.toLocaleString("en")} tokens per data-parallel rank`,
    `memory ${options.memory}`].filter(Boolean);
  const made = Object.entries(head.versions).filter(([, v]) => v).map(([name, v]) => `${name} ${v}`).join(", ");
  const ran = !head.device ? "; nothing was run" : f.step_ms === undefined ? `; the run used ${head.device.replace(/^CPU.*/, "a CPU")}` : m ? "" : "; measured figures follow when the run ends";
  return el("section", { id: "summary" },
    el("h1", {}, head.title), el("p", {}, what.join(" · ")),
    m && [el("h2", {}, `Measured on ${head.device}`), figures([
      ["step", m.step_ms && time(m.step_ms * 1e6)], ["tokens/s", big(m.tokens_per_s, "")], ["MFU", percent(m.mfu)], ["peak memory", bytes(m.peak_bytes)],
      ["training loss", m.loss?.toFixed(4)], ["validation loss", m.val_loss?.toFixed(4)], ["bubble", percent(m.bubble), "median of the last steps"]]), curves()],
    el("h2", { id: "forecast" }, `Forecast for ${head.gpu}${ran}`),
    figures([
      ["step", f.step_ms && time(f.step_ms * 1e6)], ["tokens/s", big(f.tokens_per_s, "")], ["MFU", percent(f.mfu)],
      ["peak memory", bytes(f.peak_bytes), head.ranks > 1 ? `of rank ${account.pipeline ? account.pipeline.rank : 0}` : null],
      ["exposed communication", f.step_ms === undefined ? "" : f.exposed_ms ? time(f.exposed_ms * 1e6) : "none", f.exposed_ms ? `${percent(f.exposed_ms / f.step_ms)} of the step` : null],
      ["bubble", account.pipeline && percent(account.pipeline.bubble)],
      ["nodes", sum(graphs.map((g) => g.size)).toLocaleString("en"), graphs.length > 1 ? `in ${graphs.length} graphs` : "in one graph"]]),
    graphChoice(),
    el("div.answers", { id: "answers" }), el("p.muted.note", {}, made));
}

/** Cards of [name, value, note]; the ones without a value are left out. */
function figures(rows) {
  return el("div.figures", {}, rows.filter(([, value]) => value).map(([name, value, note]) => el("div.figure", {}, el("small", {}, name), el("b", {}, value), note ? el("small", {}, note) : null)));
}

/** The loss and the throughput over the steps of a run. */
function curves() {
  const { loss = [], val_loss = [], tokens_per_s = [] } = account.curves || {};
  if (loss.length < 2) return null;
  return el("div.curves", {}, curve("Loss, nats per token", [[loss, "forward"], [val_loss, "exposed", "validation"]], (v) => v.toFixed(v < 1 ? 2 : 1)), curve("Tokens/s", [[tokens_per_s, "optimizer-phase"]], (v) => big(v, ""), 0));
}
function curve(title, series, text, lowest = Infinity) {
  const points = series.flatMap(([line]) => line), ys = points.map(([, y]) => y), last = Math.max(...points.map(([x]) => x));
  const low = Math.min(lowest, ...ys), high = Math.max(...ys), extra = (high - low) * 0.05 || 1;
  const canvas = chart(170, (context, width, height) => {
    const left = 44, base = height - 20, x = (step) => left + step / last * (width - left - 8), y = (v) => base - (v - low) / (high - low + extra) * (base - 8);
    const each = niceStep((high - low + extra) / 5), steps = niceStep(last / 5);
    context.fillStyle = color("muted"); context.strokeStyle = color("line");
    context.textBaseline = "middle"; context.textAlign = "right";
    for (let v = Math.ceil(low / each) * each; v <= high + extra; v += each) { context.beginPath(); context.moveTo(left, y(v)); context.lineTo(width, y(v)); context.stroke(); context.fillText(text(v), left - 6, y(v)); }
    context.textAlign = "center";
    for (let step = 0; step <= last; step += Math.max(1, steps)) {
      const words = step ? step.toLocaleString("en") : "step 0";
      context.fillText(words, Math.min(Math.max(x(step), left), width - context.measureText(words).width / 2), height - 8);
    }
    for (const [line, tone, dots] of series) {
      context.strokeStyle = context.fillStyle = color(tone); context.lineWidth = 2; context.beginPath();
      for (const [step, v] of line) dots ? (context.moveTo(x(step), y(v)), context.arc(x(step), y(v), 3.5, 0, 7)) : context.lineTo(x(step), y(v));
      dots ? context.fill() : context.stroke();
    }
  });
  canvas.setAttribute("role", "img"); canvas.setAttribute("aria-label", `${title}, by step`);
  follow("theme", () => canvas.redraw());
  return el("div", {}, el("h3", {}, title), canvas, legend(series.filter(([line, , name]) => name && line.length).map(([, tone, name]) => [name, tone])));
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
    el("p", {}, top.map(([name, v], k) => `${k ? ", " : ""}${name} ${time(v)}`).join(""), exposed ? `, and ${time(exposed)} waiting for other ranks.` : "."),
    el("p.note", {}, el("a", { href: "#modules" }, "module by module"), " · ", el("a", { href: "#kernels" }, "the most expensive kernels")));
}

function whatMemory(graph) {
  const memory = memoryOver(graph), i = memory.peak, whole = memory.total[i];
  const rows = liveAt(graph, i).slice(0, 3);
  return answer("What fills the memory?", "#memory",
    shares(KINDS.map((name, k) => [name, name, memory.kinds[k][i]]), whole),
    el("p", {}, `The peak is in ${graph.phase(i)}${graph.path(i) ? ` of ${graph.path(i)}` : ""}: ${bytes(whole)}`, account.head.gpu_memory && !String(account.head.device).startsWith("CPU") ? ` of ${bytes(account.head.gpu_memory)}` : "", ". The largest:"),
    el("ul", {}, rows.map((row) => el("li", {}, `${bytes(row.bytes)} `, nodeLink(graph, row.node, row.members.length > 1 ? `${row.path || graph.nodes.name[row.node]} × ${row.members.length}` : tensorName(graph, row.node)), `: ${keptWhy(graph, row.members[0], i).short}`))));
}

function whatPasses() {
  const ran = account.passes.filter((p) => p.changed);
  const most = [...ran].sort((a, b) => Math.abs(b.nodes_after - b.nodes_before) - Math.abs(a.nodes_after - a.nodes_before)).slice(0, 4);
  return answer("What did the passes do?", "#passes",
    el("p", {}, `${ran.length} of ${count(account.passes.length, "pass")} changed the graph. The others list their reason.`),
    el("ul", {}, most.map((p) => el("li", {}, el("a", { href: `#pass/${p.graph || "step"}/${p.name}` }, p.name), `: ${p.summary}`))));
}

function whyExposedAll(graph) {
  const all = graph.collectives, exposed = sum(all.map((c) => c.exposed));
  if (!all.length) return answer("Why is communication exposed?", "#collectives", el("p", {}, account.head.ranks > 1 ? "This graph has no collectives." : "There is one rank, so nothing is communicated."));
  const worst = alikeCollectives(graph).slice(0, 3).filter((row) => row.exposed);
  return answer("Why is communication exposed?", "#collectives",
    el("p", {}, `${count(all.length, "collective")} take ${time(sum(all.map((c) => c.ns)))}; computation waits for ${time(exposed)} of that, and the rest is hidden. `, worst.length ? "The largest waits:" : ""),
    el("ul", {}, worst.map(({ members, exposed: all, worst: c }) => el("li", {}, `${time(all)} `, nodeLink(graph, c.node, `${c.kind} over ${c.axis}${members.length > 1 ? ` × ${members.length}` : ""}`), `: ${whyExposed(graph, c)}`))));
}
