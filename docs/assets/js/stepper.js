// <moe-stepper data="../../assets/data/traces/">: plays what a stage did with a few tokens, row by row.
// Everything shown comes from a trace that the stage's own code wrote when the site was built.
import * as model from "./stepper-model.js";

const SVG = "http://www.w3.org/2000/svg";
const CHOICES = {
  stage: { label: "Stage", options: [] },
  routing: { label: "Routing", options: [["toy", "the toy of these pages"], ["uniform", "uniform"], ["hot_expert", "one hot expert"], ["one_rank", "all to one rank"]] },
  ranks: { label: "Ranks", options: [[2, "2"], [3, "3"], [4, "4"]] },
  experts: { label: "Experts", options: [[4, "4"], [8, "8"]] },
  topk: { label: "Top-k", options: [[1, "1"], [2, "2"]] },
};

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes = {}, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

class Stepper extends HTMLElement {
  connectedCallback() {
    if (this.built) return;
    this.built = true;
    this.step = 0;
    this.cache = new Map();
    this.build();
    this.load();
  }

  disconnectedCallback() { this.pause(); }

  build() {
    CHOICES.stage.options = (this.getAttribute("stages") || "").split("|").filter(Boolean).map((s) => s.split("="));
    const form = element("div", { class: "play-form" });
    this.selects = {};
    for (const [key, { label, options }] of Object.entries(CHOICES)) {
      const select = element("select", { id: `stepper-${key}` }, ...options.map(([value, words]) => element("option", { value }, words)));
      const field = element("div", { class: "play-field" }, element("label", { for: `stepper-${key}` }, label), select);
      select.addEventListener("change", () => this.load());
      this.selects[key] = select;
      form.append(field);
    }
    const wanted = this.getAttribute("stage");
    if (wanted) this.selects.stage.value = wanted;
    this.steps = element("div", { class: "play-steps", role: "group", "aria-label": "Steps of the layer" });
    this.stepButtons = model.STEPS.map((name, number) => {
      const button = element("button", { type: "button", class: "play-step" }, element("span", { class: "play-number" }, String(number + 1)), model.TITLES[name]);
      button.addEventListener("click", () => { this.pause(); this.go(number); });
      this.steps.append(button);
      return button;
    });
    this.svg = shape("svg", { class: "play-stage", role: "img", "aria-label": "Rows moving between ranks" });
    this.frame = element("div", { class: "play-frame", tabindex: "0", role: "group", "aria-label": "Picture of the step. Arrow keys step; digits 0 to 9 follow a token, Escape follows none." }, this.svg);
    this.caption = element("p", { class: "play-caption", role: "status", "aria-live": "polite" });
    this.back = this.button("Back", "Back one step", () => { this.pause(); this.go(this.step - 1); });
    this.playing = this.button("Play", "Play all steps", () => (this.timer ? this.pause() : this.play()));
    this.next = this.button("Next", "Next step", () => { this.pause(); this.go(this.step + 1); });
    this.follow = element("select", { id: "stepper-follow" });
    this.follow.addEventListener("change", () => this.highlight());
    const controls = element("div", { class: "play-controls" }, this.back, this.playing, this.next,
      element("div", { class: "play-field play-follow" }, element("label", { for: "stepper-follow" }, "Follow"), this.follow));
    this.table = element("table", { class: "play-table" }, element("thead"), element("tbody"));
    const details = element("details", { class: "play-rows" }, element("summary", {}, "The rows of this step, as a table"), element("div", { class: "play-scroll", tabindex: "0", role: "region", "aria-label": "Rows of this step" }, this.table));
    const file = element("input", { id: "stepper-file", type: "file", accept: ".json" });
    file.addEventListener("change", () => this.open(file.files[0]));
    const own = element("div", { class: "play-field play-own" }, element("label", { for: "stepper-file" }, "Your own trace"), file);
    this.append(form, this.steps, this.frame, this.caption, controls, details, own);
    this.addEventListener("keydown", (event) => this.key(event));
  }

  button(words, label, act) {
    const made = element("button", { type: "button", class: "play-button", "aria-label": label }, words);
    made.addEventListener("click", act);
    return made;
  }

  key(event) {
    if (/^(SELECT|INPUT)$/.test(event.target.tagName)) return;
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "ArrowRight") { this.pause(); this.go(this.step + 1); }
    else if (event.key === "ArrowLeft") { this.pause(); this.go(this.step - 1); }
    else if (event.key === "Home") this.go(0);
    else if (event.key === "End") this.go(model.STEPS.length - 1);
    else if (event.key === "Escape") { this.follow.value = ""; this.highlight(); }
    else if (/^[0-9]$/.test(event.key) && [...this.follow.options].some((o) => o.value === event.key)) { this.follow.value = event.key; this.highlight(); }
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  async load() {
    const toy = this.selects.routing.value === "toy";
    for (const key of ["ranks", "experts", "topk"]) this.selects[key].disabled = toy;
    if (toy) { this.selects.ranks.value = 2; this.selects.experts.value = 4; this.selects.topk.value = 2; }
    const { stage, routing, ranks, experts, topk } = Object.fromEntries(Object.entries(this.selects).map(([k, s]) => [k, s.value]));
    const name = toy ? "toy" : `${routing}-r${ranks}-e${experts}-k${topk}`;
    const url = new URL(`${this.getAttribute("data")}${stage}/${name}.json`, document.baseURI).href;
    if (!this.cache.has(url)) this.cache.set(url, fetch(url).then((answer) => { if (!answer.ok) throw new Error(`${answer.status} for ${url}`); return answer.json(); }));
    const ticket = (this.ticket = (this.ticket ?? 0) + 1);
    try {
      const trace = await this.cache.get(url);
      if (ticket !== this.ticket) return; // somebody chose again while this one was on its way
      this.dataset.trace = `${stage}/${name}`;
      this.show(trace);
    } catch (error) {
      this.cache.delete(url);
      this.caption.textContent = `This trace could not be read: ${error.message}. The site must be served, for example with: python -m http.server -d site`;
    }
  }

  // A file that `epmoe trace --stepper` wrote; it does not leave the browser.
  async open(file) {
    const ticket = (this.ticket = (this.ticket ?? 0) + 1);
    try {
      const trace = JSON.parse(await file.text());
      if (ticket !== this.ticket) return;
      if (trace.format !== model.FORMAT) throw new Error("it is nothing that epmoe trace --stepper wrote");
      this.show(trace);
      this.dataset.trace = `${trace.stage}/${trace.scenario.name}`;
    } catch (error) { this.caption.textContent = `${file?.name} could not be read: ${error.message}`; }
  }

  show(trace) {
    this.trace = trace;
    this.plan = model.layout(trace);
    const chosen = this.follow.value;
    this.follow.replaceChildren(element("option", { value: "" }, "all tokens"), ...trace.tokens.map((t) => element("option", { value: t.token }, `token ${t.token}`)));
    this.follow.value = trace.tokens.some((t) => String(t.token) === chosen) ? chosen : "";
    this.draw();
    this.go(this.step);
  }

  draw() {
    const { trace, plan } = this;
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${plan.width} ${plan.height}`);
    const hatch = shape("pattern", { id: "play-hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    hatch.append(shape("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "play-hatch" }));
    const defs = shape("defs");
    defs.append(hatch);
    this.svg.append(defs);
    const heads = { tokens: "tokens", send: "send buffer", received: "received rows", experts: "experts" };
    for (const [key, words] of Object.entries(heads)) {
      this.svg.append(shape("text", { x: plan.columns[key], y: 22, class: "play-head", "data-column": key }, words));
    }
    this.laneParts = [];
    this.slots = shape("g", { "aria-hidden": "true" });
    const wires = this.wires(); // below the lanes, so that labels stay legible; it fills in the slots as well
    this.svg.append(wires);
    for (const lane of plan.lanes) this.svg.append(this.lane(lane));
    this.svg.append(this.slots);
    this.chips = [];
    this.makeChips();
    for (const chip of this.chips) this.svg.append(chip.node);
  }

  lane({ rank, y, height, local }) {
    const { plan, trace } = this, group = shape("g", { class: `play-lane rank-${rank}` });
    group.append(shape("rect", { x: 4, y, width: plan.width - 8, height, rx: 12, class: "play-lane-box" }));
    group.append(shape("text", { x: 20, y: y + 18, class: "play-rank" }, `rank ${rank}`));
    const gathers = model.isAllGather(trace);
    const sources = [...new Set(trace.delivered[rank].map((m) => m.from))].sort((a, b) => a - b);
    const blocks = gathers ? [["all", 0]] : Array.from({ length: trace.ranks }, (_, to) => [to, to]);
    for (const [to, line] of blocks) group.append(shape("text", { x: plan.columns.send, y: y + plan.top + 20 + line * plan.pitch, class: "play-small" }, gathers ? "all" : `to ${to}`));
    sources.forEach((from, line) => group.append(shape("text", { x: plan.columns.received - 8, y: y + plan.top + 20 + line * plan.pitch, class: "play-small" }, `from ${from}`)));
    local.forEach((expert, line) => {
      const box = { x: plan.columns.experts, y: y + plan.top + line * plan.pitch };
      group.append(shape("rect", { ...box, width: 36, height: model.CHIP, rx: 7, class: "play-expert" }));
      group.append(shape("text", { x: box.x + 18, y: box.y + 20, class: "play-expert-name" }, `e${expert}`));
    });
    return group;
  }

  // Lines from send buffers to received rows, for the steps in which something travels.
  wires() {
    const { trace, plan } = this, group = shape("g", { class: "play-wires" }), half = model.CHIP / 2;
    for (const message of trace.out) {
      const from = model.sendPlace(plan, trace, message), to = model.receivedPlace(plan, trace, message);
      const row = trace.delivered[message.to].find((r) => r.from === message.from && r.index === message.index);
      const rank = message.token === null ? message.from : trace.tokens.find((t) => t.token === message.token).rank;
      for (const { x, y } of [from, to]) this.slots.append(shape("rect", { x, y, width: model.CHIP, height: model.CHIP, rx: 7, class: "play-slot" }));
      const [x1, y1, x2, y2] = [from.x + half, from.y + half, to.x + half, to.y + half];
      const wire = shape("path", { d: `M${x1},${y1} C${x1 + 110},${y1} ${x2 - 110},${y2} ${x2},${y2}`, class: `play-wire rank-${rank}${row.experts.length ? "" : " idle"}${message.from === message.to ? " home" : ""}` });
      if (message.token !== null) wire.dataset.token = message.token;
      group.append(wire);
    }
    return group;
  }

  // Every moving thing knows where it is at each step: {at: {step: place}, from, to}: hidden where it has no place.
  makeChips() {
    const { trace, plan } = this, home = (token) => model.tokenPlace(plan, trace, token);
    for (const t of trace.tokens) {
      const place = home(t.token);
      this.add("token", t.token, t.rank, Object.fromEntries(model.STEPS.map((s) => [s, place])), `${t.token}`, t);
    }
    const done = {};
    trace.out.forEach((message) => {
      const send = model.sendPlace(plan, trace, message), received = model.receivedPlace(plan, trace, message);
      const start = message.token === null ? send : home(message.token);
      const row = trace.delivered[message.to].find((r) => r.from === message.from && r.index === message.index);
      const kind = message.token === null ? "padding" : row.experts.length ? "row" : "row idle";
      const rank = message.token === null ? message.from : trace.tokens.find((t) => t.token === message.token).rank;
      const at = { pack: send, exchange: received, experts: received };
      this.add(kind, message.token, rank, at, message.token === null ? "" : `${message.token}`, null, start);
      for (const expert of row.experts) {
        const nth = (done[expert] = (done[expert] ?? -1) + 1);
        const place = model.expertPlace(plan, trace, message.to, expert, nth);
        this.add("work", message.token, rank, { experts: place }, `${message.token}`, null, received);
      }
      if (row.experts.length) {
        this.add("result", message.token, rank, { return: send, combine: home(message.token) }, `${message.token}`, null, received);
      }
    });
  }

  add(kind, token, rank, at, words, info, start) {
    const node = shape("g", { class: `play-chip ${kind} rank-${rank}` }), size = kind === "work" ? model.CHIP - 8 : model.CHIP;
    if (token !== null) node.dataset.token = token;
    node.append(shape("rect", { width: size, height: size, rx: 7, class: "play-chip-box" }));
    if (kind === "padding") node.append(shape("rect", { width: size, height: size, rx: 7, fill: "url(#play-hatch)" }));
    node.append(shape("text", { x: size / 2, y: size / 2 + 5, class: "play-chip-name" }, words));
    if (info) {
      info.experts.forEach((expert, n) => {
        const owner = this.trace.owners[expert] ?? 0;
        const pill = shape("g", { transform: `translate(${model.CHIP + 10 + n * 46}, 3)`, class: `play-pill rank-${owner}` });
        pill.append(shape("rect", { width: 40, height: 24, rx: 6 }), shape("text", { x: 20, y: 17 }, `e${expert}`));
        node.append(pill);
      });
      node.append(shape("title", {}, `token ${token}: experts ${info.experts.join(" and ")}`));
      node.addEventListener("click", () => { this.follow.value = this.follow.value === String(token) ? "" : String(token); this.highlight(); });
    }
    this.chips.push({ node, at, kind, start });
  }

  go(step) {
    if (!this.trace) return;
    this.step = Math.max(0, Math.min(model.STEPS.length - 1, step));
    const name = model.STEPS[this.step];
    this.dataset.step = name;
    for (const chip of this.chips) {
      const place = chip.at[name] ?? this.waiting(chip);
      chip.node.classList.toggle("away", !(name in chip.at));
      chip.node.style.transform = `translate(${place.x}px, ${place.y}px)`;
    }
    const active = { route: ["tokens"], counts: ["send"], pack: ["send"], exchange: ["received"], experts: ["experts"], return: ["send"], combine: ["tokens"] }[name];
    for (const head of this.svg.querySelectorAll(".play-head")) head.classList.toggle("active", active.includes(head.dataset.column));
    this.stepButtons.forEach((button, n) => {
      button.classList.toggle("past", n < this.step);
      if (n === this.step) button.setAttribute("aria-current", "step"); else button.removeAttribute("aria-current");
    });
    this.back.disabled = this.step === 0;
    this.next.disabled = this.step === model.STEPS.length - 1;
    this.caption.textContent = model.sentence(this.trace, name);
    this.svg.setAttribute("aria-label", `${model.TITLES[name]}. ${model.sentence(this.trace, name)}`);
    this.fillTable(name);
    this.highlight();
  }

  // Where a chip waits while it is not shown: where it last was, or where it will start from.
  waiting(chip) {
    for (let n = this.step; n >= 0; n--) if (model.STEPS[n] in chip.at) return chip.at[model.STEPS[n]];
    return chip.start ?? Object.values(chip.at)[0];
  }

  fillTable(name) {
    const [head, ...rows] = model.tableOf(this.trace, name);
    this.table.tHead.replaceChildren(element("tr", {}, ...head.map((h) => element("th", { scope: "col" }, String(h)))));
    this.table.tBodies[0].replaceChildren(...rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, String(cell))))));
  }

  highlight() {
    const wanted = this.follow.value;
    const marked = [...this.chips.map((chip) => chip.node), ...this.svg.querySelectorAll(".play-wire")];
    for (const node of marked) node.classList.toggle("dim", wanted !== "" && node.dataset.token !== wanted);
  }

  play() {
    if (this.step === model.STEPS.length - 1) this.go(0);
    this.playing.textContent = "Pause";
    this.playing.setAttribute("aria-label", "Pause");
    this.timer = setInterval(() => { this.go(this.step + 1); if (this.step === model.STEPS.length - 1) this.pause(); }, 2200);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    if (this.playing) { this.playing.textContent = "Play"; this.playing.setAttribute("aria-label", "Play all steps"); }
  }
}

if (!customElements.get("moe-stepper")) customElements.define("moe-stepper", Stepper);
