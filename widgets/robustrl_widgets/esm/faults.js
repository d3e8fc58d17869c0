// FaultPanel: order a fault, see each as a card that runs through its five stages, abort it, reveal a hidden one.
const OUTCOMES = { not_fired: "never fired", refused: "refused", vanished: "its target vanished", aborted: "called off", over: "over", unfinished: "not over when the job ended", unknown: "how it went on is not known" };
const MARKS = ["planned", "injected", "detected", "recovered", "confirmed"];

function render({ model, el }) {
  let shown = null, choices = "", told = null, meant = 10;
  const cards = h("div", { class: "cards" }), said = h("p", { class: "answer", role: "status" });
  const pick = (label, ...options) => h("label", {}, label, h("select", { "aria-label": label }, options));
  const kind = pick("fault"), target = pick("role"), when = pick("when"), length = h("input", { type: "number", min: "0", step: "1", value: "10", "aria-label": "seconds", oninput: () => { meant = Number(length.value); }, style: { width: "64px" } }), lasting = h("label", {}, "seconds", length), hidden = h("input", { type: "checkbox" });
  const values = { kind: kind.lastChild, target: target.lastChild, when: when.lastChild };
  const order = h("button", { class: "danger", onclick: () => inject() }, "Inject");
  const presets = pick("or a schedule, or an incident"), preset = presets.lastChild;
  const plan = h("button", { onclick: () => schedule() }, "Start");
  const about = h("p", { class: "mut" }), why = h("p", { class: "mut" });
  preset.onchange = () => set_text(about, shown.presets?.[preset.value] ?? "");
  // What acts on the job waits for a button: a select changes with each arrow key on the way to what is meant.
  const choose = (label, field, words) => {
    const select = h("select", { "aria-label": label, onchange: () => { chosen.add(field); draw(); } }, Object.entries(words).map(([value, text]) => h("option", { value }, text)));
    return h("label", {}, label, select);
  };
  const mode = choose("a failed role is", "mode", { observe: "reported only (observe)", isolated: "restarted alone (isolated)", full: "answered by a full restart (full)" });
  const standbys = choose("standbys", "standbys", { warm: "take over (warm)", cold: "are left aside (cold)" });
  const settings = [["mode", mode.lastChild], ["standbys", standbys.lastChild]], chosen = new Set();
  const apply = h("button", { "aria-label": "apply how failures are answered", onclick: () => set_recovery() }, "Apply");
  const recovery = h("div", { class: "form" }, mode, standbys, apply);
  const hides = h("label", { title: "the card tells nothing until you reveal it: find it yourself" }, "hidden", hidden);
  const form = h("div", { class: "form" }, kind, target, when, lasting, hides, order);
  const plans = h("div", { class: "form" }, presets, plan);
  const controls = [...Object.values(values), length, hidden, order, preset, plan, ...settings.map(([, select]) => select), apply];
  const view = open_view(model, el, "faults", (picture) => { shown = picture; draw(); });
  view.root.append(h("h2", {}, "Faults"), form, plans, about, recovery, why, said, cards);

  // What is offered is what would be accepted (commands.py): a student has one fault at a time, of one process, in the open.
  const student = () => model.get("right") === "STUDENT", mine = (fault) => fault.whose === model.get("me");
  const under_way = () => student() ? Object.values(shown.cards ?? {}).find((fault) => !fault.masked && mine(fault) && !fault.settled) : null;
  const option = (value, text, title) => h("option", { value, title }, text ?? value);
  const ordered = (select, options) => { const before = select.value; select.replaceChildren(...options); if ([...select.options].some((one) => one.value === before)) select.value = before; };
  const fill = () => {
    const first = { rollout: 0, trainer: 1 }, place = (role) => first[shown.roles[role]] ?? 2;
    const roles = Object.keys(shown.roles ?? {}).sort((a, b) => place(a) - place(b) || a.localeCompare(b, "en", { numeric: true })), catalogue = Object.entries(shown.catalogue ?? {}).filter(([, about]) => !student() || about.for_students);
    const wanted = JSON.stringify([roles, catalogue, shown.presets, shown.longest]);
    if (wanted === choices) return;
    choices = wanted;
    ordered(values.kind, catalogue.map(([name, about]) => option(name, about.benign ? `${name} (benign)` : name, about.words)));
    const names = Object.keys(shown.presets ?? {}), group = (label, those) => h("optgroup", { label }, those.map((name) => option(name, name.replace("incident/", ""), shown.presets[name])));
    ordered(preset, [group("schedules", names.filter((name) => !name.startsWith("incident/"))), group("incidents of other systems", names.filter((name) => name.startsWith("incident/")))]);
    preset.onchange();
    const targets = () => {
      const about = shown.catalogue?.[values.kind.value] ?? { kinds: [] };
      const most = shown.longest?.[values.kind.value];
      const fits = roles.filter((role) => about.kinds.includes(shown.roles[role]) && (!most || shown.roles[role] in most));
      ordered(values.target, fits.map((role) => option(role)));
      const phases = [...new Set(fits.flatMap((role) => shown.phases?.[shown.roles[role]] ?? []))];
      ordered(values.when, [option("now"), ...phases.map((phase) => option(`phase ${phase}`, `in phase ${phase_name(phase)}`)), ...[1, 2, 5].map((ahead) => option(`ahead ${ahead}`, `${ahead} step${ahead > 1 ? "s" : ""} from now`))]);
      values.kind.title = about.words ?? "";
      lasting.style.display = about.timed ? "" : "none";
      fit_length();
    };
    const fit_length = () => { length.value = String(Math.min(meant, shown.longest?.[values.kind.value]?.[shown.roles[values.target.value]] ?? meant)); };
    values.kind.onchange = targets;
    values.target.onchange = fit_length;
    targets();
  };
  const tell = (answer) => {
    said.className = `answer ${answer.error ? "wrong" : ""}`;
    set_text(said, answer.confirm ?? answer.error ?? answer.value?.said ?? "");
    clearTimeout(told);
    told = setTimeout(() => { if (!answer.confirm) set_text(said, ""); }, 12000);
  };
  const ask = async (button, verb, args, label) => {
    const sure = button.classList.contains("sure");
    button.disabled = button.busy = true;
    const answer = await view.ask(verb, { ...args, ...(sure ? { sure: true } : {}) });
    button.busy = false;
    button.disabled = Boolean(shown.closed) || (button === order && Boolean(under_way()));
    button.classList.toggle("sure", Boolean(answer.confirm));
    set_text(button, answer.confirm ? `${label}: really?` : label);
    tell(answer);
    return answer;
  };
  const inject = () => {
    const [mode, detail] = values.when.value.split(" ");
    const args = { kind: values.kind.value, target: values.target.value, hidden: hidden.checked };
    if (shown.catalogue[args.kind]?.timed) args.seconds = Number(length.value) || 0;
    if (mode === "phase") args.phase = detail;
    if (mode === "ahead") args.ahead = Number(detail);
    ask(order, "inject", args, "Inject");
  };
  const schedule = () => ask(plan, "schedule", { name: preset.value }, "Start");
  const set_recovery = async () => {
    if (!chosen.size) { tell({ value: { said: "nothing was changed: choose something first" } }); return; }
    const held = apply.matches(":focus");
    const answer = await ask(apply, "set_recovery", Object.fromEntries(settings.filter(([field]) => chosen.has(field)).map(([field, select]) => [field, select.value])), "Apply");
    if (held) apply.focus();
    if (answer.error) { chosen.clear(); draw(); }
  };

  const draw = () => {
    const right = model.get("right"), may = right !== "READ", closed = shown.closed ?? "", busy = closed ? null : under_way();
    form.style.display = may ? "" : "none";
    for (const each of controls) each.disabled = Boolean(closed) || each.busy === true;
    order.disabled ||= Boolean(busy);
    hides.style.display = student() ? "none" : "";
    why.style.display = may && (closed || busy) ? "" : "none";
    set_text(why, closed ? `${closed[0].toUpperCase()}${closed.slice(1)}: no fault can be injected and no setting changed any more.` : busy ? `One at a time: your fault #${busy.n} is not over yet.` : "");
    plans.style.display = about.style.display = recovery.style.display = may && right === "INSTRUCTOR" ? "" : "none";
    fill();
    for (const [field, select] of settings) {
      const set = shown.recovery?.[field];
      if (set === select.value) chosen.delete(field);
      else if (set && !chosen.has(field)) select.value = set;
    }
    apply.className = chosen.size ? "danger" : "";
    set_text(apply, chosen.size ? "Apply the change" : "Apply");
    const list = Object.values(shown.cards ?? {}).reverse();
    cards.replaceChildren(...list.map(card));
    if (!list.length) cards.append(h("p", { class: "mut" }, shown.over || model.get("right") === "READ" ? "No fault was ordered in this run so far." : "No fault yet. Choose one above, or click a role on the board."));
  };
  const card = (fault) => {
    const title = fault.masked ? "hidden fault: which role is it, and what is wrong with it?" : `${fault.kind.replaceAll("_", " ")} ${fault.target}${fault.when && fault.when !== "now" ? `, ${fault.when}` : ""}`;
    const after = (name) => typeof fault[name] === "number" && typeof fault.injected === "number" ? `+${span(fault[name] - fault.injected)}` : typeof fault[name] === "number" ? "\u2713" : "";
    const hit = (fault.hits ?? [])[0];
    const words = { planned: span(fault.planned), injected: hit ? `${hit.role}${hit.phase ? `, ${phase_name(hit.phase)}` : ""}` : after("injected"), detected: after("detected"), recovered: after("recovered"), confirmed: after("confirmed") };
    const reached = fault.masked ? 0 : Math.max(...MARKS.map((name, index) => typeof fault[name] === "number" ? index : 0));
    const over = Boolean(fault.outcome) || fault.settled || shown.over;
    // A fault that is only planned waits: nothing was injected yet. Of one that never fired not even the plan stands.
    const lit = (index) => {
      if (fault.never) return "";
      if (!reached && !over && !fault.masked) return index ? "" : "now";
      if (index <= reached) return typeof fault[MARKS[index]] === "number" ? "on" : "";
      return index === reached + 1 && !over && !fault.masked ? "now" : "";
    };
    const steps = MARKS.map((name, index) => h("div", { class: lit(index) }, name, h("b", {}, fault.masked && index ? "?" : words[name] || "\u00a0")));
    const foot = h("div", { class: "acts" });
    const outcome = OUTCOMES[fault.outcome] ?? fault.outcome;
    if (fault.outcome && !fault.masked) foot.append(h("span", { class: "mut" }, fault.reason && fault.reason !== outcome ? `${outcome}: ${fault.reason}` : outcome));
    else if (!reached && !over && !fault.masked) foot.append(h("span", { class: "mut" }, "waits for its moment"));
    if (fault.masked && shown.closed) foot.append(h("span", { class: "mut" }, `it stays hidden: ${shown.closed}`));
    if (fault.rule && !fault.masked) foot.append(h("span", { class: "mut" }, `rule ${fault.rule}`));
    if (fault.by) foot.append(h("span", { class: "mut" }, `by ${fault.by}`));
    const act = (label, verb) => { const button = h("button", { onclick: () => ask(button, verb, { fault: fault.n }, label) }, label); return button; };
    if (fault.masked && !shown.over && model.get("right") === "INSTRUCTOR") foot.append(act("Reveal", "reveal"));
    if (!over && !fault.masked && fault.abort && (model.get("right") === "INSTRUCTOR" || (student() && mine(fault)))) foot.append(act("Abort", "abort"));
    return h("div", { class: `fault ${fault.never ? "never" : over ? "" : "now"}` }, h("h3", {}, title, h("span", {}, `${fault.benign ? "benign \u00b7 " : ""}#${fault.n}`)), h("div", { class: "steps" }, steps), foot.childNodes.length ? foot : null);
  };
  return () => view.close();
}
export default { render };
