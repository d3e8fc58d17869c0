// Timeline: one lane per role, its phases and recoveries as bars, faults and steps as marks. Drawn by Bokeh, fed here.
const WORDS = { w: "working", i: "waiting (normal)", d: "detect", r: "restart", c: "reconnect / pull", s: "starting up" };
const PAINT = { w: "work", i: "idle", d: "det", r: "res", c: "rec", s: "soft" };
const WINDOWS = [30, 60, 120, 300, 1200];

// Words come first, and the first news of them: Bokeh is a megabyte to bring, and holds the page for a quarter of a second when it runs.
const NEWS = 500;  // milliseconds; of what stands still there are none
const calm = () => new Promise((soon) => (window.requestIdleCallback ? requestIdleCallback(soon, { timeout: 2000 }) : setTimeout(soon, 100)));

// Kept in the browser where it has a place for it (a page from this machine, or a secure one): a kernel sends the megabyte to all its pages.
const SHELF = "robustrl", on_shelf = (version) => `${location.origin}/robustrl/bokeh-${version}.js`;
const kept = async (version) => { try { return await (await (await caches.open(SHELF)).match(on_shelf(version)))?.text(); } catch { return undefined; } };
const keep = async (version, text) => {
  try {
    await caches.delete(SHELF);  // other versions
    await (await caches.open(SHELF)).put(on_shelf(version), new Response(text));
  } catch { /* it is asked for each time */ }
};

// Once for all timelines of a page. A notebook's page asks for it: as part of the view's state it would be most of what a reload waits for.
const load_bokeh = async (view, version, news) => {
  for (let tries = 0; !window.Bokeh?.embed && tries < 60; tries += 1) {
    await calm();
    const had = tries || !version ? undefined : await kept(version), value = had || (await view.ask("bokeh")).value;
    await news;
    await calm();
    if (value && !window.Bokeh?.embed) document.head.append(h("script", {}, value));
    else if (!value) await new Promise((soon) => setTimeout(soon, 1000));
    if (value && !had && version && window.Bokeh?.version === version) keep(version, value);
  }
  return window.Bokeh;
};

async function render({ model, el }) {
  let shown = null, plot = null, sources = null, follow = true, width = 60, palette = "", order = "";
  const place = h("div", { style: { width: "100%" } });
  const follows = h("button", { "aria-pressed": "true", title: "keep the present at the right edge", onclick: () => { follow = !follow; sync(); scroll(); } }, "follow");
  const all = h("button", { title: "the whole run", onclick: () => { follow = false; sync(); fit(); } }, "whole run");
  const windows = h("select", { "aria-label": "seconds shown", onchange: (event) => { width = Number(event.target.value); follow = true; sync(); scroll(); } },
    WINDOWS.map((seconds) => h("option", { value: seconds, selected: seconds === width }, `last ${span(seconds)}`)));
  const swatch = (name, words, line) => h("span", {}, h("i", { style: { background: `var(--${name})`, "border-color": line ? "var(--mut)" : "transparent" } }), words);
  const legend = h("div", { class: "legend" }, swatch("work", "working"), swatch("idle", "waiting (normal)", true), swatch("det", "detect"), swatch("res", "restart"), swatch("rec", "reconnect / pull"), swatch("soft", "starting up", true),
    h("span", {}, h("b", { style: { color: "var(--bad)" } }, "\u25bc "), "fault or failure"), h("span", {}, "| optimizer step"), h("span", { class: "push" }, windows, follows, all));
  const ghost = h("p", { class: "ghost" });
  const told = () => {
    const race = shown.ghost;
    ghost.style.display = race ? "" : "none";
    if (race) ghost.replaceChildren(h("b", {}, race.words), " ", h("span", { class: "mut" }, race.label));
  };
  const GHOST = "the ghost";
  // [lane, bars], in the order in which they are drawn: the ghost first
  const drawn = () => [...(shown.ghost ? [[GHOST, shown.ghost.lane ?? {}]] : []), ...(shown.order ?? []).map((role) => [role, shown.lanes?.[role] ?? {}])]
    .map(([lane, chunks]) => [lane, Object.keys(chunks).sort((a, b) => a - b).flatMap((chunk) => chunks[chunk])]);
  const sync = () => follows.setAttribute("aria-pressed", String(follow));
  const paint = () => {
    const theme = view.root.dataset.theme;
    if (palette === theme) return;
    palette = theme;
    const get = (name) => colour(view.root, name);
    plot.setv({ background_fill_color: get("bg"), border_fill_color: get("bg") });
    for (const axis of [...plot.below, ...plot.left]) axis.setv({ major_label_text_color: get("ink"), axis_label_text_color: get("mut"), axis_line_color: get("line"), major_tick_line_color: get("line"), minor_tick_line_color: null,
      axis_label_text_font_style: "normal", axis_label_text_font_size: "11px", major_label_text_font_size: "12px" });
    for (const grid of plot.center.filter((model) => model.type === "Grid")) grid.setv({ grid_line_color: grid.dimension === 0 ? get("line") : null });
    sources.now.line_color = get("mut");
    if (sources.bars.data.role?.length) update();  // of a run that is over no picture comes that would paint its bars
  };
  const update = () => {
    if (!sources || !shown) return;
    paint();
    told();
    const lanes = drawn(), names = lanes.map(([lane]) => lane), now = view.now(), get = Object.fromEntries(Object.entries(PAINT).map(([code, name]) => [code, colour(view.root, name)]));
    const edge = colour(view.root, "line");
    if (JSON.stringify(names) !== order) {
      order = JSON.stringify(names);
      plot.y_range.factors = [...names].reverse();
      plot.height = Math.max(170, 64 + 25 * Math.min(names.length, 40));
    }
    const data = { role: [], left: [], right: [], fill: [], edge: [], alpha: [], what: [], phase: [], took: [] };
    for (const [lane, bars] of lanes) for (const [start, end, code, phase] of bars) {
      const right = end < 0 ? Math.max(now, start) : end;
      data.role.push(lane); data.left.push(start); data.right.push(right); data.fill.push(get[code] ?? edge);
      data.edge.push(code === "i" || code === "s" || lane === GHOST ? edge : get[code] ?? edge); data.alpha.push(lane === GHOST ? 0.45 : 1);
      data.what.push(WORDS[code] ?? code); data.phase.push(phase ? phase_name(phase) : "-"); data.took.push(span(right - start));
    }
    sources.bars.data = data;
    const marks = Object.values(shown.marks ?? {});
    sources.marks.data = { place: marks.map((mark) => [mark[1], 0.3]), role: marks.map((mark) => mark[1]), t: marks.map((mark) => mark[0]), words: marks.map((mark) => mark[3]) };
    sources.steps.data = { t: (shown.steps ?? []).map((step) => step[0]), step: (shown.steps ?? []).map((step) => step[1]) };
    scroll();
  };
  const scroll = () => {
    if (!sources) return;
    paint();
    const now = view.now();
    sources.now.location = now;
    if (follow) plot.x_range.setv({ start: Math.max(0, now - width), end: Math.max(width, now) + width * 0.01 });
    const bars = sources.bars, ends = bars.data.right;
    if (ends?.length && view.speed() > 0) {
      let index = 0, grown = false;
      for (const [, drawn_bars] of drawn()) for (const bar of drawn_bars) {
        if (bar[1] < 0 && index < ends.length) { ends[index] = Math.max(now, bar[0]); grown = true; }
        index += 1;
      }
      if (grown) bars.change.emit();
    }
  };
  const fit = () => plot?.x_range.setv({ start: 0, end: Math.max(10, view.now()) * 1.01 });
  let pictures = 0, came;
  const news = new Promise((soon) => { came = soon; setTimeout(soon, NEWS); });
  const view = open_view(model, el, "timeline", (picture) => { shown = picture; update(); if ((pictures += 1) > 1) came(); }, () => scroll());
  view.root.append(h("h2", {}, "Timeline"), legend, ghost, place);

  const figure = parse(model.get("figure")), Bokeh = await load_bokeh(view, figure.version, news);
  await calm();
  const found = await Bokeh.embed.embed_item({ ...figure, target_id: null }, place);
  const by_name = (name) => plot.document.get_model_by_name(name);
  const top = found.model ?? [...(found.roots ?? found)][0].model;
  plot = top;
  sources = { bars: by_name("bars"), marks: by_name("marks"), steps: by_name("steps"), now: by_name("now") };
  place.addEventListener("pointerdown", () => { follow = false; sync(); });
  place.addEventListener("wheel", () => { follow = false; sync(); }, { passive: true });

  update();
  return () => view.close();
}
export default { render };
