// Memory over the step by kind, and the tensors held at one moment: size, origin, and why they are held.

let moment = null; // a node; null: the peak

function memoryPart() {
  const height = 190, text = el("p", {}), list = el("div", {});
  const canvas = chart(height, (context, width) => drawMemory(context, width, height));
  canvas.setAttribute("role", "img"); canvas.setAttribute("aria-label", "Memory over the step: arrows move it, plus and minus zoom; the table below lists what is held");
  const tools = el("div.tools", {}, el("button", { type: "button", onclick: () => { moment = null; update(); } }, "at the peak"), ...zoomTools());
  const update = () => { canvas.redraw(); drawMoment(text, list); };
  panAndPick(canvas, (x, y) => pickMemory(x, canvas.clientWidth), (hit) => { if (hit) { moment = hit.node; update(); } });
  const section = part("memory", "Memory", el("p.muted", {}, "Bytes of one rank by kind, over the step. Click a moment to list the tensors held then; at first the list shows the peak."),
    tools, canvas, legend(KINDS.map((name) => [name, name])), text, list);
  follow("graph", () => { moment = null; update(); }); follow("window theme", () => canvas.redraw());
  return section;
}

function drawMemory(context, width, height) {
  const graph = shown(), memory = memoryOver(graph), base = height - 22, most = memory.total[memory.peak] * 1.06;
  const columns = columnsOf(graph, width), tones = KINDS.map(color);
  columns.forEach((i, px) => {
    let y = base;
    KINDS.forEach((_, k) => { const size = memory.kinds[k][i] / most * (base - 4); if (size > 0) { context.fillStyle = tones[k]; context.fillRect(LABEL + px, y - size, 1.2, size); y -= size; } });
  });
  drawBytes(context, width, base, most, memory.total[memory.peak]);
  drawAxis(context, graph, width, base);
  const x = xOf(graph, width)(graph.at[moment ?? memory.peak]);
  drawMarker(context, x, base, color("ink"));
}

/** Lines across at round sizes, and at the peak. */
function drawBytes(context, width, base, most, peak) {
  const unit = 2 ** (10 * Math.floor(Math.log2(Math.max(peak, 1)) / 10)), step = unit * niceStep(most / unit / 4), y = (size) => base - size / most * (base - 4);
  context.textBaseline = "middle"; context.textAlign = "right"; context.strokeStyle = color("line");
  const line = (size, text, tone) => {
    context.globalAlpha = 0.5; context.beginPath(); context.moveTo(LABEL, y(size)); context.lineTo(width, y(size)); context.stroke(); context.globalAlpha = 1;
    context.fillStyle = color(tone); context.fillText(text, LABEL - 8, Math.max(y(size), 8));
  };
  for (let size = step; size < peak; size += step) if (y(size) - y(peak) > 14) line(size, `${Math.round(size / unit * 100) / 100} ${bytes(unit).split(" ")[1]}`, "muted");
  line(peak, bytes(peak), "ink");
  context.textAlign = "left";
}

/** For each column of pixels the node at which most is held while it lasts. */
function columnsOf(graph, width) {
  const [from, to] = span(graph), n = Math.max(1, Math.floor(width - LABEL)), total = memoryOver(graph).total, best = new Array(n).fill(-1);
  let latest = 0;
  for (let i = 0; i < graph.size; i++) {
    const t = graph.at[i];
    if (t < from) { latest = i; continue; }
    if (t > to) break;
    const px = Math.min(n - 1, Math.floor((t - from) / (to - from) * n));
    if (best[px] < 0 || total[i] > total[best[px]]) best[px] = i;
  }
  for (let px = 0; px < n; px++) { if (best[px] < 0) best[px] = latest; else latest = best[px]; }
  return best;
}
function pickMemory(px, width) {
  if (px < LABEL) return null;
  const graph = shown(), i = columnsOf(graph, width)[Math.floor(px - LABEL)];
  if (i === undefined) return null;
  const memory = memoryOver(graph);
  return { node: i, text: `${bytes(memory.total[i])} while ${graph.nodes.name[i]} runs\n${where(graph, i)}\n` + KINDS.map((name, k) => memory.kinds[k][i] ? `${name} ${bytes(memory.kinds[k][i])}` : "").filter(Boolean).join("\n") };
}

function tensorName(graph, i) { const input = graph.inputOf.get(i); return input ? input.name : graph.nodes.name[i]; }

/** What is held while node i runs: rows of similar storages (one kind, shape and place in equal blocks), the largest first. */
function liveAt(graph, i) {
  const rows = new Map(), { node, bytes: sizes, kind } = graph.storages;
  for (let s = 0; s < node.length; s++) {
    if (!graph.alive(s, i)) continue;
    const n = node[s], input = graph.inputOf.get(n), path = graph.fold(input ? input.name : graph.path(n));
    const key = [kind[s], path, graph.type(n), input ? "" : graph.nodes.call[n]].join("|");
    if (!rows.has(key)) rows.set(key, { kind: KINDS[kind[s]], path, node: n, bytes: 0, members: [] });
    const row = rows.get(key); row.bytes += sizes[s]; row.members.push(s);
  }
  return [...rows.values()].sort((a, b) => b.bytes - a.bytes);
}

/** Why storage s is held while node i runs: {short, parts}, the parts with a link to who needs it. */
function keptWhy(graph, s, i) {
  const { node, kind, last } = graph.storages, n = node[s], name = KINDS[kind[s]], input = graph.inputOf.get(n);
  const held = { parameters: "a parameter, held throughout", optimizer: "state of the optimizer, held throughout", inputs: "an input of the step, held throughout", gradients: "the sum of a gradient over microbatches, held throughout" };
  if (last[s] >= graph.size) return { short: held[name] || "held throughout", parts: [held[name] || "held throughout"] };
  if (last[s] === i) return { short: "read at this moment", parts: ["read by the node that runs now"] };
  const reader = last[s], out = graph.operator(reader) === "output";
  if (out) {
    const result = name === "activations" ? "kept for backward, which is another graph" : "a result of the step";
    return { short: result, parts: [result] };
  }
  const place = `${graph.phase(reader)}${graph.path(reader) ? ` of ${graph.path(reader)}` : ""}`;
  const why = {
    activations: ["saved by forward for backward", "saved for backward; last read by "],
    gradients: ["a gradient, held until the update", "held until clipping and the update have all gradients; last read by "],
    buckets: [input ? "" : graph.role(n).startsWith("reduce") || graph.phase(n) === "backward" ? "gathered, or about to be reduced" : "a gathered parameter, held until its last reader", "last read by "],
  }[name] || ["read again", "last read by "];
  return { short: `${why[0]}: needed in ${place}`, parts: [why[1], nodeLink(graph, reader), ` in ${place}`] };
}

function drawMoment(text, list) {
  const graph = shown(), memory = memoryOver(graph), i = moment ?? memory.peak;
  text.replaceChildren(moment === null ? "At the peak, while " : "While ", nodeLink(graph, i), ` runs (${where(graph, i)}), ${bytes(memory.total[i])} are held:`);
  const rows = liveAt(graph, i);
  const columns = [["bytes", 1], ["kind", 0], ["tensor", 0], ["shape", 0, 1], ["made by this line", 0, 1], ["why it is held", 0]];
  if (Object.keys(graph.other_graphs).length) rows.push({ kind: Object.keys(graph.other_graphs).join(", "), other: true, bytes: sum(Object.values(graph.other_graphs)), members: [] });
  rows.sort((a, b) => b.bytes - a.bytes);
  const line = (row) => {
    if (row.other) return cells(columns, [bytes(row.bytes), row.kind, "state that only the step's other graphs read", "", "", ""]);
    const [file, code] = graph.source(row.node), why = keptWhy(graph, row.members[0], i), many = row.members.length > 1;
    return cells(columns, [bytes(row.bytes), el("span.kind", {}, swatch(row.kind), row.kind),
      [many && folding(row.members, (s) => line({ ...row, node: graph.storages.node[s], bytes: graph.storages.bytes[s], members: [s] })), nodeLink(graph, row.node, many ? `${row.path || graph.nodes.name[row.node]} × ${row.members.length}` : tensorName(graph, row.node))],
      el("code.shape", {}, graph.type(row.node)), file ? [file, el("code.muted.cut", { title: code }, code)] : "", why.parts]);
  };
  list.replaceChildren(table(columns, rows, line, 14));
}
