"use strict";
// The account, its graphs with what can be read off them, and numbers as text.

const account = JSON.parse(document.getElementById("account").textContent);
const PHASES = account.phases, KINDS = account.kinds, WORK = account.work;
const WORK_NAMES = {
  products: "matrix products", attention: "attention", norms: "norms",
  elementwise: "elementwise, sums and copies", update: "optimizer and clipping", communication: "around collectives",
};

/** One graph: `nodes` are columns; here are the ways between them. */
class Graph {
  constructor(data) {
    Object.assign(this, data);
    const n = this.nodes;
    this.size = n.name.length;
    this.number = new Map(n.name.map((name, i) => [name, i]));
    this.users = Array.from({ length: this.size }, () => []);
    n.inputs.forEach((inputs, i) => new Set(inputs).forEach((source) => this.users[source].push(i)));
    this.collectiveOf = new Map();
    for (const c of this.collectives) { this.collectiveOf.set(c.node, c); if (c.wait !== null) this.collectiveOf.set(c.wait, c); }
    this.storageOf = new Map(this.storages.node.map((node, i) => [node, i]));
    this.inputOf = new Map(this.inputs.map(([node, kind, name]) => [node, { kind, name }]));
    this.hostOf = new Map(this.host);
    this.madeOf = new Map(this.made);
    this.members = new Map();
    n.kernel.forEach((kernel, i) => { if (kernel >= 0) { if (!this.members.has(kernel)) this.members.set(kernel, []); this.members.get(kernel).push(i); } });
    this._times();
    this._folds = new Map();
  }

  /** `at[i]`: when node i runs, ns; nodes that cost nothing run where the ones before them end. */
  _times() {
    const { ns, start } = this.nodes;
    const waits = new Map(this.collectives.filter((c) => c.waited !== null).map((c) => [c.wait, c.waited + c.exposed]));
    this.at = new Float64Array(this.size);
    let now = 0;
    for (let i = 0; i < this.size; i++) {
      if (waits.has(i)) now = Math.max(now, waits.get(i));
      this.at[i] = ns[i] ? start[i] : now;
      now = Math.max(now, this.at[i] + ns[i]);
    }
    this.end = Math.max(now, this.step_ns, 1);
  }

  path(i) { return this.paths[this.nodes.path[i]]; }
  phase(i) { return PHASES[this.nodes.phase[i]]; }
  type(i) { const text = this.types[this.nodes.type[i]]; return text === "?" ? "" : text; }
  source(i) { return this.sources[this.nodes.source[i]]; }
  region(i) { return this.regions[this.nodes.region[i]]; }
  role(i) { return this.roles[this.nodes.role[i]]; }
  operator(i) { return this.calls_text[this.nodes.call[i]].split("(")[0]; }
  /** Parts of the call's text: strings, and numbers of the nodes that it reads. */
  call(i) {
    const inputs = this.nodes.inputs[i], parts = [];
    this.calls_text[this.nodes.call[i]].split("$").forEach((text, k) => { if (k) parts.push(inputs[k - 1]); if (text) parts.push(text); });
    return parts;
  }
  /** A module path with `*` for the number of a repeated block. */
  fold(path) {
    if (!this._folds.has(path)) {
      const block = this.blocks.find((b) => path === b || path.startsWith(b + "."));
      this._folds.set(path, block ? block.replace(/[^.]+$/, "*") + path.slice(block.length) : path);
    }
    return this._folds.get(path);
  }
  /** Whether storage s lies in memory while node i runs. */
  alive(s, i) { const { node, last } = this.storages; return last[s] >= this.size || (node[s] <= i && i <= last[s]); }
}

const graphs = account.graphs.map((data) => new Graph(data));
const sum = (values) => { let total = 0; for (const v of values) total += v; return total; };

/** The memory of a graph over its nodes: `kinds[k][i]` bytes of kind k while node i runs, `total`, and where it peaks. */
function memoryOver(graph) {
  if (graph._memory) return graph._memory;
  const { node, bytes, kind, last } = graph.storages;
  const kinds = KINDS.map((name) => new Float64Array(graph.size + 1).fill(0));
  const held = KINDS.map((name) => graph.other_graphs[name] || 0);
  for (let s = 0; s < node.length; s++) {
    if (last[s] >= graph.size) held[kind[s]] += bytes[s];
    else { kinds[kind[s]][node[s]] += bytes[s]; kinds[kind[s]][last[s] + 1] -= bytes[s]; }
  }
  const total = new Float64Array(graph.size);
  kinds.forEach((column, k) => { let now = held[k]; for (let i = 0; i < graph.size; i++) { now += column[i]; column[i] = now; total[i] += now; } });
  let peak = 0;
  for (let i = 1; i < graph.size; i++) if (total[i] > total[peak]) peak = i;
  return (graph._memory = { kinds, total, peak });
}

// Numbers as text

function digits(value) { return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2); }
function time(ns) {
  if (ns === null || ns === undefined || isNaN(ns)) return "";
  if (!ns) return "0";
  const [size, unit] = ns >= 1e9 ? [1e9, "s"] : ns >= 1e6 ? [1e6, "ms"] : ns >= 1e3 ? [1e3, "µs"] : [1, "ns"];
  return `${digits(ns / size)} ${unit}`;
}
function bytes(size) {
  if (!size) return size === 0 ? "0" : "";
  for (const [unit, power] of [["GiB", 30], ["MiB", 20], ["KiB", 10]]) if (size >= 2 ** power) return `${digits(size / 2 ** power)} ${unit}`;
  return `${size} B`;
}
function big(value, unit) {
  if (!value) return value === 0 ? "0" : "";
  for (const [prefix, power] of [["P", 15], ["T", 12], ["G", 9], ["M", 6], ["k", 3]]) if (value >= 10 ** power) return `${digits(value / 10 ** power)} ${prefix}${unit}`;
  return `${digits(value)} ${unit}`;
}
function percent(part) { return part === null || part === undefined || !isFinite(part) ? "" : `${(100 * part).toFixed(part < 0.0995 ? 1 : 0)}%`; }
function count(n, word) { return `${n.toLocaleString("en")} ${word}${n === 1 ? "" : word.endsWith("s") ? "es" : "s"}`; }
