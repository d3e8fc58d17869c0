// A page without a browser: as much of a document as the views need to be drawn, a clock that the test turns, and a model that it feeds.
// Nothing is laid out; what counts is which elements are there, what they say, and what is sent to the kernel.
class Node {
  constructor(tag) { Object.assign(this, { tag, children: [], attributes: {}, dataset: {}, heard: {}, parentNode: null, isConnected: true, disabled: false }); this.style = { setProperty: (name, text) => { this.style[name] = text; } };
    this.classList = { toggle: (name, on) => { const all = new Set(this.className.split(" ").filter(Boolean)); (on ?? !all.has(name)) ? all.add(name) : all.delete(name); this.className = [...all].join(" "); }, contains: (name) => this.className.split(" ").includes(name) }; }
  get className() { return this.attributes.class ?? ""; } set className(text) { this.attributes.class = text; }
  get firstChild() { return this.children[0]; } get lastChild() { return this.children.at(-1); } get childNodes() { return this.children; }
  get textContent() { return this.children.map((child) => typeof child === "string" ? child : child.textContent).join(""); } set textContent(text) { this.children = [String(text)]; }
  get options() { return this.all((node) => node.tag === "option"); }
  get value() { return this.chosen ?? this.attributes.value ?? this.options[0]?.value ?? ""; }
  set value(text) { if (this.tag !== "select" || this.options.some((one) => one.value === text)) this.chosen = text; }
  append(...added) { for (const child of added) { if (child instanceof Node) child.parentNode = this; this.children.push(child instanceof Node ? child : String(child)); } }
  replaceChildren(...added) { this.children = []; delete this.chosen; this.append(...added); }
  setAttribute(name, text) { this.attributes[name] = text; if (name.startsWith("data-")) this.dataset[name.slice(5)] = text; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  addEventListener(name, tell) { (this.heard[name] ??= []).push(tell); }
  fire(name) { this[`on${name}`]?.({ target: this }); for (const tell of this.heard[name] ?? []) tell({ target: this }); }
  all(wanted) { return this.children.flatMap((child) => child instanceof Node ? [...(wanted(child) ? [child] : []), ...child.all(wanted)] : []); }
  querySelectorAll(selector) { return this.all((node) => node.classList.contains(selector.slice(1))); }
  find(selector) { return this.querySelectorAll(selector)[0]; }
  labelled(label) { return this.all((node) => node.attributes["aria-label"] === label)[0]; }
  getBoundingClientRect() { return { left: 0, right: 10, top: 0, width: 10, height: 10 }; }
  getRootNode() { return { activeElement: null }; }
  matches() { return false; }
  focus() {}
}
let clock = 0, frames = [];
const timers = [];
const body = new Node("body");
Object.assign(globalThis, {
  window: globalThis, location: { origin: "http://127.0.0.1:8888" },
  Element: class {}, MutationObserver: class { observe() {} disconnect() {} }, ResizeObserver: class { observe() {} disconnect() {} },
  document: { body, head: new Node("head"), documentElement: new Node("html"), hidden: false, createElement: (tag) => new Node(tag), createElementNS: (_, tag) => new Node(tag) },
  matchMedia: () => ({ matches: false, addEventListener() {}, removeEventListener() {} }), getComputedStyle: () => ({ getPropertyValue: () => "" }),
  requestAnimationFrame: (draw) => { frames.push(draw); }, setInterval: (tick) => timers.push(tick), clearInterval: () => {},
});
Object.defineProperty(globalThis, "performance", { value: { now: () => clock } });

export const frame = () => { const due = frames; frames = []; for (const draw of due) draw(); };
export const pass = (seconds) => { for (let i = 0; i < 4 * seconds; i += 1) { clock += 250; for (const tick of timers) tick(); frame(); } };
export const settle = () => new Promise((done) => setImmediate(done));

export const open = (view, right = "READ", me = "", more = {}) => {
  const values = { full: "{}", delta: "{}", answer: "{}", right, me, ...more }, heard = {}, el = new Node("div"), sent = [];
  const tell = (name) => { for (const each of heard[`change:${name}`] ?? []) each(); };
  let n = 0;
  const model = { get: (name) => values[name], set: (name, value) => { values[name] = value; }, on: (name, each) => { (heard[name] ??= []).push(each); }, off: () => {}, save_changes: () => sent.push(JSON.parse(values.command)) };
  const show = (picture, speed = 1, now = clock / 1000) => { n += 1; values.full = JSON.stringify({ key: n, picture }); values.delta = JSON.stringify({ key: n, n, patch: {}, now, speed }); tell("full"); tell("delta"); frame(); };
  const live = (speed = 1) => { n += 1; values.delta = JSON.stringify({ ...JSON.parse(values.delta), n, now: clock / 1000, speed }); tell("delta"); frame(); };
  const answer = (found) => { values.answer = JSON.stringify({ id: sent.at(-1).id, ...found }); tell("answer"); };
  view.render({ model, el });
  return { el, show, live, answer, sent, root: el.find(".rrl") };
};
