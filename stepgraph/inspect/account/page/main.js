// Puts the parts together; search, links, light and dark.

const PARTS = [["timeline", "Timeline"], ["memory", "Memory"], ["modules", "Modules"], ["passes", "Passes"], ["collectives", "Collectives"], ["runs", "CUDA graphs"]];
const budget = budgetPart();
if (budget) PARTS.splice(2, 0, ["budget", "Budget"]);
if (account.profile) PARTS.splice(PARTS.findIndex(([id]) => id === "passes"), 0, ["measured", "Measured"]);
if (account.pipeline) PARTS.unshift(["pipeline", "Pipeline"]);

function themed(theme) { document.documentElement.dataset.theme = theme; changed("theme"); }
function remembered() { try { return localStorage.getItem("stepgraph-theme"); } catch { return null; } }
const dark = matchMedia("(prefers-color-scheme: dark)");
themed(remembered() || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => { if (!remembered()) themed(dark.matches ? "dark" : "light"); });
document.getElementById("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("stepgraph-theme", next); } catch { /* a file opened without storage */ }
  themed(next);
});

document.getElementById("parts").append(...PARTS.map(([id, title]) => el("a", { href: `#${id}` }, title)));
document.getElementById("main").replaceChildren(...[headPart(), pipelinePart(), timelinePart(), memoryPart(), budget, modulesPart(), measuredPart(), passesPart(), collectivesPart(), runsPart()].filter(Boolean));
follow("graph", drawAnswers);

// Links: #node/GRAPH/NAME, #module/GRAPH/PATH, #pass/GRAPH/NAME, #PART

function follow_link() {
  const [kind, graphName, name] = decodeURIComponent(location.hash.slice(1)).split("/");
  const k = graphs.findIndex((g) => g.name === graphName);
  if (kind === "node") {
    const i = k < 0 ? undefined : graphs[k].number.get(name);
    if (i === undefined) return;
    choose(k); state.node = i; state.module = null; drawCard(graphs[k], i);
    const at = graphs[k].at[i] / graphs[k].end;
    if (at < state.from || at > state.to) { const width = state.to - state.from; state.from = Math.min(Math.max(0, at - width / 2), 1 - width); state.to = state.from + width; changed("window"); }
    changed("node");
  } else if (kind === "module" && k >= 0) {
    choose(k); state.node = null; state.module = name; drawModule(graphs[k], name); changed("node");
  } else if (kind === "pass") {
    const details = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (details) { details.open = true; const fold = details.closest(".idle"); if (fold) fold.open = true; details.scrollIntoView(); }
  }
}
addEventListener("hashchange", follow_link);

// Search

const search = document.getElementById("search"), found = document.getElementById("found");
let entries = null, at = 0;
function everything() {
  const all = PARTS.map(([id, title]) => ({ text: title, hint: "part of the page", href: `#${id}` }));
  for (const p of account.passes) all.push({ text: p.name, hint: `pass: ${p.skipped ? "skipped" : p.summary || "found nothing to do"}`, href: `#pass/${p.graph || "step"}/${p.name}` });
  for (const g of graphs) for (const path of new Set(g.paths.filter(Boolean).flatMap((p) => [g.fold(p), p]))) all.push({ text: path, hint: ["module", graphs.length > 1 && g.name].filter(Boolean).join(" of "), href: `#module/${g.name}/${path}` });
  for (const g of graphs) for (let i = 0; i < g.size; i++) {
    const input = g.inputOf.get(i);
    all.push({ text: g.nodes.name[i], hint: [g.operator(i), g.type(i), where(g, i), input && input.name, graphs.length > 1 && g.name].filter(Boolean).join(" · "), more: `${g.source(i)[0]} ${g.source(i)[1]} ${g.role(i)} ${g.region(i)}`, href: `#node/${g.name}/${g.nodes.name[i]}` });
  }
  for (const e of all) e.low = `${e.text} ${e.hint} ${e.more || ""}`.toLowerCase();
  return all;
}
function look() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  found.hidden = !words.length; at = 0;
  search.setAttribute("aria-expanded", !found.hidden); search.removeAttribute("aria-activedescendant");
  if (!words.length) return;
  entries ||= everything();
  const hits = entries.filter((e) => words.every((w) => e.low.includes(w)));
  const rank = (e) => (e.text.toLowerCase() === words[0] ? 0 : e.text.toLowerCase().startsWith(words[0]) ? 1 : 2);
  hits.sort((a, b) => rank(a) - rank(b));
  found.replaceChildren(...hits.slice(0, 60).map((e, k) => el("li", { id: `found-${k}`, role: "option", "aria-selected": k === 0 ? "true" : "false" }, el("a", { href: e.href, tabindex: -1, onclick: () => { found.hidden = true; } }, e.text, " ", el("small", {}, e.hint)))),
    el("li", {}, el("small", {}, hits.length > 60 ? `${hits.length} found; the first 60` : hits.length ? `${hits.length} found` : "no match")));
}
search.addEventListener("input", look);
search.addEventListener("focus", look);
search.addEventListener("keydown", (event) => {
  const options = [...found.querySelectorAll('[role="option"]')];
  if (event.key === "Escape") { found.hidden = true; search.blur(); }
  if (!options.length) return;
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    options[at].setAttribute("aria-selected", "false");
    at = (at + (event.key === "ArrowDown" ? 1 : options.length - 1)) % options.length;
    options[at].setAttribute("aria-selected", "true"); options[at].scrollIntoView({ block: "nearest" }); search.setAttribute("aria-activedescendant", options[at].id);
  } else if (event.key === "Enter") { location.hash = options[at].querySelector("a").getAttribute("href").slice(1); found.hidden = true; search.blur(); }
});
document.addEventListener("click", (event) => { if (!event.target.closest(".search")) found.hidden = true; });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== search) { event.preventDefault(); search.focus(); }
  if (event.key === "Escape" && !document.getElementById("card").hidden && document.activeElement !== search) { location.hash = ""; closeCard(); }
});

follow_link();
document.documentElement.dataset.ready = "yes";
