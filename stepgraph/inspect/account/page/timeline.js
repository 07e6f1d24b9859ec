// When every node runs: its module, the compute stream, and a stream for each process group.

const LANE = 34, LABEL = innerWidth < 760 ? 72 : 108;

function timelinePart() {
  let by = "phase";
  const head = el("p.muted", {}), labels = el("div", {});
  const canvas = chart(60, (context, width) => drawTimeline(context, width, by));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Timeline of the step: arrows move it, plus and minus zoom; the tables below have the same figures");
  const choices = ["phase", "work"].map((name) => el("button", { type: "button", onclick: () => { by = name; draw(); } }, name === "phase" ? "by phase" : "by kind of work"));
  const tools = el("div.tools", {}, choices, ...zoomTools());
  const draw = () => {
    const graph = shown(), lanes = lanesOf(graph);
    choices.forEach((b, k) => b.setAttribute("aria-pressed", ["phase", "work"][k] === by));
    canvas.style.height = `${lanes.length * LANE + 26}px`;
    const used = new Set(graph.nodes[by].filter((_, i) => graph.nodes.ns[i]));
    labels.replaceChildren(legend([...(by === "phase" ? PHASES : WORK).map((name, k) => used.has(k) ? [by === "phase" ? name : WORK_NAMES[name], tone(by, k)] : null).filter(Boolean),
      ...(graph.collectives.length ? [["in flight", "communication"], ["exposed: computation waits", "exposed", true]] : [])]));
    head.textContent = `${graph.name === "step" ? "One step" : `One call of ${graph.name}`}${FORECAST}: ${time(graph.compute_ns)} of computation` +
      (graph.collectives.length ? ` and ${time(sum(graph.collectives.map((c) => c.exposed)))} of waiting for collectives.` : ".") + " Click a bar for its node or module.";
    canvas.redraw();
  };
  panAndPick(canvas, (x, y) => pickTimeline(x, y, canvas.clientWidth), (hit) => hit && (hit.module === undefined ? open(hit.node) : openModule(hit.module)));
  const section = part("timeline", "Timeline", head, tools, canvas, labels);
  follow("graph", draw); follow("window theme node", () => canvas.redraw());
  return section;
}

const tone = (by, k) => by === "work" ? WORK[k] : PHASES[k] === "optimizer" ? "optimizer-phase" : PHASES[k];
function lanesOf(graph) { return ["modules", "compute", ...new Set(graph.collectives.map((c) => c.axis))]; }
const span = (graph) => [state.from * graph.end, state.to * graph.end];
const xOf = (graph, width) => { const [from, to] = span(graph); return (t) => LABEL + (t - from) / (to - from) * (width - LABEL); };

function drawTimeline(context, width, by) {
  const graph = shown(), x = xOf(graph, width), lanes = lanesOf(graph), { ns, start } = graph.nodes;
  const tones = (by === "phase" ? PHASES : WORK).map((_, k) => color(tone(by, k))), ink = color("ink"), muted = color("muted");
  const bar = (from, to, lane, fill, part = 1) => { // the lower part of the lane
    const a = Math.max(x(from), LABEL), b = Math.min(x(to), width), high = (LANE - 10) * part;
    if (b >= a) { context.fillStyle = fill; context.fillRect(a, (lane + 1) * LANE - 6 - high, Math.max(b - a, 0.6), high); }
  };
  context.save(); context.beginPath(); context.rect(LABEL, 0, width - LABEL, lanes.length * LANE); context.clip();
  context.textBaseline = "middle";
  /** `text` from x = a to b, at the lane's middle, or its end part, or nothing. */
  const label = (names, a, b, lane) => {
    const room = Math.min(b, width) - Math.max(a, LABEL) - 6, name = room > 8 && names.find((t) => context.measureText(t).width <= room);
    if (name) context.fillText(name, Math.max(a, LABEL) + 3, lane * LANE + LANE / 2 - 1);
  };
  for (const [k, piece] of stretches(graph, x, width).entries()) {
    context.fillStyle = color(state.module !== null && related(graph, piece.path, state.module) ? "plus" : k % 2 ? "panel" : "bubble");
    context.fillRect(piece.a, 4, Math.max(piece.b - piece.a - 1, 0.6), LANE - 10);
    context.fillStyle = ink; label([piece.path, shortName(piece.path)], piece.a, piece.b, 0);
  }
  for (let i = 0; i < graph.size; i++) if (ns[i]) {
    const fill = tones[graph.nodes[by][i]], a = x(start[i]), b = x(start[i] + ns[i]);
    bar(start[i], start[i] + ns[i], 1, fill);
    if (b - a > 20 && b > LABEL && a < width) { context.fillStyle = inkOn(fill); label([graph.nodes.name[i], graph.operator(i).split(".")[1] || ""], a, b, 1); }
  }
  const travelling = color("communication"), exposed = color("exposed"), hatched = stripes(context, exposed), paper = color("paper");
  for (const c of graph.collectives) {
    const lane = lanes.indexOf(c.axis), end = c.started + c.ns;
    bar(c.started, end, lane, travelling);
    if (!c.exposed) continue;
    const fill = x(c.exposed) - x(0) < 6 ? exposed : hatched; // stripes need room
    bar(c.waited, c.waited + c.exposed, 1, paper); bar(c.waited, c.waited + c.exposed, 1, fill, 0.45); // a notch: no computation
    bar(Math.max(end - c.exposed, c.started), end, lane, fill);
  }
  context.restore();
  context.fillStyle = muted; context.textBaseline = "middle";
  lanes.forEach((name, lane) => context.fillText(name, 0, lane * LANE + LANE / 2 - 1));
  drawAxis(context, graph, width, lanes.length * LANE);
  if (state.node !== null) drawMarker(context, x(graph.at[state.node]), lanes.length * LANE, ink);
}

/** "7.mlp" of "layers.7.mlp": from a block's number on. */
function shortName(path) { return path.match(/\d+(\.[^.]+)*$/)?.[0] || path.split(".").pop(); }
/** Consecutive kernels of one module, [{path, a, b, first}] in pixels, cut as deep into the module tree as names fit. */
function stretches(graph, x, width) {
  const { ns, start } = graph.nodes, seen = [];
  for (let i = 0; i < graph.size; i++) if (ns[i] && x(start[i] + ns[i]) > LABEL && x(start[i]) < width) seen.push(i);
  const name = (i, depth) => graph.path(i).split(".").slice(0, depth).join(".") || (graph.phase(i) === "optimizer" ? "optimizer" : "the model");
  const ends = (nodes) => [x(start[nodes[0]]), x(start[nodes[nodes.length - 1]] + ns[nodes[nodes.length - 1]])];
  const grouped = (parts) => { // neighbours of one path together
    const groups = [];
    for (const [path, nodes] of parts) {
      const group = groups[groups.length - 1];
      if (group && group[0] === path) group[1].push(...nodes); else groups.push([path, [...nodes]]);
    }
    return groups;
  };
  const cut = (nodes, depth) => {
    const wide = grouped(nodes.map((i) => [name(i, depth), [i]])).filter(([, own]) => { const [a, b] = ends(own); return b - a >= 2; });
    return grouped(wide).flatMap(([path, own]) => {
      const [a, b] = ends(own), whole = { path, a, b, first: own[0] };
      if (b - a < 28 || !own.some((i) => graph.path(i).split(".").length > depth)) return [whole];
      const deeper = cut(own, depth + 1), named = deeper.map((piece) => piece.b - piece.a).filter((w, k) => w >= 6 + 7 * shortName(deeper[k].path).length);
      return sum(named) >= 0.7 * sum(own.map((i) => x(start[i] + ns[i]) - x(start[i]))) ? deeper : [whole];
    });
  };
  return cut(seen, 1);
}
/** Black or white, whichever is readable on a colour "#rrggbb". */
function inkOn(fill) { const [r, g, b] = [1, 3, 5].map((k) => parseInt(fill.slice(k, k + 2), 16)); return 0.299 * r + 0.587 * g + 0.114 * b > 115 ? "#000" : "#fff"; }

/** The next of 1, 2, 5 x 10^n. */
function niceStep(rough) { const power = 10 ** Math.floor(Math.log10(rough)); return power * [1, 2, 5, 10].find((k) => k * power >= rough); }
function drawAxis(context, graph, width, y) {
  const [from, to] = span(graph), x = xOf(graph, width), step = niceStep((to - from) / Math.max(2, (width - LABEL) / 110));
  context.fillStyle = color("muted"); context.strokeStyle = color("line"); context.textBaseline = "top";
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
    context.beginPath(); context.moveTo(x(t), 0); context.lineTo(x(t), y + 4); context.globalAlpha = 0.5; context.stroke(); context.globalAlpha = 1;
    const text = time(t), half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(Math.max(x(t) - half, LABEL), width - 2 * half), y + 6);
  }
}
function drawMarker(context, x, height, ink) {
  if (x < LABEL - 4) return;
  context.strokeStyle = context.fillStyle = ink; context.lineWidth = 1;
  context.beginPath(); context.moveTo(x, 0); context.lineTo(x, height); context.stroke();
  context.beginPath(); context.moveTo(x - 5, 0); context.lineTo(x + 5, 0); context.lineTo(x, 6); context.fill();
}

/** What is at a place of the timeline: {node, text}. */
function pickTimeline(px, py, width) {
  const graph = shown(), lanes = lanesOf(graph), lane = Math.floor(py / LANE), [from, to] = span(graph);
  if (px < LABEL || lane >= lanes.length || lane < 0) return null;
  const t = from + (px - LABEL) / (width - LABEL) * (to - from), slack = (to - from) / (width - LABEL) * 2;
  const { ns, start } = graph.nodes;
  let best = null, near = slack;
  if (!lane) {
    const piece = stretches(graph, xOf(graph, width), width).find(({ a, b }) => a <= px && px <= b);
    return piece ? { module: graph.path(piece.first) ? piece.path : "", text: `${piece.path}\n${time((piece.b - piece.a) / (width - LABEL) * (to - from))}, ${graph.phase(piece.first)}` } : null;
  }
  if (lane > 1) {
    for (const c of graph.collectives) if (c.axis === lanes[lane]) { const off = Math.max(c.started - t, t - c.started - c.ns, 0); if (off < near || (!off && !best)) { near = off; best = c; } }
    return best && { node: best.node, text: `${graph.nodes.name[best.node]}\n${best.kind} over ${best.axis}, ${bytes(best.bytes)}, ${time(best.ns)}` + (best.exposed ? `\nexposed ${time(best.exposed)}: ${whyExposed(graph, best)}` : "\nhidden") };
  }
  for (const c of graph.collectives) if (c.exposed && t >= c.waited && t <= c.waited + c.exposed) return { node: c.node, text: `waits ${time(c.exposed)} for ${graph.nodes.name[c.node]}\n${whyExposed(graph, c)}` };
  for (let i = 0; i < graph.size; i++) if (ns[i]) { const off = Math.max(start[i] - t, t - start[i] - ns[i], 0); if (off < near || (!off && best === null)) { near = off; best = i; if (!off) break; } }
  if (best === null) return null;
  const fused = graph.members.get(best).length;
  return { node: best, text: `${graph.nodes.name[best]}: ${graph.operator(best)}\n${where(graph, best)}\n${time(ns[best])}${fused > 1 ? `, a kernel of ${fused} nodes` : ""}` };
}

// Zooming and moving: one window of time for the timeline and the memory

function zoom(factor, centre = (state.from + state.to) / 2) {
  const width = Math.min(1, Math.max(1e-5, (state.to - state.from) * factor));
  const left = centre - (centre - state.from) * width / (state.to - state.from);
  state.from = Math.min(Math.max(0, left), 1 - width); state.to = state.from + width;
  changed("window");
}
function zoomTools() {
  return [["−", "wider", () => zoom(2)], ["+", "closer", () => zoom(0.5)], ["whole", "the whole step", () => zoom(1e9)]].map(([text, title, onclick]) =>
    el("button", { type: "button", title, "aria-label": title, onclick }, text)).concat(el("small.spare", {}, "drag or ← → to move, double-click, Ctrl and wheel, or + − to zoom"));
}
function panAndPick(canvas, pick, chosen) {
  let from = null, moved = false;
  const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const centre = (event) => state.from + Math.max(0, place(event)[0] - LABEL) / (canvas.clientWidth - LABEL) * (state.to - state.from);
  canvas.addEventListener("pointerdown", (event) => { from = [event.clientX, state.from]; moved = false; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (from && Math.abs(event.clientX - from[0]) > 3) {
      moved = true; tip("");
      const width = state.to - state.from, left = from[1] - (event.clientX - from[0]) / (canvas.clientWidth - LABEL) * width;
      state.from = Math.min(Math.max(0, left), 1 - width); state.to = state.from + width; changed("window");
    } else if (!from) { const hit = pick(...place(event)); canvas.style.cursor = hit ? "pointer" : "default"; tip(hit ? hit.text : "", event.clientX, event.clientY); }
  });
  canvas.addEventListener("pointerup", (event) => { from = null; if (!moved) { tip(""); chosen(pick(...place(event))); } });
  canvas.addEventListener("pointerleave", () => tip(""));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key], closer = { "+": 0.5, "-": 2 }[event.key];
    if (move) { const width = state.to - state.from; state.from = Math.min(Math.max(0, state.from + move * width), 1 - width); state.to = state.from + width; changed("window"); }
    else if (closer) zoom(closer);
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("dblclick", (event) => zoom(0.25, centre(event)));
  canvas.addEventListener("wheel", (event) => { if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, centre(event)); } }, { passive: false });
}
