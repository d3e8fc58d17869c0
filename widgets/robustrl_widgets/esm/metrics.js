// Metrics: a few curves, drawn as SVG. Outages are shaded; the ledger is written out and must balance.
const HUES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#b09a00", "#888888"];

function render({ model, el }) {
  const charts = h("div", { class: "charts" }), ledger = h("p", {}), race_words = h("p", { class: "ghost" });
  const bands = h("div", { class: "legend bands" }, h("span", {}, h("i", { style: { background: "var(--det)", opacity: "0.4" } }), "a role was ill: from its failure until it took part again"));
  const split = (rows) => [(rows ?? []).map((row) => row[0]), (rows ?? []).map((row) => row[1])];
  const view = open_view(model, el, "metrics", (picture) => {
    const steps = picture.steps ?? [], times = picture.times ?? [], outages = picture.outages ?? [];
    const phases = Object.entries(picture.phases ?? {}).map(([name, values]) => [phase_name(name), steps, values]);
    const race = picture.race?.words ? picture.race : null;
    bands.style.display = outages.length ? "" : "none";
    race_words.style.display = race ? "" : "none";
    if (race) race_words.replaceChildren(h("b", {}, race.words), " ", h("span", { class: "mut" }, race.label));
    const against = (title, mine, ghost, options) => chart(title, "seconds of training", [["you", ...split(mine)], ["the ghost", ...split(ghost)]], { low: 0, ghosts: ["the ghost"], ...options });
    const ettr = chart("Effective training time", "seconds", [["strict", (picture.ettrs ?? []).map((row) => row[0]), (picture.ettrs ?? []).map((row) => row[1])], ["paper's rule", (picture.ettrs ?? []).map((row) => row[0]), (picture.ettrs ?? []).map((row) => row[2])]], { low: 0, high: 1, outages });
    if (picture.head?.ettr_early) ettr.append(h("p", { class: "mut early" }, picture.head.ettr_early));
    charts.replaceChildren(
      ...(race ? [against("Optimizer steps", race.steps, race.ghost_steps, { steps: true }), against("Reward", race.reward, race.ghost_reward)]
        : [chart("Reward per step", "optimizer step", [["reward", steps, picture.reward ?? []]], { low: 0 })]),
      chart("Held-out accuracy", "weight version", [["accuracy", (picture.accuracy ?? []).map((row) => row[0]), (picture.accuracy ?? []).map((row) => row[1])]], { low: 0, high: 1, dots: true }),
      chart("Tokens per second", "seconds", Object.entries(picture.tokens ?? {}).map(([name, values]) => [name, times, values]), { low: 0, outages }),
      chart("Seconds of a step by phase", "optimizer step", phases, { low: 0 }),
      chart("Versions behind", "seconds", [["furthest rollout", times, picture.lag ?? []]], { low: 0, outages, steps: true }),
      ettr);
    const account = picture.ledger, dropped = Object.entries(account.dropped ?? {}), sum = dropped.reduce((total, [, count]) => total + count, 0);
    const balanced = account.started === account.consumed + sum + account.in_flight;
    ledger.replaceChildren(h("b", {}, balanced ? "The ledger balances: " : "The ledger does NOT balance: "),
      `${whole(account.started)} started = ${whole(account.consumed)} used + ${whole(sum)} dropped + ${whole(account.in_flight)} in flight`,
      dropped.length ? ` (dropped: ${dropped.map(([reason, count]) => `${count} ${reason}`).join(", ")})` : "");
  });
  view.root.append(h("h2", {}, "Metrics"), race_words, bands, charts, h("h2", {}, "Answers"), ledger);
  return () => view.close();
}
// No exponents: what is too small for three digits behind the point is nothing on these axes.
const nice = (value) => {
  const unit = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(value) >= 0.9995 * size), shown = unit ? value / unit[0] : value;
  return `${Number(shown.toFixed(Math.abs(shown) >= 99.95 ? 0 : Math.abs(shown) >= 9.995 ? 1 : Math.abs(shown) >= 0.9995 ? 2 : 3))}${unit ? unit[1] : ""}`;
};
const chart = (title, axis, series, { low, high, outages, dots, steps, ghosts } = {}) => {
  const [width, height, left, bottom] = [300, 130, 36, 18];
  const all = series.flatMap(([, xs, ys]) => ys.map((y, index) => [xs[index], y])).filter(([x, y]) => typeof x === "number" && typeof y === "number");
  const box = h("div", { class: "chart" }, h("h3", {}, title, " ", h("span", {}, axis)));
  if (!all.length) { box.append(h("p", { class: "mut" }, "no value yet")); return box; }
  const xs = all.map(([x]) => x), ys = all.map(([, y]) => y), [x0, x1] = [Math.min(...xs), Math.max(...xs)], y0 = low ?? Math.min(...ys);
  const top = high ?? Math.max(...ys), y1 = top > y0 ? top : y0 + 1;  // a curve that is flat still has an axis
  const X = (x) => left + (width - left - 4) * (x - x0) / (x1 - x0 || 1), Y = (y) => 6 + (height - bottom - 8) * (1 - (y - y0) / (y1 - y0 || 1));
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${series.map(([name, , ys]) => `${name} now ${nice(Number(ys.at(-1) ?? 0))}`).join(", ")}` });
  for (const [from, to] of outages ?? []) if (to > x0 && from < x1) drawing.append(svg("rect", { x: X(Math.max(from, x0)), y: 4, width: Math.max(1.5, X(Math.min(to, x1)) - X(Math.max(from, x0))), height: height - bottom - 4, fill: "var(--det)", opacity: 0.25 }));
  for (const y of [y0, y1]) {
    drawing.append(svg("line", { x1: left, x2: width - 4, y1: Y(y), y2: Y(y), stroke: "var(--line)" }), svg("text", { x: left - 4, y: Y(y) + 4, "text-anchor": "end" }));
    drawing.lastChild.textContent = nice(y);
  }
  for (const [x, anchor] of x1 - x0 > 1e-6 ? [[x0, "start"], [x1, "end"]] : [[x0, "start"]]) { drawing.append(svg("text", { x: X(x), y: height - 4, "text-anchor": anchor })); drawing.lastChild.textContent = nice(x); }
  series.forEach(([name, xs, ys], index) => {
    const faint = ghosts?.includes(name) ? { opacity: 0.5, "stroke-dasharray": "5 3" } : {};
    const points = ys.map((y, place) => typeof y === "number" ? [X(xs[place]), Y(y)] : null).filter(Boolean);
    const path = points.map(([x, y], place) => `${place ? (steps ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `L${x.toFixed(1)},${y.toFixed(1)}`) : `M${x.toFixed(1)},${y.toFixed(1)}`}`).join("");
    drawing.append(svg("path", { d: path, fill: "none", stroke: HUES[index % HUES.length], "stroke-width": 1.7, "stroke-linejoin": "round", ...faint }));
    if (dots || points.length === 1) for (const [x, y] of points) drawing.append(svg("circle", { cx: x, cy: y, r: 3, fill: HUES[index % HUES.length] }));
  });
  box.append(drawing);
  if (series.length > 1) box.append(h("div", { class: "legend" }, series.slice(0, 8).map(([name], index) => h("span", {}, h("i", { style: { background: HUES[index % HUES.length] } }), name))));
  return box;
};
export default { render };
