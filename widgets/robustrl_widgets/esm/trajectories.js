// Trajectories: the newest answers with reward, the version of each token, and where a fault made one move on.
function render({ model, el }) {
  let shown = null;
  const body = h("tbody", {}), only = h("select", { "aria-label": "which answers", onchange: () => draw() },
    h("option", { value: "all" }, "all"), h("option", { value: "moved" }, "continued elsewhere after a fault"), h("option", { value: "mixed" }, "of more than one version"), h("option", { value: "right" }, "rewarded"), h("option", { value: "wrong" }, "not rewarded"));
  const count = h("span", { class: "mut" });
  const view = open_view(model, el, "trajectories", (picture) => { shown = picture; draw(); });
  view.root.append(h("h2", {}, "Answers"), h("div", { class: "legend" }, only, count),
    h("p", { class: "mut" }, "\u201c21 by v8\u201d: 21 of its tokens were generated with version 8 of the weights. A rollout that gets newer weights goes on with the same answer."),
    h("table", {}, h("thead", {}, h("tr", {}, ["#", "prompt", "answer", "reward", "tokens, by weight version", "rollout"].map((name) => h("th", {}, name)))), body));
  const fits = (row) => ({ all: true, moved: row.moves.length > 0, mixed: row.versions.length > 1, right: row.reward > 0.5, wrong: row.reward <= 0.5 })[only.value];
  const draw = () => {
    const newest = Object.values(shown.rows ?? {}), moved = only.value === "moved";
    const chosen = (moved ? [...newest, ...Object.values(shown.moved ?? {})] : newest).filter(fits).sort((a, b) => b.id - a.id).slice(0, 64);
    set_text(count, moved ? `the newest ${chosen.length} of the whole run` : `${chosen.length} of the newest ${newest.length}`);
    body.replaceChildren(...chosen.map((row) => h("tr", {},
      h("td", { class: "mut num" }, row.id), h("td", {}, h("code", {}, row.prompt)), h("td", {}, h("code", {}, row.text)), h("td", { class: "num" }, row.reward),
      h("td", { class: "num" }, row.versions.map(([version, tokens], place) => h("span", { title: `${tokens} ${tokens === 1 ? "token was" : "tokens were"} generated with version ${version} of the weights` }, `${place ? ", " : ""}${tokens} by v${version}`))),
      h("td", {}, row.at, row.moves.map(([source, target, kept]) => h("div", { class: "mut" }, `${source} \u2192 ${target}, ${kept ? `from token ${kept}` : "from the start"}`))))));
  };
  return () => view.close();
}
export default { render };
