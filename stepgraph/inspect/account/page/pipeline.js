// The schedule of a pipeline: a lane for each rank, its computations and between them the bubble.

const PIPE_KINDS = { forward: ["forward", "forward"], backward: ["backward", "backward"], backward_input: ["backward for inputs", "backward"], backward_weight: ["backward for weights", "optimizer-phase"], gather: ["gather of parameters", "communication"], reduce: ["reduction of gradients", "exposed"] };

function pipelinePart() {
  const p = account.pipeline;
  if (!p) return null;
  const canvas = lanes(p, p, "Schedule of the pipeline by the forecast; the table below has the same figures");
  const chunks = p.stages.length / p.ranks, kinds = Object.keys(PIPE_KINDS).filter((kind) => p.spans.some((s) => s[1] === kind));
  const rows = Array.from({ length: p.ranks }, (_, rank) => {
    const own = p.spans.filter((s) => s[0] === rank), stages = p.stages.flatMap((r, stage) => (r === rank ? [stage] : []));
    return [el("span.kind", {}, rank === p.rank ? el("b", {}, `rank ${rank}, shown below`) : `rank ${rank}`), stages.join(", "), ...kinds.map((kind) => time(sum(own.filter((s) => s[1] === kind).map((s) => s[5] - s[4])))), `${time(p.waiting[rank] * p.ns)} ${percent(p.waiting[rank])}`, stages.map((s) => p.in_flight[s]).join(", ")];
  });
  return part("pipeline", "Pipeline",
    el("p.muted", {}, `${p.stages.length} stages on ${p.ranks} ranks, schedule ${p.schedule}, ${account.head.options.accumulate} microbatches. The bubble is the share of the schedule in which ranks do not compute, averaged over ranks.`),
    p.measured && [el("h3", {}, `Measured: ${time(p.measured.ns)}, bubble ${percent(account.head.measured.bubble)}`), lanes(p, p.measured, "Schedule of the pipeline as measured in the median step")],
    el("h3", {}, `${p.measured ? `Forecast for ${account.head.gpu}` : "Schedule"}: ${time(p.ns)}, bubble ${percent(p.bubble)}, then ${time(p.after_ns)} for the update`), canvas,
    legend([...kinds.map((kind) => PIPE_KINDS[kind]), ["bubble", "bubble", true]]),
    el("p.muted.note", {}, `Numbers are microbatches${chunks > 1 ? "; a rank's later stages are framed" : ""}. ${p.assumed ? "The forecast assumes that stages of other ranks cost as much as this rank's. " : ""}Click a computation of rank ${p.rank} for its graph.`),
    table([["", 0], [chunks > 1 ? "stages" : "stage", 0], ...kinds.map((kind) => [PIPE_KINDS[kind][0], 1]), ["waits", 1], ["most microbatches in flight", 1]], rows));
}

// ``q``: the spans that are drawn and the ns that they take, of the pipeline ``p``.
function lanes(p, q, label) {
  const lane = p.ranks > 16 ? 14 : 28, canvas = chart(p.ranks * lane + 26, (context, width) => drawPipeline(context, width, p, q, lane));
  canvas.setAttribute("role", "img"); canvas.setAttribute("aria-label", label);
  const hit = (event) => { const box = canvas.getBoundingClientRect(); return spanAt(q, lane, event.clientX - box.left, event.clientY - box.top, canvas.clientWidth); };
  canvas.addEventListener("pointermove", (event) => { const span = hit(event); canvas.style.cursor = span && graphOf(span) ? "pointer" : "default"; tip(span ? spanText(p, span) : "", event.clientX, event.clientY); });
  canvas.addEventListener("pointerleave", () => tip(""));
  canvas.addEventListener("click", (event) => { const span = hit(event), graph = span && graphOf(span); if (graph) { tip(""); choose(graphs.indexOf(graph)); document.getElementById("timeline").scrollIntoView(); } });
  follow("theme", () => canvas.redraw());
  return canvas;
}

function graphOf([rank, kind, stage]) { return rank === account.pipeline.rank ? graphs.find((g) => g.name === `${kind}.${stage}`) : undefined; }
function spanText(p, [rank, kind, stage, microbatch, start, end]) {
  return `${PIPE_KINDS[kind][0]}${microbatch === null ? ", once for all microbatches" : ` of microbatch ${microbatch}`}\nstage ${stage} on rank ${rank}\n${time(end - start)}, starts at ${time(start)}`;
}
function spanAt(p, lane, px, py, width) {
  const rank = Math.floor(py / lane), t = (px - LABEL) / (width - LABEL) * p.ns;
  return px < LABEL ? undefined : p.spans.find((s) => s[0] === rank && s[4] <= t && t <= s[5]);
}

function drawPipeline(context, width, p, q, lane) {
  const x = (t) => LABEL + t / q.ns * (width - LABEL), paper = color("paper"), ink = color("ink"), muted = color("muted");
  const tones = Object.fromEntries(Object.entries(PIPE_KINDS).map(([kind, [, name]]) => [kind, color(name)])), hatched = stripes(context, color("bubble"));
  for (let rank = 0; rank < p.ranks; rank++) { context.fillStyle = hatched; context.fillRect(LABEL, rank * lane + 2, width - LABEL, lane - 4); }
  context.textBaseline = "middle"; context.textAlign = "center";
  for (const [rank, kind, stage, microbatch, start, end] of q.spans) {
    const a = x(start), b = x(end), y = rank * lane + 2, high = lane - 4;
    context.fillStyle = tones[kind]; context.fillRect(a, y, b - a, high);
    if (b - a > 3) { context.strokeStyle = paper; context.strokeRect(a, y, b - a, high); }
    if (stage >= p.ranks && b - a > 8) { context.strokeStyle = "#000"; context.strokeRect(a + 2.5, y + 2.5, b - a - 5, high - 5); }
    if (b - a > 18 && lane > 20 && microbatch !== null) { context.fillStyle = inkOn(tones[kind]); context.fillText(microbatch, (a + b) / 2, y + high / 2 + 1); }
  }
  context.textAlign = "left";
  for (let rank = 0; rank < p.ranks; rank++) if (lane > 20 || rank % 4 === 0) { context.fillStyle = rank === p.rank ? ink : muted; context.fillText(`rank ${rank}`, 0, rank * lane + lane / 2); }
  const step = niceStep(q.ns / Math.max(2, (width - LABEL) / 110));
  context.fillStyle = muted; context.textBaseline = "top";
  for (let t = 0; t <= q.ns; t += step) { const text = time(t), half = context.measureText(text).width / 2; context.fillText(text, Math.min(Math.max(x(t) - half, LABEL), width - 2 * half), p.ranks * lane + 6); }
}
