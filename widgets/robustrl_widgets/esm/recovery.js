// RecoveryReport: each recovery explained, newest first.
const PARTS = [["detect", "det", "#221700"], ["restart", "res", "#2b0d1d"], ["reconnect", "rec", "#fff"]];

function render({ model, el }) {
  const list = h("div", {});
  const view = open_view(model, el, "recovery", (picture) => {
    const reports = Object.values(picture.recoveries ?? {}).sort((a, b) => b.n - a.n);
    list.replaceChildren(...reports.map(report));
    if (!reports.length) list.append(h("p", { class: "mut" }, "Nothing had to be recovered yet."));
  });
  view.root.append(h("h2", {}, "Recoveries, in words"), list);
  const report = (one) => {
    const took = one.took ?? {}, total = PARTS.reduce((sum, [name]) => sum + (took[name] ?? 0), 0);
    const words = one.standing || `back after ${span(total)}`;
    const bars = PARTS.filter(([name]) => typeof took[name] === "number").map(([name, paint, ink]) => h("span", { title: `${name} ${span(took[name])}`, style: { background: `var(--${paint})`, color: ink, flex: `${Math.max(took[name], total * 0.02)} 0 0` } }, took[name] > 0.2 * total ? `${name} ${span(took[name])}` : "\u00a0"));
    const short = PARTS.filter(([name]) => typeof took[name] === "number" && took[name] <= 0.2 * total).map(([name]) => `${name} ${span(took[name])}`);
    return h("div", { class: "report" }, h("h3", {}, `${one.role}: ${words}`, " ", h("span", { class: "mut" }, `#${one.n}${one.rule ? `, rule ${one.rule}` : ""}`)),
      h("div", { class: "split" }, bars), short.length ? h("p", { class: "mut" }, short.join(", ")) : null, h("p", {}, h("b", {}, "Seen: "), one.seen), h("p", {}, h("b", {}, "Done: "), one.done, " ", one.moved ?? ""),
      one.meanwhile ? h("p", {}, one.meanwhile) : null, one.full ? h("p", {}, h("b", {}, "Instead: "), one.full) : null, one.blind ? h("p", { class: "mut" }, `Blind spot of the rule: ${one.blind}`) : null);
  };
  return () => view.close();
}
export default { render };
