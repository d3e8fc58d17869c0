// TuningLab: signals as shares of their limits, truth, and what a setting says; sliders move the limits. Shares are drawn here, at once;
// verdicts and scores come from the kernel, one question at a time, the last move always.
const LANE = 30, LEFT = 130, WIDTH = 900, STEPS = 1000, TOP = 1.6, LEAST = 0.03;  // a share below it is less than half a pixel
const OUTCOMES = { detected: ["\u25bc", "ok", "found"], "false alarm": ["\u25b2", "bad", "FALSE ALARM"], missed: ["\u2715", "bad", "missed"], consequence: ["\u25bd", "mut", "had ended by itself"] };
const STYLE = `.rrl-tuning .lab { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 12px 22px; } .rrl-tuning .lab > :first-child { grid-column: 1 / -1; } .rrl-tuning .sls { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 0 18px; } .rrl-tuning .two { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 0 18px; align-items: start; } .rrl-tuning .sls h2 { grid-column: 1 / -1; } @container (max-width: 760px) { .rrl-tuning .lab { grid-template-columns: minmax(0, 1fr); } }
.rrl-tuning .bar { display: flex; flex-wrap: wrap; gap: 6px 8px; align-items: center; margin-bottom: 6px; } .rrl-tuning svg { width: 100%; display: block; } .rrl-tuning svg text { fill: var(--mut); font-size: 11px; }
.rrl-tuning svg text.role { fill: var(--ink); font-size: 12px; } .rrl-tuning .sl { display: grid; grid-template-columns: 1fr 52px; gap: 0 8px; margin-bottom: 5px; } .rrl-tuning .sl small { grid-column: 1 / 3; color: var(--mut); }
.rrl-tuning .sl input { width: 100%; padding: 0; margin: 0; accent-color: var(--rec); } .rrl-tuning .sl.moved small b { color: var(--rec); } .rrl-tuning .sl output { text-align: right; font-variant-numeric: tabular-nums; }
.rrl-tuning table { border-collapse: collapse; width: 100%; } .rrl-tuning td, .rrl-tuning th { padding: 1px 6px; text-align: right; font-variant-numeric: tabular-nums; } .rrl-tuning td:first-child { text-align: left; color: var(--mut); }
.rrl-tuning pre { background: var(--card); border-radius: 6px; padding: 6px 9px; margin: 6px 0; white-space: pre-wrap; color: var(--ink); } .rrl-tuning .why { color: var(--bad); min-height: 18px; } .rrl-tuning circle { cursor: pointer; }`;

function render({ model, el }) {
  let shown = {}, lanes = [], busy = false, again = false, wrong = false, adopt = true, still = "", moved = Promise.resolve();
  const sliders = new Map();
  const view = open_view(model, el, "tuning", (picture) => { shown = picture; draw(); }, null, true);
  const source = h("select", { "aria-label": "what is tuned on" }), runs = h("select", { "aria-label": "run shown", onchange: () => ask("look", { run: Number(runs.value) }) });
  const over = h("p", { class: "mut", style: { display: "none" } }), said = h("span", { class: "mut", role: "status" }), error = h("div", { class: "why", role: "alert" }), place = h("div", {}), list = h("div", { class: "sls" }), scores = h("div", {}), plot = h("div", {}), code = h("pre", {});
  const ask = async (verb, args) => {
    const answer = await view.ask(verb, args);
    if (answer.error || verb === "set" || !wrong) set_text(error, answer.error ?? "");
    if (answer.value?.said) set_text(said, answer.value.said);
    return answer;
  };
  const load = h("button", { onclick: async () => { set_text(said, "being made ready\u2026"); adopt = true; await ask("load", { source: source.value }); set_text(said, ""); } }, "load");
  const reset = h("button", { title: "what the sliders began with", onclick: () => { for (const each of sliders.values()) each.put(each.base); move(); } }, "reset");
  const keep = h("button", { onclick: async () => { await moved; await ask("compare", { on: !shown.b }); } }, "keep for comparison");
  const copy = h("button", { onclick: async () => { try { await navigator.clipboard.writeText(code.textContent); set_text(said, "copied"); } catch { getSelection()?.selectAllChildren(code); set_text(said, "select it and copy: this page may not"); } } }, "copy as code");
  const apply = h("button", { class: "danger", onclick: async () => { await moved; if (!wrong) await ask("apply"); } }, "apply to live job");
  view.root.append(h("style", {}, STYLE), h("h2", {}, "Tuning lab: what would other thresholds have said?"), h("div", { class: "bar" }, source, load, runs, reset, keep, copy, apply, said), over, error,
    h("div", { class: "lab" }, h("div", {}, place, h("div", { class: "legend" }, h("span", {}, h("b", { style: { color: "var(--ok)" } }, "\u25bc "), "found"), h("span", {}, h("b", { style: { color: "var(--bad)" } }, "\u25b2 "), "false alarm"), h("span", {}, h("b", { style: { color: "var(--bad)" } }, "\u2715 "), "missed"),
      h("span", {}, h("i", { style: { background: "var(--bad)", opacity: 0.3 } }), "a fault"), h("span", {}, h("i", { style: { background: "var(--ok)", opacity: 0.3, border: "1px dashed var(--ink)" } }), "harmless (dashed)"), h("span", {}, "- - the limit; hollow: the setting that was kept"))), list, h("div", {}, h("div", { class: "two" }, scores, plot), code)));

  const values = () => Object.fromEntries([...sliders].map(([path, each]) => [path, each.value()]));
  // What is refused is not what the picture shows: it cannot be applied.
  const judge = async () => {
    busy = true;
    while (again) { again = false; const answer = await ask("set", values()); wrong = Boolean(answer.error); view.root.dataset.took = String(answer.value?.ms ?? ""); }
    busy = false;
    enable();
  };
  const move = () => {
    again = true;
    if (!busy) moved = judge();
    redraw();
  };
  const enable = () => { for (const each of [runs, reset, keep, copy]) each.disabled = !shown.a; apply.disabled = !shown.a || wrong || Boolean(shown.closed); };
  let waiting = false;
  const redraw = () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; signals(); }); } };
  // What is the same is not drawn again: a slider would wait for it.
  const drawn = new Map();
  const anew = (name, what, make) => { const text = JSON.stringify(what); if (drawn.get(name) !== text) { drawn.set(name, text); make(); } };

  const make = (slider) => {
    const from = Math.log(slider.low), width = Math.log(slider.high) - from;
    const input = h("input", { type: "range", min: 0, max: STEPS, "aria-label": slider.path, oninput: () => { label(); move(); } });
    const output = h("output", {}), box = h("label", { class: "sl" }, h("small", {}, h("b", {}, slider.path), " ", slider.words ?? ""), input, output);
    const each = { box, base: slider.base, value: () => Math.exp(from + width * Number(input.value) / STEPS), put: (value) => { input.value = String(Math.round(STEPS * (Math.log(value) - from) / width)); label(); } };
    const label = () => { set_text(output, span(each.value())); set_class(box, `sl ${Math.abs(Math.log(each.value() / each.base)) > 0.02 ? "moved" : ""}`); };
    return each;
  };

  const draw = () => {
    const names = (shown.sources ?? []).join("\n");
    if (source.dataset.names !== names) { source.dataset.names = names; source.replaceChildren(...(shown.sources ?? []).map((name) => h("option", { value: name }, name))); }
    apply.style.display = shown.live ? "" : "none";
    const ended = shown.live && shown.closed ? `${shown.closed[0].toUpperCase()}${shown.closed.slice(1)}: nothing can be applied to it any more.` : "";
    set_text(over, ended);
    over.style.display = ended ? "" : "none";
    apply.title = ended;
    enable();
    if (!shown.a) { set_text(place, "No run is loaded yet: choose what to tune on, and load it."); return; }
    const now = `${shown.shown} ${shown.runs} ${shown.seconds} ${(shown.sliders ?? []).map((slider) => slider.base)}`;
    if (now !== still) { still = now; build(); }
    if (adopt && !busy) { if (wrong) set_text(error, ""); adopt = wrong = false; enable(); for (const [path, each] of sliders) each.put(shown.a.values[path]); }
    view.root.dataset.values = JSON.stringify(shown.a.values);
    set_text(keep, shown.b ? "drop the comparison" : "keep for comparison");
    set_text(code, shown.a.code);
    anew("table", [shown.a.score, shown.b?.score, shown.runs.length], table);
    anew("pareto", [shown.points, shown.todo], pareto);
    anew("marks", [shown.a.marks, shown.b?.marks], marks);
    redraw();
  };

  const X = (t) => LEFT + (WIDTH - LEFT - 8) * t / Math.max(shown.seconds, 1e-6), Y = (lane, share) => 16 + LANE * (lane + 1) - 4 - (LANE - 8) * Math.min(share, TOP) / TOP;
  const build = () => {
    runs.replaceChildren(...shown.runs.map((name, index) => h("option", { value: index, selected: index === shown.shown }, name)));
    if (list.dataset.made !== shown.sliders.map((slider) => slider.path + slider.base).join()) {
      list.dataset.made = shown.sliders.map((slider) => slider.path + slider.base).join();
      sliders.clear();
      for (const slider of shown.sliders) sliders.set(slider.path, make(slider));
      list.replaceChildren(h("h2", {}, "Limits"), ...[...sliders.values()].map((each) => each.box));
      adopt = true;
    }
    const height = 20 + LANE * shown.order.length + 14, drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `signals of ${shown.order.length} roles over ${span(shown.seconds)}` });
    const tick = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600].find((step) => shown.seconds / step <= 10) ?? 36000;
    for (let t = 0; t <= shown.seconds; t += tick) { drawing.append(svg("line", { x1: X(t), x2: X(t), y1: 16, y2: height - 14, stroke: "var(--line)" }), svg("text", { x: X(t), y: 11, "text-anchor": "middle" })); drawing.lastChild.textContent = `${t} s`; }
    lanes = shown.order.map((role, index) => {
      const name = svg("text", { class: "role", x: 0, y: Y(index, 0.4) });
      name.textContent = role;
      const below = svg("path", { fill: "none", stroke: "var(--rec)", "stroke-width": 1.6 }), above = svg("path", { fill: "none", stroke: "var(--bad)", "stroke-width": 2.2 });
      const truth = (shown.truth ?? []).filter((mark) => mark[2] === role).map(([start, end, , kind, expect]) => {
        const box = svg("rect", { x: X(start), width: Math.max(2, X(end) - X(start)), y: Y(index, TOP) - 2, height: LANE - 4, fill: expect === "failed" ? "var(--bad)" : expect === "well" ? "var(--ok)" : "var(--mut)", "fill-opacity": 0.22, ...(expect === "well" ? { stroke: "var(--ink)", "stroke-opacity": 0.5, "stroke-dasharray": "3 3" } : {}) }, svg("title", {}));
        box.firstChild.textContent = `${kind}, ${span(end - start)}${expect === "well" ? ", harmless" : ""}`;
        return box;
      });
      const group = svg("g", {});
      drawing.append(name, ...truth, svg("line", { x1: LEFT, x2: WIDTH - 8, y1: Y(index, 0), y2: Y(index, 0), stroke: "var(--line)" }), svg("line", { x1: LEFT, x2: WIDTH - 8, y1: Y(index, 1), y2: Y(index, 1), stroke: "var(--bad)", "stroke-dasharray": "3 4", opacity: 0.6 }), below, above, group);
      const samples = Object.entries(shown.signals?.[role] ?? {}).map(([path, points]) => [path, points.map(([t, value]) => [`M${X(t).toFixed(1)} ${Y(index, 0)}V`, value])]);
      return { role, index, below, above, group, samples, limits: "" };
    });
    drawn.delete("marks");
    place.replaceChildren(drawing);
  };
  const signals = () => {
    for (const lane of lanes) {
      const limits = lane.samples.map(([path]) => sliders.get(path)?.value() ?? Infinity), now = limits.join();
      if (now === lane.limits) continue;
      lane.limits = now;
      let below = "", above = "";
      lane.samples.forEach(([, points], place) => {
        for (const [foot, value] of points) {
          const share = value / limits[place];
          if (share < LEAST) continue;
          const stem = foot + Y(lane.index, share).toFixed(1);
          if (share >= 1) above += stem; else below += stem;
        }
      });
      lane.below.setAttribute("d", below);
      lane.above.setAttribute("d", above);
    }
  };
  const marks = () => {
    for (const lane of lanes) lane.group.replaceChildren();
    const sides = [[shown.a, "solid"], [shown.b, "hollow"]];
    for (const [side, kind] of sides) for (const [t, role, outcome, rule, delay] of side?.marks ?? []) {
      const lane = lanes.find((each) => each.role === role), [sign, tone, words] = OUTCOMES[outcome] ?? [];
      if (!lane || !sign) continue;
      const mark = svg("text", { x: X(t), y: Y(lane.index, kind === "solid" ? 1.15 : 0.1), "text-anchor": "middle", style: `font-size:${kind === "solid" ? 15 : 11}px;fill:${kind === "solid" ? `var(--${tone})` : "none"};stroke:var(--${tone});stroke-width:${kind === "solid" ? 0 : 1}` });
      mark.textContent = sign;
      mark.append(svg("title", {}));
      mark.lastChild.textContent = `${words}${rule ? `, rule ${rule}` : ""}${typeof delay === "number" ? `, after ${span(delay)}` : ""}`;
      lane.group.append(mark);
    }
  };
  const ROWS = [["found", (score) => `${score.detected} of ${score.faults}`], ["missed", (score) => score.missed], ["false alarms", (score) => score.false_alarms], ["delay, mean", (score) => span(score.mean)], ["delay, longest", (score) => span(score.max)], ["seconds lost", (score) => score.cost.toFixed(1)], ["nearest harmless", (score) => `${Math.round(100 * score.reach)} %`]];
  const table = () => {
    const sides = [shown.a, shown.b].filter(Boolean);
    scores.replaceChildren(h("table", {}, h("tr", {}, h("td", {}, shown.runs.length > 1 ? `all ${shown.runs.length} runs` : ""), h("th", {}, "now"), shown.b && h("th", {}, "kept")), ...ROWS.map(([name, get]) => h("tr", { title: name === "nearest harmless" ? shown.a.score.reach_of : null }, h("td", {}, name), ...sides.map((side) => h("td", { "data-score": side === shown.a ? name : null }, String(get(side.score))))))));
  };
  // The points stay the same elements while others come: a click is heard by the plot, as a point may move on between press and release.
  const choose = async (index) => { adopt = true; await ask("point", { point: index }); adopt = true; draw(); };
  const point_of = (event) => event.target?.dataset?.point ?? null;
  const size = [320, 190], dots = [], axes = svg("g", {}), front_line = svg("path", { fill: "none", stroke: "var(--rec)" });
  let pressed = null;
  const plotted = svg("svg", { viewBox: `0 0 ${size[0]} ${size[1]}`, role: "img" }, axes, front_line), plot_title = h("h2", {});
  plotted.addEventListener("pointerdown", (event) => { pressed = point_of(event) === null ? null : [point_of(event), event.clientX, event.clientY]; });
  plotted.addEventListener("click", (event) => {
    const here = pressed && Math.hypot(event.clientX - pressed[1], event.clientY - pressed[2]) < 6, index = here ? pressed[0] : point_of(event);
    pressed = null;
    if (index !== null) choose(Number(index));
  });
  plotted.addEventListener("keydown", (event) => { if (point_of(event) !== null && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); choose(Number(point_of(event))); } });
  const dot_at = (index) => {
    if (!dots[index]) {
      dots[index] = svg("circle", { "data-point": index, role: "button", "aria-label": `setting ${index}`, "stroke-opacity": 0.6 }, svg("title", {}));
      plotted.append(dots[index]);
    }
    return dots[index];
  };
  const pareto = () => {
    const points = shown.points ?? [], [width, height] = size, [left, bottom] = [40, 30], most = (place) => Math.max(1e-6, ...points.map((point) => point[place])) * 1.05;
    const [x1, y1] = [Math.sqrt(most(0)), most(1)], x = (value) => left + (width - left - 10) * Math.sqrt(value) / x1, y = (value) => 8 + (height - bottom - 8) * (1 - value / y1);
    const note = (words, at) => { const text = svg("text", at); text.textContent = words; return text; };
    plotted.setAttribute("aria-label", `${points.length} settings by false alarms and delay`);
    const none = points.every((point) => !point[0]);
    axes.replaceChildren(svg("path", { d: `M${left} 8V${height - bottom}H${width - 8}`, fill: "none", stroke: "var(--line)" }),
      note(none ? "no false alarm with any of these settings" : `false alarms per hour, to ${nice(x1 * x1)} (square root)`, { x: left, y: height - 14 }), note(`mean delay, to ${span(y1)}`, { x: left + 4, y: 16 }));
    const front = points.map((point, index) => [point, index]).filter(([point]) => point[2]).sort((a, b) => a[0][0] - b[0][0]);
    front_line.setAttribute("d", front.map(([point], index) => `${index ? "L" : "M"}${x(point[0])},${y(point[1])}`).join(""));
    points.forEach((point, index) => {
      const dot = dot_at(index), best = point[2], missed = point[3];
      const looks = { cx: x(point[0]), cy: y(point[1]), r: best ? 5 : 3, fill: best ? "var(--rec)" : missed ? "none" : "var(--mut)", stroke: missed ? "var(--mut)" : "none", "fill-opacity": best ? 1 : 0.6, "pointer-events": "all", tabindex: best ? 0 : -1 };
      for (const [name, value] of Object.entries(looks)) if (dot.getAttribute(name) !== String(value)) dot.setAttribute(name, String(value));
      set_text(dot.firstChild, `${nice(point[0])} false alarms per hour, mean delay ${span(point[1])}${missed ? `, ${missed} missed` : ""}: click to load it`);
    });
    for (const dot of dots.splice(points.length)) dot.remove();
    set_text(plot_title, `Settings drawn at random${shown.todo ? `, ${shown.todo} to come` : ""}`);
    if (!plot.firstChild) plot.append(plot_title, plotted);
  };
  const nice = (value) => Number(value.toPrecision(2)).toString();
  return () => view.close();
}
export default { render };
