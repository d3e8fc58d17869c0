// What all views share: the model's picture, time in the run, colours, and building of elements. Texts become text nodes, never markup.
const h = (tag, attributes, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
};
const SVG = "http://www.w3.org/2000/svg";
const svg = (tag, attributes, ...children) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
};

const merge = (old, patch) => {
  const merged = { ...old };
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete merged[key];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const before = merged[key];
      merged[key] = merge(before && typeof before === "object" && !Array.isArray(before) ? before : {}, value);
    } else merged[key] = value;
  }
  return merged;
};

// Nulls say "nothing", as a missing key does.
const without_nulls = (value) => value && typeof value === "object" && !Array.isArray(value)
  ? Object.fromEntries(Object.entries(value).filter(([, inner]) => inner !== null).map(([key, inner]) => [key, without_nulls(inner)])) : value;
// What a phase is called: one table for all views (words.py).
const phase_name = (phase) => PHASES[phase] ?? String(phase).replaceAll("_", " ");
const parse = (text) => { try { return JSON.parse(text || "{}"); } catch { return {}; } };

const span = (seconds) => {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  const all = Math.round(seconds);
  return seconds < 5970 ? `${Math.floor(all / 60)} min ${String(all % 60).padStart(2, "0")} s` : `${(seconds / 3600).toFixed(1)} h`;
};
const bytes = (count) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toPrecision(2)} ${units[unit]}`;
};
const whole = (count) => Number(count).toLocaleString("en").replaceAll(",", "\u2009");

// A picture that moves has a sign of life each second at least (feed.py). One that stands still (a recording that is stopped, a run that is
// over) has none, and misses none.
const SILENT = 5;
const is_silent = (heard, speed) => speed > 0 && heard > SILENT;

// The view's own handle on its model: `draw(picture)` at most once per frame, `tick()` four times a second while the page is seen.
// `at_once`: what comes is drawn when it comes, for views whose pictures are answers; a page that is not seen waits for its next frame.
const open_view = (model, el, name, draw, tick, at_once = false) => {
  const root = h("div", { class: `rrl rrl-${name}` });
  const quiet = h("span", { "aria-hidden": "true" });  // else a reader of screens would be told each second
  const gone = h("p", { class: "gone", role: "alert", style: { display: "none" } });
  root.append(gone);
  el.append(h("style", {}, CSS), root);
  // `came`: when the page was told something, also while nobody sees it and nothing is painted; `at`: the same of what is shown.
  let keyframe = null, key = 0, picture = null, delta = {}, came = performance.now(), at = came, waiting = false, closed = false, silent = false, told = "";
  const take = () => {
    const text = model.get("full");
    if (text !== keyframe) { keyframe = text; const full = parse(text); key = full.key; picture = without_nulls(full.picture ?? {}); }
    const news = parse(model.get("delta"));
    if (news.key !== key) return false;
    if (news.n !== delta.n) { delta = news; at = came; }
    return true;
  };
  const heard = () => (performance.now() - came) / 1000;
  const watch = () => {
    const now = is_silent(heard(), delta.speed ?? 0);
    if (now) set_text(quiet, ` for ${span(Math.floor(heard()))}`);
    if (now === silent) return;
    silent = now;
    root.classList.toggle("silent", silent);
    alarm(merge(picture ?? {}, delta.patch ?? {}));
    soon();
  };
  // A host that died sends no silence: whoever follows its job knows, says so in the picture (`gone`), and stops the clock.
  // So does the log of a recording that breaks off before the job's end (`broken`).
  const alarm = ({ gone: since, broken }) => {
    const what = typeof since === "number" ? `The job is gone since ${new Date(1000 * since).toTimeString().slice(0, 8)}: what you see is its last state.` : broken ? broken : silent ? "silent" : "";
    if (what === told) return;
    told = what;
    gone.replaceChildren(...(what === "silent" ? ["No news", quiet, ": the kernel or the job is gone, this is the last picture."] : [what]));
    gone.style.display = what ? "" : "none";
  };
  const paint = () => {
    waiting = false;
    if (closed || !take()) return;
    watch();
    const now = merge(picture, delta.patch ?? {});
    alarm(now);
    try { draw(now); tick?.(); } catch (error) { console.error(`robustrl ${name}:`, error); }
  };
  const soon = () => { if (!waiting && !closed) { waiting = true; requestAnimationFrame(paint); } };
  const arrived = () => { came = performance.now(); if (at_once && !document.hidden && picture) paint(); else soon(); };
  // One command at a time: a host may pass on only the last of two values that come in short order.
  let asked = null, before = Promise.resolve();
  const answered = () => {
    const answer = parse(model.get("answer"));
    if (asked && (answer.id === asked.id || answer.id === "")) asked.resolve(answer);
  };
  const send = (verb, args) => new Promise((resolve) => {
    const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 10)}`;
    const timer = setTimeout(() => asked.resolve({ error: "no answer within 20 s: is the kernel busy, or gone?" }), 20000);
    asked = { id, resolve: (answer) => { clearTimeout(timer); asked = null; resolve(answer); } };
    model.set("command", JSON.stringify({ id, verb, args: args ?? {} }));
    model.save_changes();
  });
  model.on("change:full", arrived);
  model.on("change:delta", arrived);
  model.on("change:answer", answered);
  const stop_theme = follow_theme(root);
  const timer = setInterval(() => { if (!document.hidden && root.isConnected) { watch(); tick?.(); } }, 250);
  soon();
  return {
    root,
    // Of the last picture it stays the moment up to which there was hope.
    now: () => (delta.now ?? 0) + Math.min(SILENT, (performance.now() - at) / 1000) * Math.min(delta.speed ?? 0, 100),
    heard,
    silent: () => silent,
    speed: () => delta.speed ?? 0,
    // Resolves to {value}, {error} or {confirm}.
    ask: (verb, args) => (before = before.then(() => send(verb, args))),
    redraw: soon,
    close: () => {
      closed = true;
      clearInterval(timer);
      stop_theme();
      model.off("change:full", arrived);
      model.off("change:delta", arrived);
      model.off("change:answer", answered);
    },
  };
};

// Light or dark is what the page around the view is.
const follow_theme = (root) => {
  const light = () => {
    const host = document.body?.dataset.jpThemeLight ?? document.documentElement.dataset.theme;
    if (host !== undefined) return host !== "false" && host !== "dark";
    for (let node = root.parentNode; node; node = node.parentNode ?? node.host) {
      const colour = node instanceof Element && getComputedStyle(node).backgroundColor.match(/[\d.]+/g);
      if (colour && (colour.length < 4 || Number(colour[3]) > 0.5)) return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 128;
    }
    return !matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const apply = () => { const theme = light() ? "light" : "dark"; if (root.dataset.theme !== theme) root.dataset.theme = theme; };
  const observer = new MutationObserver(apply);
  for (const node of [document.body, document.documentElement]) if (node) observer.observe(node, { attributes: true });
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", apply);
  requestAnimationFrame(apply);
  apply();
  return () => { observer.disconnect(); media.removeEventListener("change", apply); };
};

const colour = (root, name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
const set_text = (element, text) => { if (element.textContent !== text) element.textContent = text; };
const set_class = (element, name) => { if (element.className !== name) element.className = name; };
