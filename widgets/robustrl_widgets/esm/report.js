// The player of a recovery that was saved as one file: the board's pictures along the log, under a slider.
const data = JSON.parse(document.getElementById("data").textContent);
const merge = (old, patch) => {
  const made = { ...old };
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete made[key];
    else made[key] = typeof value === "object" && !Array.isArray(value) ? merge(made[key] ?? {}, value) : value;
  }
  return made;
};
const frames = data.patches.reduce((all, patch) => [...all, merge(all.at(-1), patch)], [data.first]);
let at = 0, n = 0;
const models = {};
const model = (view) => {
  const values = { answer: "{}" }, heard = {};
  models[view] = {
    show: (picture, now) => { n += 1; values.full = JSON.stringify({ key: n, picture }); values.delta = JSON.stringify({ key: n, n, patch: {}, now, speed: 0 }); for (const tell of heard["change:full"] ?? []) tell(); },
    get: (name) => values[name], set: (name, value) => { values[name] = value; }, on: (name, tell) => { (heard[name] ??= []).push(tell); }, off: () => {},
    save_changes: () => {
      const { id, verb, args } = JSON.parse(values.command), history = data.history[args.role];
      values.answer = JSON.stringify(verb === "inspect" && history ? { id, value: { history: history.filter((line) => line[0] <= now(at)), live: false, right: 0 } } : { id, error: "not kept in this file" });
      setTimeout(() => { for (const tell of heard["change:answer"] ?? []) tell(); });
    },
  };
  return models[view];
};
const now = (index) => data.start + index * data.every;
const slider = document.getElementById("slider"), clock = document.getElementById("clock"), play = document.getElementById("play");
const show = () => {
  models.board?.show(frames[at], now(at));
  slider.value = at;
  clock.textContent = `${now(at).toFixed(1)} s of the run`;
};
slider.max = frames.length - 1;
slider.addEventListener("input", () => { at = Number(slider.value); show(); });
let timer = null;
play.addEventListener("click", () => {
  if (timer) { clearInterval(timer); timer = null; play.textContent = "play"; return; }
  if (at >= frames.length - 1) at = 0;
  play.textContent = "stop";
  timer = setInterval(() => { at += 1; show(); if (at >= frames.length - 1) play.click(); }, 1000 * data.every);
});
window.robustrl_views = { board: (view) => { view.render({ model: model("board"), el: document.getElementById("board") }); show(); },
  recovery: (view) => { view.render({ model: model("recovery"), el: document.getElementById("recovery") }); models.recovery.show({ recoveries: { 1: data.recovery } }, 0); } };
