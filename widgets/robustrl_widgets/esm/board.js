// RoleBoard: nodes with their roles, live pulls, failures on their way through detect, restart, reconnect, and a drawer for one role.
const GROUPS = [
  ["management", ["supervisor", "task_runner", "rollout_manager", "request_manager", "agent_worker", "node_agent"]],
  ["trainer", ["trainer", "state_keeper", "standby"]],
  ["rollouts", ["rollout"]],
];
const BIG = new Set(["trainer", "rollout"]);
const STAGES = ["detect", "restart", "reconnect"];
const stages_of = (run) => run.ended_for || run.asked ? STAGES.slice(1) : STAGES;  // who was ended on purpose was not detected
const tone = (role) => {
  if (role.stages && role.stages.on) return role.state === "suspect" ? "sus" : role.stages.on === "restart" ? (word_of(role) === "failed" ? "bad" : "res") : "stale again";
  return { starting: "start", restarting: "res", stale: role.life > 1 ? "stale again" : "start", suspect: "sus", failed: "bad", stopped: "off", retired: "off" }[role.state] ?? "";
};
const word_of = (role) => role.word ?? role.state;
const phase_word = (role) => word_of(role) === role.state && (role.state === "healthy" || role.state === "suspect" || role.state === "stale") && role.phase ? ` \u00b7 ${phase_name(role.phase)}` : "";

const over = (job) => ["done", "stopped", "failed", "unknown"].includes(job.status);  // unknown: a recording's log breaks off
const sentence = (text) => text && !/[.!?\u2026]$/.test(text) ? `${text}.` : text ?? "";

function render({ model, el }) {
  let shown = null, selected = null, tab = "history", detail = null, layout = "", followed = "", page = null;
  const cards = new Map();
  const head = h("div", { class: "head" });
  const say = h("p", { class: "say", role: "status", "aria-live": "polite" });
  const words = h("pre", { tabindex: "0" }), more = h("details", { class: "more", style: { display: "none" } }, h("summary", {}, "details"), words);
  const nodes = h("div", { class: "nodes" });
  const pulls = svg("svg", { class: "pulls", "aria-hidden": "true" });
  const story = h("ul", { class: "story" });
  const drawer = h("div", {});
  const below = h("div", { class: "below" }, h("div", {}, h("h2", {}, "What happened"), story), drawer);

  const view = open_view(model, el, "board", (picture) => {
    shown = picture;
    draw_head(picture.head);
    draw_say(picture);
    draw_nodes(picture);
    draw_story(picture);
    draw_pulls();
  }, () => { draw_pulls(); tick(); });
  view.root.append(head, say, more, h("h2", {}, "Roles by node"), nodes, below);

  const kpi = (label, value, extra) => h("div", { class: "kpi" }, h("small", {}, label), h("b", {}, value), extra);
  let fresh = h("span", {});
  const draw_head = (job) => {
    const ledger = job.ledger;
    const share = job.steps ? Math.min(100, 100 * job.step / job.steps) : 0;
    fresh = h("span", { class: "fresh" });
    head.replaceChildren(...[
      h("span", { class: "name", title: job.run }, job.name || "job"),
      h("span", { class: `pill ${view.silent() ? "" : job.status}` }, view.silent() ? `was ${job.status}` : job.status),
      kpi("optimizer step", `${job.step} / ${job.steps || "?"}`, h("div", { class: "track" }, h("i", { style: { width: `${share}%` } }))),
      job.reward !== undefined ? kpi("reward", job.reward.toFixed(2)) : null,
      typeof job.accuracy === "number" ? kpi("held-out accuracy", `${(100 * job.accuracy).toFixed(0)} %`) : null,
      job.ettr ? kpi("ETTR strict", job.ettr.strict.toFixed(2), job.ettr_early ? h("small", { title: job.ettr_early }, "too few steps to tell") : null) : null,
      job.mode ? kpi("recovery", job.mode) : null,
      kpi("answers: started = used + dropped + in flight",
        `${whole(ledger.started)} = ${whole(ledger.consumed)} + ${whole(ledger.dropped)} + ${whole(ledger.in_flight)} ${ledger.balanced ? "\u2713" : "\u2260 !"}`),
      fresh].filter(Boolean));
  };
  const draw_say = (picture) => {
    const job = picture.head, count = Object.keys(picture.roles ?? {}).length, ill = job.ill ?? [];
    const starting = job.starting ?? [], away = Object.entries(job.away ?? {}), well = count - ill.length - starting.length - away.length;
    let text;
    if (view.silent()) text = [h("b", {}, "How it was when it was last heard of: "), `${job.status}, optimizer step ${job.step}, ${well} of ${count} roles well.`];
    else if (job.lost) text = [h("b", {}, `The job broke off after optimizer step ${job.step}`), `: ${sentence(job.reason)}`];
    else if (picture.broken) text = [h("b", {}, "How it was when the log breaks off: "), `optimizer step ${job.step} of ${job.steps || "?"}, ${well} of ${count} roles well. What became of it is not known.`];
    else if (over(job)) {
      const healed = job.failures ? ` ${job.failures} ${job.failures === 1 ? "failure" : "failures"} on the way.` : "";
      text = [h("b", {}, `The job is ${job.status}`), ` at optimizer step ${job.step}.${healed} ${job.status === "failed" ? sentence(job.reason) : ""}`];
    } else if (!count) text = [h("b", {}, "Starting: "), "the first roles are on their way."];
    else if (ill.length) {
      const ended = ill.filter((name) => picture.roles[name].stages?.ended_for), failed = ill.filter((name) => !ended.includes(name));
      const parts = failed.slice(0, 3).flatMap((name, index) => {
        const role = picture.roles[name], stage = role.stages?.on;
        return [index ? ", " : "", h("b", {}, name), stage === "detect" ? " is suspected" : stage === "reconnect" ? " is back and reconnects" : role.stages?.asked && word_of(role) !== "failed" ? " is started again" : " failed and is restarted"];
      });
      if (failed.length > 3) parts.push(` and ${failed.length - 3} more`);
      if (ended.length) parts.push(parts.length ? "; " : "", `${ended.length} ${ended.length === 1 ? "role is" : "roles are"} started anew because of it`);
      text = [...parts, !ended.length || well ? `. The other ${well} roles go on.` : "."];
    } else if (job.status === "starting") text = [h("b", {}, `${count} ${count === 1 ? "role" : "roles"}`), count === 1 ? " is starting." : " are starting."];
    else text = [...(starting.length || away.length ? [h("b", {}, [...starting.map((name) => `${name} is starting`), ...away.map(([name, word]) => `${name} is ${word}`)].join(", ")), `. The other ${well} roles go on.`] : [h("b", {}, `All ${count} roles are well.`)]), ["STUDENT", "INSTRUCTOR"].includes(model.get("right")) ? " Click one to see what it did, or to make it fail." : " Click one to see what it did."];
    say.className = `say ${view.silent() ? "" : ["done", "stopped", "unknown"].includes(job.status) ? "ended" : ill.length || job.status === "failed" ? "ill" : ""}`;
    say.replaceChildren(...text);
    more.style.display = job.details && over(job) ? "" : "none";
    set_text(words, job.details ?? "");
    nodes.classList.toggle("last", Boolean(job.lost || picture.broken));
    for (const warning of job.warnings ?? []) say.append(h("div", { class: "mut" }, `\u26a0 ${warning}`));
  };

  const draw_nodes = (picture) => {
    const roles = Object.entries(picture.roles ?? {}), names = Object.keys(picture.nodes ?? {});
    const dense = roles.length > 40;
    nodes.classList.toggle("dense", dense);
    const wanted = JSON.stringify([names, roles.map(([name, role]) => [name, role.node])]);
    if (wanted !== layout) {
      layout = wanted;
      cards.clear();
      nodes.replaceChildren(...[...names, ...roles.map(([, role]) => role.node).filter((node) => !names.includes(node))]
        .filter((node, index, all) => all.indexOf(node) === index).map((node) => node_box(node, roles)), pulls);
    }
    for (const [name, role] of roles) cards.get(name)?.update(role);
    const mine = selected && picture.roles[selected], told = mine ? `${mine.state} ${mine.life}` : "";
    if (mine) draw_role(mine);
    if (told !== followed) {
      followed = told;
      if (detail && tab === "history") refresh_history();
    }
    for (const box of nodes.querySelectorAll(".node")) {
      const node = picture.nodes[box.dataset.node];
      box.classList.toggle("lost", Boolean(node && typeof node.lost === "string"));
      set_text(box.firstChild, node && typeof node.lost === "string" ? `${box.dataset.node} \u00b7 lost: ${node.lost}` : `${box.dataset.node}${node?.ip ? ` \u00b7 ${node.ip}` : ""}`);
    }
  };
  const node_box = (node, roles) => {
    const groups = GROUPS.map(([title, kinds]) => {
      const mine = roles.filter(([, role]) => role.node === node && kinds.includes(role.kind));
      mine.sort((a, b) => kinds.indexOf(a[1].kind) - kinds.indexOf(b[1].kind) || a[0].localeCompare(b[0], "en", { numeric: true }));
      return mine.length ? h("div", { class: `group ${title === "rollouts" && mine.length > 1 ? "many" : ""}`, "aria-label": title }, mine.map(([name, role]) => card(name, role))) : null;
    }).filter(Boolean);
    return h("div", { class: "node", "data-node": node, style: { "flex-grow": String(groups.length) } }, h("em", {}, node), h("div", { class: "groups" }, groups));
  };
  const card = (name, first) => {
    const big = BIG.has(first.kind);
    const life = h("span", { title: "which life of the role this is" }), word = h("span", { class: "word" }), age = h("span", { class: "num" });
    const doing = h("span", { class: "more" }), version = h("span", { class: "pill version" });
    const wire = first.kind === "rollout" ? h("div", { class: "row wire more" }, h("span", {}, "\u00a0")) : null;
    const bar = h("div", { class: "track" }, h("i", {})), stages = h("div", { class: "stages" });
    const element = big
      ? h("button", { class: "role", onclick: () => select(name) }, h("div", { class: "row" }, h("b", {}, name), life), h("div", { class: "row" }, word, age), bar, h("div", { class: "row" }, doing, version), ...(wire ? [wire] : []), stages)
      : h("button", { class: "role mini", onclick: () => select(name) }, h("div", { class: "row" }, h("b", {}, name), h("span", {}, word, " ", life)), stages);
    let known = "", now = first, last = null;
    cards.set(name, {
      element,
      update: (role) => {
        const text = JSON.stringify(role) + (selected === name);
        if (text === known) return;
        known = text;
        now = role;
        element.className = `role ${big ? "" : "mini"} ${tone(role)} ${selected === name ? "open" : ""}`;
        element.title = `${name}: ${role.what}`;
        element.setAttribute("aria-label", `${name}, ${word_of(role)}${phase_word(role)}`);
        set_text(word, big ? word_of(role) + phase_word(role) : word_of(role) === "healthy" && role.version !== undefined ? `healthy \u00b7 v${role.version}` : word_of(role));
        set_text(life, role.life > 1 || big ? `life ${role.life}` : "");
        if (big) {
          const pulling = Object.values(shown?.pulls ?? {}).some((pull) => pull.to === name && pull.over < 0);
          bar.style.visibility = typeof role.done === "number" ? "visible" : "hidden";
          bar.firstChild.style.width = `${100 * (role.done ?? 0)}%`;
          bar.firstChild.style.background = pulling ? "var(--rec)" : "var(--ok)";
          set_text(doing, role.stages?.ended_for && role.stages.on ? `because of ${role.stages.ended_for}` : role.stages?.rule && role.stages.on ? `rule ${role.stages.rule}` : role.doing ?? "");
          version.style.display = typeof role.version === "number" ? "" : "none";
          version.classList.toggle("behind", (role.lag ?? 0) > 0);
          set_text(version, role.lag > 0 ? `v${role.version}, ${role.lag} behind` : `v${role.version}`);
        }
        stages.style.display = role.stages ? "" : "none";
        if (role.stages) stages.replaceChildren(...stages_of(role.stages).map((stage) => h("span", { class: stage }, stage, h("b", {}))));
        element.update_stages = draw_stages;
        draw_stages();
      },
      pulled: (pull) => {
        if (!wire) return;
        last = pull;
        if (!pull) { set_class(wire, "row wire more"); set_text(wire.firstChild, "\u00a0"); return; }
        const live = pull.over < 0, share = pull.bytes ? Math.round(100 * pull.done / pull.bytes) : 0, rate = pull.rate ? ` \u00b7 ${bytes(pull.rate)}/s ${pull.via}` : "";
        set_class(wire, `row wire more ${live ? "live" : view.now() - pull.over < 3 ? "fresh-wire" : ""}`);
        set_text(wire.firstChild, live ? `\u21e3 v${pull.v} from ${pull.from}, ${share} %${rate}` : `\u21e3 v${pull.v} from ${pull.from}${rate}`);
      },
      // A last pull is told of as long as it is where the role is: in a recording time jumps, and what it jumped over was never seen.
      no_pull: () => { if (last && (last.over < 0 || last.over > view.now() || last.v !== now.version)) cards.get(name).pulled(null); },
      tick: () => {
        if (big) set_text(age, ["stopped", "retired"].includes(now.state) ? "" : age_text(now));
        draw_stages();
      },
    });
    const age_text = (role) => {
      const ago = (since) => span(Math.max(0, view.now() - since));
      if (role.state === "healthy" && role.phase?.startsWith("waiting")) return `for ${ago(role.phase_at)}`;
      return ["healthy", "suspect", "stale"].includes(role.state) ? `progress ${ago(role.progress_at)} ago` : `for ${ago(role.since)}`;
    };
    const draw_stages = () => {
      const run = now.stages;
      if (!run) return;
      const open = stages_of(run).indexOf(run.on);
      stages_of(run).forEach((stage, index) => {
        const box = stages.children[index], took = run.took?.[stage];
        box.className = `${stage} ${index === open ? run.cut_off ? "past" : "on" : typeof took === "number" || (open < 0 && run.total !== undefined) ? "past" : ""}`;
        set_text(box.lastChild, index === open ? run.cut_off ? "not over" : `${span(Math.max(0, view.now() - run.since))} \u2026` : typeof took === "number" ? span(took) : "");
      });
    };
    return element;
  };
  const tick = () => {
    for (const card of cards.values()) card.tick();
    const quiet = view.heard(), job = shown?.head;
    if (!job) return;
    fresh.className = `fresh ${view.silent() ? "old" : ""}`;
    const how = view.speed() === 0 ? `, ${over(job) ? "at its end" : "stopped"}` : view.speed() !== 1 ? ` \u00d7${view.speed()}` : "";
    set_text(fresh, job.recorded ? `recording${how}` : over(job) ? "ended" : view.speed() === 0 ? "standing still" : quiet > 2.5 ? `no news for ${span(quiet)}` : "live");
  };

  const draw_story = (picture) => {
    const lines = Object.values(picture.story ?? {});
    story.replaceChildren(...lines.reverse().map(([t, , mood, words]) => h("li", { class: mood }, h("time", {}, span(t)), h("i", {}), h("span", {}, words))));
    if (!lines.length) story.append(h("li", { class: "mut" }, "Nothing worth a word yet."));
  };

  const draw_pulls = () => {
    if (!shown) return;
    const now = view.now(), base = nodes.getBoundingClientRect(), drawn = [];
    const marks = Object.values(shown.pulls ?? {}).sort((a, b) => a.t - b.t);
    const newest = new Map(marks.map((pull) => [pull.to, pull]));
    for (const [name, card] of cards) if (!newest.has(name)) card.no_pull();
    for (const pull of newest.values()) {
      cards.get(pull.to)?.pulled(pull);
      const age = pull.over < 0 ? 0 : now - pull.over, from = cards.get(pull.from)?.element, to = cards.get(pull.to)?.element;
      if (age > 3 || !from || !to || !base.width || cards.size > 60) continue;
      const a = from.getBoundingClientRect(), b = to.getBoundingClientRect();
      const right = a.left + a.width / 2 < b.left + b.width / 2, same = Math.abs(a.left - b.left) < 40;
      const x1 = (same || right ? a.right : a.left) - base.left, y1 = a.top + a.height / 2 - base.top;
      const x2 = (same || !right ? b.right : b.left) - base.left, y2 = b.top + b.height / 2 - base.top;
      const bend = same ? 14 : (x2 - x1) / 2;
      const group = svg("g", { class: pull.over < 0 ? "live" : "over", opacity: Math.max(0.15, 1 - age / 3) },
        svg("path", { d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 + (same ? bend : -bend)},${y2} ${x2},${y2}` }), svg("circle", { cx: x1, cy: y1, r: 3, fill: "var(--rec)" }), svg("circle", { cx: x2, cy: y2, r: 5.5, fill: "var(--rec)" }));
      drawn.push(group);
    }
    pulls.replaceChildren(...drawn);
    if (over(shown.head)) for (const card of cards.values()) card.pulled(null);
  };

  const select = (name) => {
    selected = selected === name ? null : name;
    detail = null;
    for (const [other, card] of cards) card.update(shown.roles[other]);
    below.classList.toggle("two", selected !== null);
    if (selected === null) { drawer.replaceChildren(); return; }
    open_detail();
  };
  // What of the drawer changes with the picture: whether its process lives, and whether anything can be done to it.
  const about = h("p", { class: "mut" }), why = h("p", { class: "mut" });
  let acting = null;
  const draw_role = (role) => {
    set_text(about, `${role?.what ?? ""} (process ${role?.pid ?? "?"}${role?.dead ? ", which has ended" : ""})`);
    // What is offered is what would be accepted (commands.py): a student has one fault at a time.
    const closed = acting ? shown.head.closed : "", mine = acting && !closed && model.get("right") === "STUDENT" ? shown.busy?.[model.get("me")] : undefined;
    for (const each of acting?.childNodes ?? []) each.disabled = Boolean(closed) || mine !== undefined || each.busy === true;
    set_text(why, closed ? `${closed[0].toUpperCase()}${closed.slice(1)}: no fault can be injected any more.` : mine !== undefined ? `One at a time: your fault #${mine} is not over yet.` : "");
  };
  const refresh_history = async () => {
    const name = selected, answer = await view.ask("inspect", { role: name });
    if (selected === name && tab === "history" && answer.value) page?.replaceChildren(history(answer.value));
  };
  const open_detail = async () => {
    const name = selected;
    drawer.replaceChildren(h("div", { class: "detail" }, h("h3", {}, name), h("p", { class: "mut" }, "\u2026")));
    const answer = await view.ask("inspect", { role: name });
    if (selected !== name) return;
    detail = answer.value ?? null;
    const body = page = h("div", {}), said = h("p", { class: "answer" });
    const tabs = ["history", "logs", "stack"].map((key) => h("button", { role: "tab", "aria-selected": String(tab === key), onclick: () => { tab = key; open_detail(); } }, key));
    drawer.replaceChildren(h("div", { class: "detail" },
      h("div", { class: "bar", role: "tablist" }, h("h3", {}, name), tabs, h("button", { "aria-label": "close", onclick: () => select(name) }, "\u00d7")),
      about, acting = acts(name, said), why, said, body));
    draw_role(shown.roles[name]);
    if (answer.error) { said.className = "answer wrong"; set_text(said, answer.error); return; }
    if (tab === "history") body.replaceChildren(history(detail));
    else {
      body.replaceChildren(h("p", { class: "mut" }, "\u2026"));
      const found = await view.ask(tab, { role: name });
      if (selected !== name) return;
      if (found.error) body.replaceChildren(h("p", { class: "mut" }, found.error));
      else if (tab === "logs") body.replaceChildren(h("pre", { tabindex: "0" }, found.value.join("\n") || "(the log is empty)"));
      else body.replaceChildren(...found.value.map((stack) => h("div", {}, h("p", { class: "mut" }, `life ${stack.life}, just before it was killed`), h("pre", { tabindex: "0" }, stack.text))),
        ...(found.value.length ? [] : [h("p", { class: "mut" }, "None yet: a stack is kept when a role hangs and is killed for it.")]));
    }
  };
  const history = (found) => h("ul", { class: "story" }, [...found.history].reverse().map(([t, , mood, words]) => h("li", { class: mood }, h("time", {}, span(t)), h("i", {}), h("span", {}, words))));
  const acts = (name, said) => {
    if (!detail?.live || detail.right < 1 || !detail.faults?.length) return null;
    const act = (label, kind) => {
      const button = h("button", { class: "danger", onclick: async () => {
        const sure = button.classList.contains("sure");
        button.disabled = button.busy = true;
        const answer = await view.ask("inject", { kind: kind(), target: name, seconds: detail.seconds?.[kind()] ?? null, ...(sure ? { sure: true } : {}) });
        button.busy = false;
        draw_role(shown.roles[name]);
        button.classList.toggle("sure", Boolean(answer.confirm));
        set_text(button, answer.confirm ? `${label}: really?` : label);
        said.className = `answer ${answer.error ? "wrong" : ""}`;
        set_text(said, answer.confirm ?? answer.error ?? answer.value?.said ?? "done");
      } }, label);
      return button;
    };
    const others = detail.faults.filter((kind) => kind !== "kill" && kind !== "hang");
    const choice = h("select", { "aria-label": "another fault" }, others.map((kind) => h("option", { value: kind }, kind.replaceAll("_", " "))));
    return h("div", { class: "acts" }, h("span", { class: "mut" }, "Make it fail:"), act("Kill", () => "kill"), act("Hang", () => "hang"), choice, act("Inject", () => choice.value));
  };

  const observer = new ResizeObserver(() => draw_pulls());
  observer.observe(nodes);
  return () => { observer.disconnect(); view.close(); };
}
export default { render };
