// The bar of a recording: play, stop, wind, and how fast.
const SPEEDS = [0.5, 1, 2, 4, 10];

function render({ model, el }) {
  let shown = null, pace = 0, held_until = 0;  // the bar is where the hand left it until the picture of that moment comes, which is after the answer
  const play = h("button", { onclick: async () => { const now = view.speed() > 0; await view.ask("play", now ? { speed: 0 } : shown && view.now() >= shown.length - 0.01 ? { speed: Number(speed.value), at: 0 } : { speed: Number(speed.value) }); } }, "\u25b6 play");
  const speed = h("select", { "aria-label": "speed", onchange: () => { view.ask("play", { speed: Number(speed.value) }); } });
  // Any speed may have been asked for, also by another page of the same recording.
  const offer = (chosen) => {
    pace = chosen;
    speed.replaceChildren(...[...new Set([...SPEEDS, pace])].sort((a, b) => a - b).map((times) => h("option", { value: times }, `\u00d7${times}`)));
    speed.value = String(pace);
  };
  const bar = h("input", { type: "range", min: "0", step: "0.1", value: "0", "aria-label": "moment of the run", style: { flex: "1", padding: "0" } });
  const clock = h("span", { class: "num mut" });
  bar.addEventListener("input", () => { held_until = Infinity; tick(); });
  bar.addEventListener("change", async () => { await view.ask("play", { at: Number(bar.value) }); held_until = performance.now() + 1500; });
  const tick = () => {
    if (!shown) return;
    if (performance.now() >= held_until) bar.value = Math.min(shown.length, view.now());
    set_text(clock, `${span(Number(bar.value))} of ${span(shown.length)}`);
    set_text(play, view.speed() > 0 ? "\u275a\u275a stop" : "\u25b6 play");
  };
  const view = open_view(model, el, "player", (picture) => {
    if (picture.pace !== pace) offer(picture.pace);
    if (held_until < Infinity) held_until = 0;
    shown = picture;
    bar.max = picture.length;
    tick();
  }, () => tick());
  view.root.append(h("div", { class: "legend" }, h("b", { style: { color: "var(--ink)" } }, "A recording"), play, speed, bar, clock));
  return () => view.close();
}
export default { render };
