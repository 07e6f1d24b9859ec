// How another step differs.

function comparePart() {
  if (!difference) return null;
  const [left, right] = difference.names, d = difference, value = (v) => v === null || v === undefined || v === "" ? "none" : String(v);
  const figure = (name, v) => v === null || v === undefined ? "" : /bytes/i.test(name) ? bytes(v) : name.endsWith("_ms") ? time(v * 1e6) : /(mfu|bubble)$/.test(name) ? percent(v) : /loss$/.test(name) ? v.toFixed(4) : name === "FLOPs" ? big(v, "") : Number(v).toLocaleString("en", { maximumFractionDigits: 1 });
  const change = (a, b) => !a || b === null ? "" : `${b >= a ? "+" : "−"}${percent(Math.abs(b / a - 1))}`;
  const section = part("compare", "Compared", el("p", {}, "This part compares ", el("b", {}, left), " with ", el("b", {}, right), `. The rest of the page shows ${left}.`));
  section.append(el("h3", {}, "Options"), d.options.length ? table([["option", 0], [left, 0], [right, 0]], d.options.map(([k, a, b]) => [k, value(a), value(b)])) : el("p", {}, "All options are the same."));
  section.append(el("h3", {}, "What a step costs"), table([["", 0], [left, 1], [right, 1], ["change", 1]], d.figures.filter(([, a, b]) => a || b).map(([k, a, b]) => [k.replaceAll("_", " ").replace(/ ms$/, ""), figure(k, a), figure(k, b), a === b ? el("span.muted", {}, "same") : change(a, b)])));
  if (d.modules.length) section.append(el("h3", {}, "Modules whose time differs"), table([["module", 0], ["phase", 0], [left, 1], [right, 1], ["difference", 1]], d.modules.slice(0, 25).map(([path, phase, a, b]) => [path || "the model", PHASES[phase], time(a), time(b), `${b > a ? "+" : "−"}${time(Math.abs(b - a))}`])));
  if (d.passes.length) section.append(el("h3", {}, "Passes"), table([["pass", 0], [left, 0], [right, 0]], d.passes));
  section.append(el("h3", {}, "Nodes"));
  if (!d.nodes.length) section.append(el("p", {}, "Every module calls the same operators, in the same order, on the same shapes."));
  const list = el("div", {});
  const more = growing(d.nodes, 30, (f) => {
    const graph = graphs.find((g) => g.name === f.graph), body = el("div", {}), tail = (lines, more) => more ? [...lines, `... ${more} more`] : lines;
    const details = el("details", {}, el("summary", {}, el("span.name", {}, f.path || "the model"), PHASES[f.phase], graphs.length > 1 ? ` of ${f.graph}` : "", el("small", {}, ` ${f.a.length + f.more[0]} nodes only in ${left}, ${f.b.length + f.more[1]} only in ${right}${f.count > 1 ? `, the same in ${f.count} modules` : ""}`)), body);
    details.addEventListener("toggle", () => { if (details.open && !body.firstChild) body.append(f.node !== null && graph ? el("p.note", {}, "first: ", nodeLink(graph, f.node)) : "", sides(tail(f.a, f.more[0]), tail(f.b, f.more[1]), left, right, null)); });
    return details;
  }, list);
  section.append(list, more || "", d.left_out ? el("p.muted", {}, `${d.left_out} more differences are not listed.`) : "");
  return section;
}
