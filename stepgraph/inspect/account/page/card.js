// The cards of a node and of a module: all that is known about it.

function open(i) { location.hash = `node/${shown().name}/${shown().nodes.name[i]}`; }

const BACKENDS = [[/cudnn_attention/, "cuDNN"], [/flash_attention_for_cpu/, "FlashAttention (CPU; on a GPU torch chooses)"], [/flash_attention/, "FlashAttention"], [/efficient_attention/, "memory-efficient"], [/flex_attention/, "FlexAttention"], [/attention_math/, "plain products"]];

function drawCard(graph, i) {
  const n = graph.nodes, [file, code] = graph.source(i), input = graph.inputOf.get(i), c = graph.collectiveOf.get(i), kernel = n.kernel[i], piece = graph.pieces[n.piece[i]];
  const rows = [];
  const row = (name, ...value) => rows.push(el("dt", {}, name), el("dd", {}, ...value));
  const links = (nodes, most = 8) => { const list = el("span", {}); const one = (j, k) => el("span", {}, k ? ", " : "", nodeLink(graph, j)); list.append(...nodes.slice(0, most).map(one)); if (nodes.length > most) list.append(el("small", {}, ` and ${nodes.length - most} more`)); return nodes.length ? list : "none"; };
  if (input) row("input", `${input.kind} ${input.name}`);
  row("result", el("code", {}, graph.type(i) || "nothing"));
  row("module", moduleLink(graph, graph.path(i)));
  row("phase", graph.phase(i), n.checkpoint[i] >= 0 ? ` (in checkpoint ${n.checkpoint[i]})` : "");
  if (file) row("line", file, el("br"), el("code", {}, code));
  if (graph.role(i)) row("role", graph.role(i));
  row("reads", links([...new Set(n.inputs[i])]));
  row("read by", links(graph.users[i]));
  if (kernel >= 0) {
    const members = graph.members.get(kernel).filter((j) => j !== i);
    row("kernel", members.length ? ["one with ", links(members)] : "by itself");
    row("time", `${time(n.ns[kernel])}${members.length ? " for the whole kernel" : ""}${FORECAST}`, n.moved[kernel] ? `; moves ${bytes(n.moved[kernel])}` : "", n.flops[i] ? `; ${big(n.flops[i], "FLOP")}` : "");
  } else if (!input && !c) row("time", "free: a view, or part of another node's result");
  const measured = account.profile && account.profile.nodes[`${graph.name}/${n.name[i]}`];
  if (measured) row("measured", `${time(measured.ns)} per step`, measured.kernels.length ? el("ul.note", {}, measured.kernels.map(([name, ns]) => el("li", {}, el("code", {}, name), ` ${time(ns)}`))) : "", measured.of > 1 ? el("small", {}, ` together with ${measured.of - 1} more nodes of its compiled piece`) : "");
  if (piece) row("compiled in", el("code", {}, piece.name), ` with ${count(piece.nodes - 1, "other node")}, from `, nodeLink(graph, piece.first), " to ", nodeLink(graph, piece.last));
  if (graph.madeOf.has(i)) row("generated", graph.madeOf.get(i).map((k) => el("details", {}, el("summary", {}, el("code", {}, graph.generated[k][0])), el("pre", {}, graph.generated[k][1]))));
  if (graph.region(i)) row("region", graph.region(i));
  if (graph.choices[n.choice[i]]) row("for Inductor", `part of ${graph.choices[n.choice[i]]}, compiled with its own choices`);
  const backend = BACKENDS.find(([pattern]) => pattern.test(graph.operator(i)));
  if (backend) row("attention by", backend[1]);
  if (graph.hostOf.has(i)) row("on the host", graph.hostOf.get(i));
  const s = graph.storageOf.get(i);
  if (s !== undefined) {
    const { bytes: size, kind, last } = graph.storages;
    row("memory", `${bytes(size[s])}, ${KINDS[kind[s]]}; `, last[s] >= graph.size ? "held throughout" : ["held until ", nodeLink(graph, last[s]), ` (${where(graph, last[s])})`]);
  }
  if (c) {
    row("collective", `${c.kind} over ${c.axis}, ${c.ranks} ranks, ${bytes(c.bytes)} of ${c.dtype}`, c.node !== i ? [", launched by ", nodeLink(graph, c.node)] : c.wait !== null && c.wait !== i ? [", waited for by ", nodeLink(graph, c.wait)] : "");
    row("launched", `${time(c.launched)} into the call, ${c.launched > c.ready ? `${time(c.launched - c.ready)} after its input is ready` : "as soon as its input is ready"}`);
    row("takes", `${time(c.ns)}, exposed ${c.exposed ? time(c.exposed) : "0"}`);
    if (c.exposed) row("why exposed", whyExposed(graph, c));
    const by = hiddenBy(graph, c);
    row("hidden by", by.nodes.length ? [links(by.nodes.map(([j]) => j), 4), ` (${time(by.hidden)})`] : "nothing");
  }
  showCard(graph, n.name[i], el("p", {}, el("code", {}, graph.call(i).map((p) => typeof p === "number" ? nodeLink(graph, p) : p))), rows);
}
function showCard(graph, title, below, rows) {
  const card = document.getElementById("card");
  card.replaceChildren(el("button.close", { type: "button", "aria-label": "close", onclick: () => { location.hash = ""; closeCard(); } }, "✕"),
    el("h2", {}, title), graphs.length > 1 ? el("span.badge", {}, graph.name) : "", below, el("dl", {}, rows));
  card.hidden = false; card.scrollTop = 0;
  document.body.classList.add("open");
}
function closeCard() { document.getElementById("card").hidden = true; document.body.classList.remove("open"); state.node = state.module = null; changed("node"); }

function openModule(path) { location.hash = `module/${shown().name}/${path}`; }
function drawModule(graph, path) {
  const { ns, flops, moved, phase } = graph.nodes, own = [...ns.keys()].filter((i) => inside(graph, i, path)), total = sum(own.map((i) => ns[i]));
  const rows = [], row = (name, ...value) => rows.push(el("dt", {}, name), el("dd", {}, ...value));
  const list = (items) => el("ul.note", {}, items.map(([link, value]) => el("li", {}, `${time(value)} `, link)));
  const phases = PHASES.map((name, k) => [name, sum(own.filter((i) => phase[i] === k).map((i) => ns[i]))]).filter(([, t]) => t);
  if (path) row("part of", moduleLink(graph, path.split(".").slice(0, -1).join(".")));
  row("time", `${time(total)}, ${percent(total / (sum(ns) || 1))} of the graph: ${phases.map(([name, t]) => `${name} ${time(t)}`).join(", ")}`);
  row("FLOPs", big(sum(own.map((i) => flops[i])), "")); row("memory moved", bytes(sum(own.map((i) => moved[i]))));
  const sent = graph.collectives.filter((c) => inside(graph, c.node, path));
  if (sent.length) row("collectives", `${sent.length}, ${bytes(sum(sent.map((c) => c.bytes)))}, exposed ${time(sum(sent.map((c) => c.exposed)))}`);
  const held = graph.inputs.filter(([, kind, name]) => kind === "parameter" && [name, graph.fold(name)].some((p) => !path || p.startsWith(`${path}.`)));
  if (held.length) row("parameters", `${count(held.length, "tensor")}, ${bytes(sum(held.map(([i]) => graph.storages.bytes[graph.storageOf.get(i)] || 0)))}`);
  const parts = new Map();
  for (const i of own) {
    const full = path.split(".").includes("*") || !path ? graph.fold(graph.path(i)) : graph.path(i), at = path ? path.split(".").length : 0, name = full.split(".").slice(0, at + 1).join(".");
    if (full.split(".").length > at && name) parts.set(name, (parts.get(name) || 0) + ns[i]);
  }
  const most = (pairs) => pairs.sort((a, b) => b[1] - a[1]).slice(0, 8);
  if (parts.size) row("modules", list(most([...parts]).map(([name, t]) => [moduleLink(graph, name), t])));
  row("kernels", list(most(own.filter((i) => ns[i]).map((i) => [i, ns[i]])).map(([i, t]) => [nodeLink(graph, i), t])));
  if (own.length) row("nodes", `${own.length}, from `, nodeLink(graph, own[0]), " to ", nodeLink(graph, own[own.length - 1]));
  showCard(graph, path || "the model", "", rows);
}
