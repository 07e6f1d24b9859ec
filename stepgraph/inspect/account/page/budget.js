// Where a peak of memory was asked for: what it costs, what another peak would change, and what travels to the host.

function budgetPart() {
  const found = account.head.over_peak, moved = graphs.flatMap((graph) => graph.copies.map(([node, back, size, ns, exposed]) => ({ graph, node: back ? node : graph.nodes.inputs[node][0], back, bytes: size, ns, exposed })));
  if (!found && !moved.length) return null;
  const total = (of, key) => sum(of.map((c) => c.graph.calls * c[key])), away = moved.filter((c) => !c.back), back = moved.filter((c) => c.back);
  const least = found && found.curve[found.curve.length - 1];
  return part("budget", "Budget",
    el("p.muted", {}, "What it costs to meet the requested peak: a forecast of one step on one rank."),
    figures([
      ["peak asked for", found && bytes(found.asked)], ["expected", found && bytes(found.chosen[0])],
      ["added to the step", found && (seconds(found.chosen[1]) || "nothing"), "next to keeping everything"],
      ["everything kept", found && bytes(found.curve[0][0])], ["least peak", found && bytes(least[0]), found && `adds ${seconds(least[1])}`],
      ["offloaded", moved.length && bytes(total(away, "bytes")), moved.length && `${bytes(total(back, "bytes"))} come back`],
      ["copies", moved.length && time(total(moved, "ns")), moved.length && (total(moved, "exposed") ? `computation waits for ${time(total(moved, "exposed"))}` : "all hidden by computation")]]),
    found && [el("h3", {}, "Time over peak"), peakChart(found), otherPeaks(found)], moved.length > 0 && [el("h3", {}, "What is offloaded"), offloadTable(away)]);
}
const seconds = (value) => time(Math.abs(value) * 1e9);

/** Seconds that each peak adds to the step; the one that was chosen is marked. */
function peakChart(found) {
  const points = [...found.curve, found.chosen].sort((a, b) => a[0] - b[0]), low = points[0][0], high = Math.max(points[points.length - 1][0], found.asked), most = Math.max(...points.map(([, s]) => s)) * 1.08 || 1;
  const canvas = chart(190, (context, width, height) => {
    const base = height - 20, x = (size) => LABEL + (size - low) / (high - low || 1) * (width - LABEL - 12), y = (s) => base - s / most * (base - 8);
    context.fillStyle = color("muted"); context.strokeStyle = color("line"); context.textBaseline = "middle"; context.textAlign = "right";
    const each = niceStep(most / 4);
    for (let s = 0; s <= most; s += each) { context.beginPath(); context.moveTo(LABEL, y(s)); context.lineTo(width, y(s)); context.stroke(); context.fillText(s ? `+${seconds(s)}` : "0", LABEL - 8, y(s)); }
    const unit = 2 ** (10 * Math.floor(Math.log2(Math.max(high, 1)) / 10)), step = unit * niceStep((high - low) / unit / 6);
    context.textAlign = "center";
    for (let size = Math.ceil(low / step) * step; size <= high; size += step) context.fillText(`${Math.round(size / unit * 1000) / 1000} ${bytes(unit).split(" ")[1]}`, Math.min(x(size), width - 30), height - 8);
    context.strokeStyle = context.fillStyle = color("activations"); context.lineWidth = 2; context.beginPath();
    points.forEach(([size, s], k) => { k ? context.lineTo(x(size), y(s)) : context.moveTo(x(size), y(s)); }); context.stroke();
    context.fillStyle = color("ink"); context.beginPath(); context.arc(x(found.chosen[0]), y(found.chosen[1]), 4, 0, 7); context.fill();
    drawMarker(context, x(found.asked), base, color("ink"));
  });
  canvas.setAttribute("role", "img"); canvas.setAttribute("aria-label", "Time that each peak of memory adds to the step; the table below lists some peaks");
  follow("theme", () => canvas.redraw());
  return canvas;
}
function otherPeaks(found) {
  const columns = [["peak", 1], ["added to the step", 1], ["next to this one", 0]];
  const rows = [...found.others, [found.asked, 0, true]].sort((a, b) => b[0] - a[0]);
  return table(columns, rows, ([size, s, here]) => cells(columns,
    [bytes(size), seconds(found.chosen[1] + s), here ? size < found.curve[0][0] ? "asked for" : `asked for, and ${found.state_s ? "all but optimizer state" : "everything"} is kept` : s < 0 ? `${seconds(s)} less` : s ? `${seconds(s)} more` : "the same"]));
}

/** Copies of one module and shape in equal blocks in one row, the most bytes first. */
function offloadTable(away) {
  const rows = new Map(), columns = [["bytes", 1], ["module", 0], ["tensor", 0, 1], ["copy", 1]];
  for (const { graph, node, bytes, ns } of away) {
    const path = graph.fold(graph.path(node)), key = [graph.name, path, graph.type(node)].join("|");
    if (!rows.has(key)) rows.set(key, { graph, node, path, members: 0, bytes: 0, ns: 0 });
    const row = rows.get(key); row.members++; row.bytes += bytes; row.ns += ns;
  }
  return table(columns, [...rows.values()].sort((a, b) => b.bytes - a.bytes), ({ graph, node, path, members, bytes: size, ns }) => cells(columns,
    [bytes(size), moduleLink(graph, path), [nodeLink(graph, node), ` × ${members} `, el("code.shape", {}, graph.type(node))], time(ns)]), 12);
}
