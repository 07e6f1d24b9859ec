// Modules by phases, the most expensive kernels, passes, collectives, compiled pieces and the host.

// Modules

/** The tree of modules of a graph; equal blocks are one child "*" that holds the sums, with each block below it. */
function moduleTree(graph) {
  const make = (name) => ({ name, children: new Map(), ns: PHASES.map(() => 0), flops: 0, moved: 0, sent: 0, exposed: 0, count: 1, first: null });
  const root = make("the model"), { ns, flops, moved, phase } = graph.nodes, blocks = new Set(graph.blocks);
  const add = (node, i, c) => {
    node.ns[phase[i]] += ns[i]; node.flops += flops[i]; node.moved += moved[i]; node.first ??= i;
    if (c && c.node === i) { node.sent += c.bytes; node.exposed += c.exposed; }
  };
  for (let i = 0; i < graph.size; i++) {
    if (graph.phase(i) === "input" || graph.phase(i) === "output") continue;
    const c = graph.collectiveOf.get(i), walk = (node, names, at) => {
      add(node, i, c);
      if (!names.length) return;
      const here = at ? `${at}.${names[0]}` : names[0], child = (name) => { if (!node.children.has(name)) node.children.set(name, make(name)); return node.children.get(name); };
      if (blocks.has(here)) {
        const all = child("*"); all.blocks ??= new Map();
        if (!all.blocks.has(names[0])) all.blocks.set(names[0], make(names[0]));
        walk(all, names.slice(1), here); walk(all.blocks.get(names[0]), names.slice(1), here);
      } else walk(child(names[0]), names.slice(1), here);
    };
    walk(root, graph.path(i) ? graph.path(i).split(".") : [], "");
  }
  return root;
}

function modulesPart() {
  const body = el("tbody"), phases = PHASES.slice(0, 4);
  const columns = [["module", 0], ...["time", ...phases, "FLOPs"].map((t) => [t, 1]), ...["memory moved", "communicated", "exposed"].map((t) => [t, 1, 1])];
  const head = cells(columns, columns.map(([title]) => title), "th");
  follow("graph", () => {
    const graph = shown(), root = moduleTree(graph), whole = sum(root.ns) || 1;
    const row = (node, depth, name, path) => {
      const more = node.children.size || node.blocks, some = (value, text) => (value ? text(value) : "");
      const button = el("button.toggle", { type: "button", "aria-label": `parts of ${name}`, "aria-expanded": "false", onclick: () => toggle() }, more ? "▸" : "");
      const total = sum(node.ns);
      const tr = cells(columns, [[button, path === null ? name : moduleLink(graph, path, name)], [`${time(total)} ${percent(total / whole)}`, el("span.share", { style: `width: ${100 * total / whole}%` })],
        ...phases.map((_, k) => some(node.ns[k], time)), some(node.flops, (v) => big(v, "")), some(node.moved, bytes), some(node.sent, bytes), some(node.exposed, time)]);
      tr.firstChild.className = "tree"; tr.firstChild.style.paddingLeft = `${depth * 1.1}rem`;
      const below = [];
      const toggle = (open = !below.length) => {
        button.textContent = open ? "▾" : "▸"; button.setAttribute("aria-expanded", open);
        if (!open) { const close = (rows) => rows.splice(0).forEach((r) => { r.closeAll(); r.remove(); }); close(below); return; }
        const parts = [...node.children].sort((a, b) => sum(b[1].ns) - sum(a[1].ns)).map(([key, child]) => row(child, depth + 1, key === "*" ? `all ${child.blocks.size} blocks` : key, path === null ? `${node.at}.${key}` : path ? `${path}.${key}` : key));
        if (node.blocks) parts.push(row({ ...node, children: node.blocks, blocks: null, at: path.replace(/\.\*$/, "") }, depth + 1, "block by block", null));
        below.push(...parts); tr.after(...parts);
      };
      tr.closeAll = () => below.splice(0).forEach((r) => { r.closeAll(); r.remove(); });
      tr.toggle = toggle;
      return tr;
    };
    const top = row(root, 0, "the model", "");
    body.replaceChildren(top); top.toggle(true);
    const holder = [...root.children.values()].find((c) => c.children.has("*"));
    if (holder) [...body.children].find((r) => r !== top && r.querySelector(".tree").textContent.replace("▸", "") === holder.name)?.toggle(true);
  });
  return part("modules", "Modules", el("p.muted", {}, `Time by module and phase${FORECAST}. A kernel of several nodes counts in the module of its last node. Equal blocks share one row. Click a module to open it.`),
    el("div.wide", {}, el("table", {}, el("thead", {}, head), body)), regionsPart(), kernelsPart());
}

/** Time by the regions that the model names (`stepgraph.region`), such as dispatch, compute and combine of experts. */
function regionsPart() {
  const box = el("div", { id: "regions" }), phases = PHASES.slice(0, 3);
  follow("graph", () => {
    const graph = shown(), rows = graph.regions.map((name) => ({ name, ns: PHASES.map(() => 0), flops: 0, moved: 0, sent: 0, exposed: 0, first: null }));
    const { ns, phase, flops, moved, region } = graph.nodes, whole = sum(ns) || 1;
    for (let i = 0; i < graph.size; i++) { const r = rows[region[i]]; r.ns[phase[i]] += ns[i]; r.flops += flops[i]; r.moved += moved[i]; if (ns[i]) r.first ??= i; }
    for (const c of graph.collectives) { const r = rows[region[c.node]]; r.sent += c.bytes; r.exposed += c.exposed; r.first ??= c.node; }
    const named = rows.filter((r) => r.name && r.first !== null).sort((a, b) => sum(b.ns) - sum(a.ns));
    if (!named.length) { box.replaceChildren(); return; }
    const some = (value, text) => (value ? text(value) : "");
    const values = (r) => [nodeLink(graph, r.first, r.name || "outside regions"), el("span", {}, `${time(sum(r.ns))} ${percent(sum(r.ns) / whole)}`, el("span.share", { style: `width: ${100 * sum(r.ns) / whole}%` })),
      ...phases.map((_, k) => some(r.ns[k], time)), some(r.flops, (v) => big(v, "")), some(r.moved, bytes), some(r.sent, bytes), some(r.exposed, time)];
    box.replaceChildren(el("h3", {}, "Regions"), el("p.muted", {}, "Parts that the model names with stepgraph.region, forward and backward."),
      table([["region", 0], ...["time", ...phases, "FLOPs", "memory moved", "communicated", "exposed"].map((t) => [t, 1])], [...named, ...rows.filter((r) => !r.name && r.first !== null)].map(values)));
  });
  return box;
}

function kernelsPart() {
  const box = el("div", { id: "kernels" });
  follow("graph", () => {
    const graph = shown(), { ns, flops, moved } = graph.nodes, groups = new Map(), whole = sum(ns) || 1;
    for (let i = 0; i < graph.size; i++) if (ns[i]) {
      const key = [graph.operator(i), graph.type(i), graph.fold(graph.path(i)), graph.nodes.phase[i], ns[i]].join("|");
      if (!groups.has(key)) groups.set(key, { first: i, count: 0, ns: 0 });
      const group = groups.get(key); group.count++; group.ns += ns[i];
    }
    const rows = [...groups.values()].sort((a, b) => b.ns - a.ns);
    const columns = [["time", 1], ["share", 1], ["calls", 1], ["operator", 0], ["module", 0], ["result", 0], ["each", 1], ["rate", 1]];
    const line = (g) => {
      const i = g.first, members = graph.members.get(i) || [i], work = sum(members.map((m) => flops[m]));
      return cells(columns, [time(g.ns), percent(g.ns / whole), g.count,
        [nodeLink(graph, i, graph.operator(i)), members.length > 1 && el("small", {}, ` and ${members.length - 1} more in one kernel`)],
        [moduleLink(graph, graph.fold(graph.path(i))), " ", el("small", {}, graph.phase(i))],
        el("code.shape", {}, graph.type(i)), time(ns[i]), work ? big(work / ns[i] * 1e9, "FLOP/s") : big(moved[i] / ns[i] * 1e9, "B/s")]);
    };
    box.replaceChildren(el("h3", {}, "The most expensive kernels"), table(columns, rows, line, 12));
  });
  return box;
}

/** What a profile measured, by node or compiled piece, next to the forecast where that is for the same device. */
function measuredPart() {
  const profile = account.profile;
  if (!profile) return null;
  const section = part("measured", "Measured"), rows = [], same = account.head.forecast.step_ms !== undefined;
  for (const [key, found] of Object.entries(profile.nodes)) {
    const [name, node] = key.split("/"), graph = graphs.find((g) => g.name === name), i = graph && graph.number.get(node);
    if (i === undefined || !graph) continue;
    const inside = found.of > 1 ? graph.nodes.piece.map((p, j) => [p, j]).filter(([p]) => p >= 0 && p === graph.nodes.piece[i]).map(([, j]) => j) : [i];
    rows.push({ graph, i, ns: found.ns, forecast: graph.calls * sum(inside.map((j) => graph.nodes.ns[j])), of: found.of || 1 });
  }
  rows.sort((a, b) => b.ns - a.ns);
  const whole = sum(rows.map((r) => r.ns)) || 1;
  const columns = [["measured", 1], ["share", 1], ...(same ? [["forecast", 1]] : []), ["node", 0], ["operator", 0], ["module", 0]];
  const line = (r) => cells(columns, [time(r.ns), percent(r.ns / whole), ...(same ? [time(r.forecast)] : []),
    [nodeLink(r.graph, r.i), r.of > 1 && el("small", {}, ` and ${r.of - 1} more, compiled together`)], el("code", {}, r.graph.operator(r.i)),
    [moduleLink(r.graph, r.graph.path(r.i)), " ", el("small", {}, r.graph.phase(r.i))]]);
  section.append(el("p.muted", {}, `Time per step on the ${profile.on}, in steps ${profile.steps[0]} to ${profile.steps[1] - 1}. Concurrent kernels are each counted in full. The trace next to this page, trace.json.gz, opens in ui.perfetto.dev.`,
    profile.kernel_ns ? ` ${percent(profile.named_ns / profile.kernel_ns)} of ${time(profile.kernel_ns)} of kernel time belongs to a known node.` : ""), table(columns, rows, line, 15));
  return section;
}

// Passes

const idlePass = (p) => Boolean(p.skipped) || !p.matched;
function passesPart() {
  const items = account.passes.map((p, k) => {
    const delta = p.nodes_after - p.nodes_before, effect = p.skipped ? `skipped: ${p.skipped}` : !p.matched ? "found nothing to do" : p.summary || `${p.changed} of ${p.matched} changed`;
    const body = el("div", {});
    const details = el("details", { id: `pass/${p.graph || "step"}/${p.name}` },
      el("summary", {}, el("small.place", {}, `${k + 1}`), el("span.name", {}, p.name), graphs.length > 1 ? el("span.badge", {}, p.graph) : null, el("span.badge", { title: p.tier === "exact" ? "bitwise equal to eager" : "may round differently from eager" }, p.tier),
        el("span" + (p.skipped || !p.matched ? ".muted" : ""), {}, effect), delta ? el("small", {}, ` ${delta > 0 ? "+" : ""}${delta} nodes`) : ""), body);
    details.addEventListener("toggle", () => { if (details.open && !body.firstChild) body.append(...passBody(p)); });
    return details;
  });
  return part("passes", "Passes", el("p.muted", {}, "In the order in which they ran. Open one to see what it changed, before and after; ×64 means the same change in 64 places."),
    items.filter((_, k) => !idlePass(account.passes[k])),
    el("details.idle", {}, el("summary", {}, el("span.muted", {}, `${account.passes.filter(idlePass).length} more changed nothing or were skipped; open for the reasons`)), items.filter((_, k) => idlePass(account.passes[k]))));
}
function passBody(p) {
  const graph = graphs.find((g) => g.name === p.graph) || graphs[0];
  const parts = [el("p", {}, p.doc), el("p.muted.note", {}, `matched ${p.matched}, changed ${p.changed}; nodes ${p.nodes_before} to ${p.nodes_after}; ${p.apply_s.toFixed(2)} s${p.compile_s ? `, compile ${p.compile_s.toFixed(1)} s` : ""}`)];
  if (p.notes.length) { const list = el("ul.note", {}); const more = growing(p.notes, 12, (n) => el("li", {}, n), list); parts.push(list, more || ""); }
  if (!p.excerpts.length && p.matched && !p.skipped) parts.push(el("p.note", {}, "It changed no node: it marks nodes, or decides how they run."));
  for (const e of p.excerpts) {
    const place = e.where ? ` in ${e.where}` : "";
    parts.push(el("h3", {}, e.moved ? `${count(e.count, "node")} moved; the one that moved furthest${place}` : `×${e.count}${e.count > 1 ? ", for example" : ""}${place}`), sides(e.before, e.after, "before", "after", graph));
  }
  return parts;
}
/** Two texts side by side; lines that only one of them has are marked. */
function sides(before, after, left, right, graph) {
  const has = [new Set(before), new Set(after)];
  const column = (lines, title, other, sign) => el("div", {}, el("h4", {}, title), lines.length ? lines.map((line) => {
    const only = !has[other].has(line);
    return el("span.code" + (only ? sign === "−" ? ".minus" : ".plus" : ""), {}, only ? `${sign} ` : "  ", linked(line, graph));
  }) : el("span.muted", {}, "nothing"));
  return el("div.sides", {}, column(before, left, 1, "−"), column(after, right, 0, "+"));
}
/** A line of a graph's text, its first name a link where the node is there. */
function linked(line, graph) {
  const name = line.split(":")[0], i = graph && graph.number.get(name);
  return i === undefined || !graph ? line : [nodeLink(graph, i), line.slice(name.length)];
}

// Collectives

/** Why computation waits for collective c, in one sentence. */
function whyExposed(graph, c) {
  if (!c.exposed) return "it is hidden behind computation";
  const end = c.started + c.ns, between = c.waited - c.launched, queue = c.started - c.launched;
  if (c.kind.includes("mm")) return "it is overlapped with a product chunk by chunk: the first or last chunk, flags and copies remain";
  const reader = c.wait === null ? undefined : readerOf(graph, c.wait), needed = reader === undefined ? "its result is needed" : `${graph.nodes.name[reader]} needs its result`;
  if (queue > c.exposed / 2) return `it starts ${time(queue)} late, behind the earlier collectives over ${c.axis}`;
  if (between < c.ns * 0.02) {
    if (c.launched - c.ready > c.ns * 0.5) return `${needed} at once, though it could start ${time(c.launched - c.ready)} earlier: launching it ahead would hide it`;
    if (!c.launched) return `${needed} at once, and nothing runs before it in the step`;
    return `${needed} at once, and its input is ready only then` + (c.axis === "tp" && graph.phase(c.node) !== "optimizer" ? ": --async-tp sends it in parts during the product" : "");
  }
  return `it takes ${time(c.ns)} and only ${time(between)} of computation lies between launch and wait`;
}
/** The first node that computes with the result of node i, not counting views and other free nodes. */
function readerOf(graph, i) {
  const queue = [...graph.users[i]], seen = new Set(queue);
  queue.sort((a, b) => a - b);
  while (queue.length) {
    const user = queue.shift();
    if (graph.nodes.ns[user] || graph.nodes.kernel[user] >= 0) return user;
    for (const next of graph.users[user]) if (!seen.has(next)) { seen.add(next); queue.push(next); }
    queue.sort((a, b) => a - b);
  }
  return undefined;
}
/** The nodes that compute while c is in flight, largest first, and the time that they hide. */
function hiddenBy(graph, c) {
  const end = Math.min(c.started + c.ns, c.waited ?? Infinity), found = [];
  let hidden = 0;
  if (end > c.started) for (let i = 0; i < graph.size; i++) {
    const { ns, start } = graph.nodes;
    if (!ns[i]) continue;
    const both = Math.min(end, start[i] + ns[i]) - Math.max(c.started, start[i]);
    if (both > 0) { hidden += both; found.push([i, both]); }
  }
  return { hidden, nodes: found.sort((a, b) => b[1] - a[1]) };
}

/** Collectives in groups of one kind, process group, phase and place in equal blocks, the most exposed first. */
function alikeCollectives(graph) {
  const groups = new Map();
  for (const c of graph.collectives) {
    const key = [c.kind, c.axis, graph.phase(c.node), graph.fold(graph.path(c.node)), c.dtype].join("|");
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(c);
  }
  const rows = [...groups.values()].map((members) => ({ members, exposed: sum(members.map((c) => c.exposed)), ns: sum(members.map((c) => c.ns)), worst: members.reduce((a, b) => (b.exposed > a.exposed ? b : a)) }));
  return rows.sort((a, b) => b.exposed - a.exposed || b.ns - a.ns);
}

function collectivesPart() {
  const section = part("collectives", "Collectives"), box = el("div", {});
  section.append(box);
  follow("graph", () => {
    const graph = shown();
    if (!graph.collectives.length) { box.replaceChildren(el("p.muted", {}, account.head.ranks > 1 ? "This graph has none." : "There is one rank, so nothing is communicated.")); return; }
    const rows = alikeCollectives(graph);
    const columns = [["collective", 0], ["over × ranks", 0], ["bytes", 1], ["takes", 1], ["exposed", 1], ["launch to wait", 1, 1], ["why exposed, hidden by", 0]];
    const line = (members) => {
      const worst = members.reduce((a, b) => (b.exposed > a.exposed ? b : a)), many = members.length > 1, by = hiddenBy(graph, worst), role = graph.role(worst.node), path = graph.path(worst.node);
      const total = (name) => sum(members.map((c) => c[name]));
      const tr = cells(columns, [
        [many && folding(members, (c) => line([c])), nodeLink(graph, worst.node, many ? `${worst.kind} × ${members.length}` : null),
          el("small.below", {}, role ? role.replace(/ over .*/, "") : "activation", `, ${graph.phase(worst.node)}${path && `, ${many ? graph.fold(path) : path}`}`)],
        el("span.kind", {}, `${worst.axis} × ${worst.ranks}`), bytes(total("bytes")), time(total("ns")), total("exposed") ? time(total("exposed")) : "hidden",
        worst.waited === null ? "never waited for" : time(worst.waited - worst.launched),
        [worst.exposed ? whyExposed(graph, worst) : "", el("small.below", {}, "hidden by ", by.nodes.length ? by.nodes.slice(0, 2).map(([i, t], k) => [k ? ", " : "", nodeLink(graph, i), ` ${time(t)}`]).flat() : "nothing", by.nodes.length > 2 ? ` and ${by.nodes.length - 2} more` : "")]]);
      tr.lastChild.className = "why";
      [...tr.children].forEach((cell, k) => { cell.dataset.title = k && k < 6 ? columns[k][0] : ""; });
      return tr;
    };
    box.replaceChildren(el("p.muted", {}, "The longest waits come first. A row with several collectives shows their sums, and the reason for the longest wait. Bytes count the whole tensor."),
      table(columns, alikeCollectives(graph).map((row) => row.members), line, 20));
  });
  return section;
}

// What runs: compiled pieces, CUDA graphs, the host

function runsPart() {
  const section = part("runs", "CUDA graphs and the host"), box = el("div", {});
  section.append(box);
  follow("graph", () => {
    const graph = shown(), parts = [], device = graph.segments.filter(([d]) => d).length;
    if (graph.segments.length) {
      parts.push(el("p", {}, account.head.device ? "" : "On a GPU: ", `${count(device, "CUDA graph")}, ${count(graph.host.length, "node")} on the host.`));
      if (graph.host.length) parts.push(table([["node", 0], ["module", 0], ["why it stays on the host", 0]], graph.host.map(([i, why]) => [nodeLink(graph, i), where(graph, i), why])));
      else parts.push(el("p.muted", {}, "Nothing needs the host: one launch replays the whole graph."));
    } else parts.push(el("p.muted", {}, "No CUDA graphs: the step runs on a CPU, or with --no-cuda-graph."));
    const groups = new Map();
    graph.pieces.forEach((p) => { if (!groups.has(p.name)) groups.set(p.name, []); groups.get(p.name).push(p); });
    if (groups.size) parts.push(el("h3", {}, "Pieces compiled by Inductor"), table([["structure", 0], ["uses", 1], ["nodes each", 1], ["from", 0], ["to", 0], [`time of all uses${FORECAST}`, 1]], [...groups].map(([name, uses]) => [el("code", {}, name), uses.length, uses[0].nodes, nodeLink(graph, uses[0].first), nodeLink(graph, uses[0].last),
      time(sum(uses.map((u) => { let t = 0; for (let i = u.first; i <= u.last; i++) if (graph.nodes.piece[i] === graph.pieces.indexOf(u)) t += graph.nodes.ns[i]; return t; })))])));
    else parts.push(el("p.muted", {}, account.head.device ? "Inductor compiled nothing." : "The forecast counts nodes that a compiler would fuse as one kernel; a node's card names the others in its kernel."));
    box.replaceChildren(...parts);
  });
  return section;
}
