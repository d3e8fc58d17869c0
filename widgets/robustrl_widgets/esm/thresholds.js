// ThresholdPanel: each threshold with its signal's level beside it; edits apply live, and a refused value says why.
function render({ model, el }) {
  let shown = null;
  const rows = new Map(), list = h("div", {}), more = h("div", {}), extra = h("details", {}, h("summary", { class: "mut" }, "The numbers behind them"), more), why = h("p", { class: "mut" });
  const view = open_view(model, el, "thresholds", (picture) => { shown = picture; draw(); });
  view.root.append(h("h2", {}, "Thresholds: how near are the signals"), why, list, extra);
  const make = (path) => {
    const fill = h("i", {}), gauge = h("div", { class: "gauge", role: "meter", "aria-label": path, "aria-valuemin": "0", "aria-valuemax": "1.25" }, fill, h("u", { title: "the limit" }));
    const value = h("div", { class: "value" }), error = h("div", { class: "why", role: "alert" }), words = h("small", {});
    const input = h("input", { "aria-label": `limit of ${path}`, spellcheck: "false", onchange: async () => {
      input.disabled = input.busy = true;
      const answer = await view.ask("set_threshold", { path, value: input.value });
      input.busy = false;
      input.disabled = Boolean(shown.closed);
      set_class(error, answer.error ? "why" : "why well");
      set_text(error, answer.error ?? answer.value?.said ?? "");
      if (answer.error) row.dirty = true;
    }, oninput: () => { row.dirty = true; set_text(error, ""); }, onblur: () => { row.dirty = false; draw(); } });
    const row = { element: h("div", { class: "thr" }, h("div", {}, path, words), gauge, value, h("div", {}, input), error), fill, gauge, value, input, words, dirty: false };
    return row;
  };
  const draw = () => {
    const right = model.get("right"), closed = shown.closed ?? "";
    why.style.display = right === "INSTRUCTOR" && closed ? "" : "none";
    set_text(why, closed ? `${closed[0].toUpperCase()}${closed.slice(1)}: no limit can be changed any more.` : "");
    for (const [path, setting] of Object.entries(shown.rows ?? {})) {
      let row = rows.get(path);
      if (!row) { row = make(path); rows.set(path, row); (setting.words ? list : more).append(row.element); }
      const armed = typeof setting.value === "number", share = armed ? setting.value / setting.limit : 0;
      row.gauge.className = `gauge ${share >= 1 ? "over" : share >= 0.7 ? "near" : ""}`;
      row.gauge.style.visibility = setting.words ? "visible" : "hidden";
      row.gauge.setAttribute("aria-valuenow", Math.min(1.25, share).toFixed(2));
      row.fill.style.width = `${Math.min(100, 80 * share)}%`;
      row.gauge.title = armed ? `${setting.value} of ${setting.limit}${setting.role ? `, ${setting.role}` : ""}` : "not armed now";
      set_text(row.value, armed ? span(setting.value) : setting.words ? "\u2013" : "");
      set_text(row.words, armed && setting.role ? `${setting.words} \u00b7 ${setting.role}` : setting.words ?? "");
      row.input.disabled = Boolean(closed) || right !== "INSTRUCTOR" || row.input.busy === true;
      row.input.title = closed && right === "INSTRUCTOR" ? why.textContent : "";
      if (!row.dirty && row.input !== view.root.getRootNode().activeElement && row.input.value !== setting.set) row.input.value = setting.set;
    }
  };
  return () => view.close();
}
export default { render };
