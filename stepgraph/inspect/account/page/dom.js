// Making elements, links to nodes, and what is chosen: the graph, the node, the window of time.

/** An element: `el("p.note", {title: "x"}, "text", child)`. */
function el(form, attributes = {}, ...children) {
  const [tag, ...classes] = form.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

const state = { graph: 0, node: null, module: null, from: 0, to: 1, listeners: [] };
const shown = () => graphs[state.graph];
/** Call `draw` now and whenever `what` ("graph", "node", "window", "theme") changes. */
function follow(what, draw) { state.listeners.push([what, draw]); draw(); }
function changed(what) { for (const [on, draw] of state.listeners) if (on.includes(what)) draw(); }

function nodeLink(graph, i, text) {
  return el("a.node", { href: `#node/${graph.name}/${graph.nodes.name[i]}` }, text || graph.nodes.name[i]);
}
function moduleLink(graph, path, text) { return el("a.module", { href: `#module/${graph.name}/${path}` }, text || path || "the model"); }
/** Whether node i is in the module `path`, in which "*" is any block's number. */
function inside(graph, i, path) { return !path || [graph.path(i), graph.fold(graph.path(i))].some((p) => p === path || p.startsWith(`${path}.`)); }
/** Whether one of two modules is in the other. */
function related(graph, path, module) { return !module || [path, graph.fold(path)].some((p) => `${p}.`.startsWith(`${module}.`) || `${module}.`.startsWith(`${p}.`)); }
/** "in layers.0.attn, backward, llama3.py:146" */
function where(graph, i) { return [graph.path(i) || "the model", graph.phase(i), graph.source(i)[0].split("/").pop()].filter(Boolean).join(", "); }
function swatch(color, hatched) { return el("i.swatch" + (hatched ? ".hatched" : ""), { style: `--c: var(--${color})` }); }
function legend(entries) { return el("p.legend", {}, entries.map(([name, color, hatched]) => el("span", {}, swatch(color, hatched), name))); }
function part(id, title, ...children) { return el("section", { id }, el("h2", {}, el("a", { href: `#${id}` }, title)), ...children); }
/** Where a run has measured times too, that a time is not one of them. */
const FORECAST = account.head.device ? `, forecast for ${account.head.gpu}` : "";
/** A row of cells, `columns` being [title, is a number, can be left out on a narrow screen]. */
function cells(columns, values, tag = "td") { return el("tr", {}, values.map((value, k) => el(tag + (columns[k][1] ? ".number" : "") + (columns[k][2] ? ".spare" : ""), tag === "th" ? { scope: "col" } : {}, value))); }
/** A table of `columns` with numbers aligned to the right; `line` makes a row of each of `rows`, `most` of them at first. */
function table(columns, rows, line = (values) => cells(columns, values), most = Infinity) {
  const body = el("tbody"), more = growing(rows, most, line, body);
  return el("div", {}, el("div.wide", {}, el("table", {}, el("thead", {}, cells(columns, columns.map(([title]) => title), "th")), body)), more);
}
/** The button of a row that shows one row for each of its `members`. */
function folding(members, line) {
  return el("button.toggle", { type: "button", "aria-label": "each of them", onclick: (event) => {
    const tr = event.target.closest("tr"), open = tr.classList.toggle("open");
    event.target.textContent = open ? "▾" : "▸";
    if (!open) { while (tr.nextSibling?.classList?.contains("folded")) tr.nextSibling.remove(); return; }
    const each = members.map(line); each.forEach((e) => e.classList.add("folded")); tr.after(...each);
  } }, "▸");
}
/** Append the first `most` of what `make` gives for `items` to `body`; a button for the rest, or nothing. */
function growing(items, most, make, body) {
  body.append(...items.slice(0, most).map(make));
  if (items.length <= most) return null;
  const more = el("button.more", { type: "button", onclick: () => { more.remove(); body.append(...items.slice(most).map(make)); } }, `show ${items.length - most} more`);
  return more;
}
function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }
function tip(text, x, y) {
  const box = document.getElementById("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const width = Math.min(box.offsetWidth, innerWidth - 16);
  box.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - width - 8))}px`;
  box.style.top = `${y + 18 + box.offsetHeight > innerHeight ? y - box.offsetHeight - 10 : y + 18}px`;
}
/** A canvas, `height` pixels high at first: `draw(context, width, height)`. */
function chart(height, draw) {
  const canvas = el("canvas", { tabindex: 0 });
  canvas.style.height = `${height}px`;
  canvas.redraw = () => { // sharp on any screen
    const width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
    if (!width) return;
    canvas.width = width * scale; canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "12px system-ui, sans-serif";
    draw(context, width, height);
  };
  new ResizeObserver(() => canvas.redraw()).observe(canvas);
  return canvas;
}
/** Stripes of a colour, which mark exposed communication for colour-blind readers too. */
function stripes(context, tone) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const c = tile.getContext("2d");
  c.fillStyle = tone; c.fillRect(0, 0, 8, 8);
  c.strokeStyle = color("paper"); c.lineWidth = 2;
  for (const x of [-4, 4, 12]) { c.beginPath(); c.moveTo(x - 4, 8); c.lineTo(x + 4, 0); c.stroke(); }
  return context.createPattern(tile, "repeat");
}
