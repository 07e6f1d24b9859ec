// The card of a node: all that is known of it.

function open(i) { location.hash = `node/${shown().name}/${shown().nodes.name[i]}`; }

const BACKENDS = [[/cudnn_attention/, "cuDNN"], [/flash_attention_for_cpu/, "FlashAttention (CPU; on a GPU torch chooses)"], [/flash_attention/, "FlashAttention"], [/efficient_attention/, "memory-efficient"], [/flex_attention/, "FlexAttention"], [/attention_math/, "plain products"]];

function drawCard(graph, i) {
  const n = graph.nodes, [file, code] = graph.source(i), input = graph.inputOf.get(i), c = graph.collectiveOf.get(i), kernel = n.kernel[i], piece = graph.pieces[n.piece[i]];
  const rows = [];
  const row = (name, ...value) => rows.push(el("dt", {}, name), el("dd", {}, ...value));
  const links = (nodes, most = 8) => { const list = el("span", {}); const one = (j, k) => el("span", {}, k ? ", " : "", nodeLink(graph, j)); list.append(...nodes.slice(0, most).map(one)); if (nodes.length > most) list.append(el("small", {}, ` and ${nodes.length - most} more`)); return nodes.length ? list : "none"; };
  if (input) row("input", `${input.kind} ${input.name}`);
  row("gives", el("code", {}, graph.type(i) || "nothing"));
  row("module", graph.path(i) ? graph.path(i) : "the model itself");
  row("phase", graph.phase(i), n.checkpoint[i] >= 0 ? ` (in checkpoint ${n.checkpoint[i]})` : "");
  if (file) row("line", file, el("br"), el("code", {}, code));
  if (graph.role(i)) row("what for", graph.role(i));
  row("reads", links([...new Set(n.inputs[i])]));
  row("read by", links(graph.users[i]));
  if (kernel >= 0) {
    const members = graph.members.get(kernel).filter((j) => j !== i);
    row("kernel", members.length ? ["one with ", links(members)] : "by itself");
    row("time", `${time(n.ns[kernel])}${members.length ? " for the whole kernel" : ""}, forecast`, n.moved[kernel] ? `; moves ${bytes(n.moved[kernel])}` : "", n.flops[i] ? `; ${big(n.flops[i], "FLOP")}` : "");
  } else if (!input && !c) row("time", "runs nothing: a view, or part of another node's result");
  const measured = account.profile && account.profile.nodes[`${graph.name}/${n.name[i]}`];
  if (measured) row("measured", `${time(measured.ns)} a step`, measured.kernels.length ? el("ul.note", {}, measured.kernels.map(([name, ns]) => el("li", {}, el("code", {}, name), ` ${time(ns)}`))) : "", measured.of > 1 ? el("small", {}, ` together with ${measured.of - 1} more nodes of its compiled piece`) : "");
  if (piece) row("compiled in", el("code", {}, piece.name), ` with ${count(piece.nodes - 1, "other node")}, from `, nodeLink(graph, piece.first), " to ", nodeLink(graph, piece.last));
  if (graph.madeOf.has(i)) row("generated", graph.madeOf.get(i).map((k) => el("details", {}, el("summary", {}, el("code", {}, graph.generated[k][0])), el("pre", {}, graph.generated[k][1]))));
  if (graph.region(i)) row("region", graph.region(i));
  if (graph.choices[n.choice[i]]) row("for Inductor", `part of ${graph.choices[n.choice[i]]}, compiled with choices of its own`);
  const backend = BACKENDS.find(([pattern]) => pattern.test(graph.operator(i)));
  if (backend) row("attention by", backend[1]);
  if (graph.hostOf.has(i)) row("on the host", graph.hostOf.get(i));
  const s = graph.storageOf.get(i);
  if (s !== undefined && n.inputs) {
    const { bytes: size, kind, last } = graph.storages;
    row("memory", `${bytes(size[s])}, ${KINDS[kind[s]]}; `, last[s] >= graph.size ? "held throughout" : ["held until ", nodeLink(graph, last[s]), ` (${where(graph, last[s])})`]);
  }
  if (c) {
    row("collective", `${c.kind} over ${c.axis}, ${c.ranks} ranks, ${bytes(c.bytes)} of ${c.dtype}`, c.node !== i ? [", launched by ", nodeLink(graph, c.node)] : c.wait !== null && c.wait !== i ? [", waited for by ", nodeLink(graph, c.wait)] : "");
    row("launched", `${time(c.launched)} into the call; ${c.launched > c.ready ? `what it sends is there ${time(c.launched - c.ready)} before` : "as soon as what it sends is there"}`);
    row("takes", `${time(c.ns)}, exposed ${c.exposed ? time(c.exposed) : "nothing"}`);
    if (c.exposed) row("why exposed", whyExposed(graph, c));
    const by = hiddenBy(graph, c);
    row("hidden by", by.nodes.length ? [links(by.nodes.map(([j]) => j), 4), ` (${time(by.hidden)})`] : "nothing");
  }
  document.getElementById("card").replaceChildren(
    el("button.close", { type: "button", "aria-label": "close", onclick: () => { location.hash = ""; closeCard(); } }, "✕"),
    el("h2", {}, n.name[i]), graphs.length > 1 ? el("span.badge", {}, graph.name) : "",
    el("p", {}, el("code", {}, graph.call(i).map((p) => typeof p === "number" ? nodeLink(graph, p) : p))), el("dl", {}, rows));
  document.getElementById("card").hidden = false; document.getElementById("card").scrollTop = 0;
  document.body.classList.add("open");
}
function closeCard() { document.getElementById("card").hidden = true; document.body.classList.remove("open"); state.node = null; changed("node"); }
