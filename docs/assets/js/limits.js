// <moe-limits data="../../assets/data/limits.json">: how fast can this layer be at all, and what has to travel?
import { limits } from "./limits-model.js";

const SVG = "http://www.w3.org/2000/svg";
const POWERS = (from, to) => Array.from({ length: to - from + 1 }, (_, n) => 2 ** (from + n));
const SLIDERS = {
  tokens: { label: "T, tokens per rank", values: POWERS(0, 13), start: 8 },
  ep: { label: "EP, ranks", values: [1, 2, 3, 4, 6, 8, 16, 32, 64], start: 4 },
  experts: { label: "E, experts", values: [8, 16, 32, 64, 128, 160, 256, 288, 384, 512] },
  topk: { label: "K, experts per token", values: [1, 2, 4, 6, 8, 12, 16] },
  hidden: { label: "H, hidden size", values: [1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192] },
  intermediate: { label: "I, expert size", values: [512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 14336] },
};
const NAMES = { all_gather: "all-gather", variable: "variable", dedup: "once per rank", fixed_capacity: "fixed capacity" };

function node(kind, name, attributes = {}, ...children) {
  const made = kind === "svg" ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const html = (...rest) => node("html", ...rest), svg = (...rest) => node("svg", ...rest);

export function time(seconds) {
  if (seconds >= 1e-3) return `${(seconds * 1e3).toPrecision(3)} ms`;
  return `${(seconds * 1e6).toPrecision(3)} µs`;
}
export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (n >= 1000 && place < 4) { n /= 1000; place++; }
  return `${n >= 100 || place === 0 ? Math.round(n) : n.toPrecision(3)} ${units[place]}`;
}

class Limits extends HTMLElement {
  async connectedCallback() {
    if (this.built) return;
    this.built = true;
    const url = new URL(this.getAttribute("data"), document.baseURI).href;
    const answer = await fetch(url).catch(() => null);
    if (!answer || !answer.ok) { this.append(html("p", {}, `${url} could not be read: serve the site, for example with python -m http.server -d site`)); return; }
    this.data = await answer.json();
    this.build();
    this.take("glm-5.3-flash");
    this.dataset.ready = "yes";
  }

  build() {
    const form = html("div", { class: "play-form" });
    this.model = this.select("model", "Model", Object.keys(this.data.shapes).map((n) => [n, n]).concat([["own", "my own sizes"]]), () => this.model.value !== "own" && this.take(this.model.value));
    this.gpu = this.select("gpu", "GPU", Object.keys(this.data.gpus).map((n) => [n, n.toUpperCase()]), () => this.show());
    this.gpu.value = "h200";
    this.dtype = this.select("dtype", "Weights and rows", [["bfloat16", "bfloat16"], ["float8", "float8"]], () => this.show());
    for (const select of [this.model, this.gpu, this.dtype]) form.append(select.parentElement);
    const grid = html("div", { class: "limits-sliders" });
    this.sliders = {};
    for (const [key, { label, values, start }] of Object.entries(SLIDERS)) {
      const input = html("input", { type: "range", id: `limits-${key}`, min: 0, max: values.length - 1, step: 1, value: Math.max(0, values.indexOf(start)) });
      const value = html("span", { class: "value" });
      input.addEventListener("input", () => { if (!["tokens", "ep"].includes(key)) this.model.value = "own"; this.show(); });
      grid.append(html("div", { class: "limits-slider" }, html("label", { for: `limits-${key}` }, label), value, input));
      this.sliders[key] = { input, value, values: [...values] };
    }
    this.says = html("p", { class: "limits-says", role: "status", "aria-live": "polite" });
    this.numbers = html("div", { class: "limits-numbers" });
    this.charts = html("div", { class: "limits-charts" });
    this.append(form, grid, this.says, this.numbers, this.charts);
  }

  select(key, label, options, act) {
    const made = html("select", { id: `limits-${key}` }, ...options.map(([value, words]) => html("option", { value }, words)));
    made.addEventListener("change", act);
    html("div", { class: "play-field" }, html("label", { for: `limits-${key}` }, label), made);
    return made;
  }

  take(name) {
    this.model.value = name;
    for (const key of ["experts", "topk", "hidden", "intermediate"]) {
      const slider = this.sliders[key], wanted = this.data.shapes[name][key];
      if (!slider.values.includes(wanted)) { slider.values = [...slider.values, wanted].sort((a, b) => a - b); slider.input.max = slider.values.length - 1; }
      slider.input.value = slider.values.indexOf(wanted);
    }
    this.show();
  }

  state() {
    const read = Object.fromEntries(Object.entries(this.sliders).map(([k, s]) => [k, s.values[s.input.value]]));
    read.topk = Math.min(read.topk, read.experts);
    return { ...read, dtype: this.dtype.value, gpu: this.gpu.value };
  }

  show() {
    const s = this.state(), gpu = this.data.gpus[s.gpu], found = limits(s, gpu);
    for (const [key, { input, value, values }] of Object.entries(this.sliders)) {
      value.textContent = String(key === "topk" ? s.topk : values[input.value]);
      input.setAttribute("aria-valuetext", value.textContent);
    }
    const wire = found.wires.fixed_capacity.peak / gpu.link;
    this.says.textContent = `At best ${time(found.floor)} for one layer: bound by ${found.bound === "memory" ? "reading the weights of active experts" : "arithmetic"}. ` +
      (s.ep > 1 ? `Sending every token everywhere takes at least ${time(wire)} of NVLink beside it. ` : "One rank: nothing travels. ") +
      (found.resident > gpu.memory ? `The experts of one rank do not fit in this GPU's memory.` : "");
    const numbers = [
      ["floor of the slowest rank", time(found.floor)], ["active experts", `${found.active.toFixed(1)} of ${found.local}`],
      ["experts of one rank", bytes(found.resident)], ["assignments of one rank", found.assignments.toFixed(found.assignments < 100 ? 1 : 0)],
      ["memory", time(found.memory)], ["arithmetic", time(found.compute)],
    ];
    this.numbers.replaceChildren(...numbers.map(([words, value]) => html("div", { class: "limits-number" }, html("b", {}, value), words)));
    this.charts.replaceChildren(this.floorChart(s, gpu), this.wireChart(found), this.paddingChart(found));
    this.dataset.floor = found.floor;
  }

  chart(title, label, height) {
    const picture = svg("svg", { viewBox: `0 0 360 ${height}`, role: "img", "aria-label": label });
    return [html("figure", { class: "limits-chart" }, html("h4", {}, title), picture), picture];
  }

  floorChart(s, gpu) {
    const tokens = SLIDERS.tokens.values, points = tokens.map((t) => ({ t, ...limits({ ...s, tokens: t }, gpu) }));
    const now = limits(s, gpu), all = points.flatMap((p) => [p.memory, p.compute]);
    const low = Math.log10(Math.min(...all)), high = Math.log10(Math.max(...all)) + 0.1;
    const x = (t) => 46 + (Math.log2(t) / 13) * 300, y = (v) => 190 - ((Math.log10(v) - low) / (high - low)) * 170;
    const [figure, picture] = this.chart("Least time over T", `The floor is ${time(now.floor)} at T = ${s.tokens}, bound by ${now.bound}`, 226);
    for (let p = Math.ceil(low); p <= high; p++) {
      picture.append(svg("line", { x1: 46, x2: 346, y1: y(10 ** p), y2: y(10 ** p), class: "axis" }), svg("text", { x: 42, y: y(10 ** p) + 4, "text-anchor": "end", class: "soft" }, time(10 ** p).replace(/\.0+ /, " ")));
    }
    for (const t of [1, 8, 64, 512, 4096]) picture.append(svg("text", { x: x(t), y: 206, "text-anchor": "middle", class: "soft" }, String(t)));
    picture.append(svg("text", { x: 196, y: 222, "text-anchor": "middle", class: "soft" }, "T, tokens per rank"));
    for (const key of ["memory", "compute"]) picture.append(svg("path", { class: key, d: points.map((p, n) => `${n ? "L" : "M"}${x(p.t)},${y(p[key])}`).join("") }));
    picture.append(svg("line", { x1: x(s.tokens), x2: x(s.tokens), y1: 14, y2: 192, class: "now" }), svg("circle", { cx: x(s.tokens), cy: y(now.floor), r: 4.5, class: "dot" }));
    picture.append(svg("text", { x: 56, y: 12, class: "key-memory" }, "memory"), svg("text", { x: 116, y: 12, class: "key-compute" }, "arithmetic"));
    return figure;
  }

  wireChart(found) {
    const most = Math.max(1, ...Object.values(found.wires).map((w) => w.dispatch + w.combine));
    const label = Object.entries(found.wires).map(([k, w]) => `${NAMES[k]} ${bytes(w.dispatch + w.combine)}`).join(", ");
    const [figure, picture] = this.chart("Bytes on the wire, all ranks", label, 226);
    picture.append(svg("text", { x: 8, y: 12, class: "key-memory" }, "out"), svg("text", { x: 40, y: 12, class: "key-compute" }, "home, float32"));
    Object.entries(found.wires).forEach(([scheme, w], n) => {
      const y = 34 + n * 48, scale = 236 / most;
      picture.append(svg("text", { x: 8, y: y }, NAMES[scheme]));
      picture.append(svg("rect", { x: 8, y: y + 6, width: w.dispatch * scale, height: 15, rx: 2, class: "bar" }), svg("rect", { x: 8 + w.dispatch * scale, y: y + 6, width: w.combine * scale, height: 15, rx: 2, class: "bar home" }));
      picture.append(svg("text", { x: 14 + (w.dispatch + w.combine) * scale, y: y + 18 }, bytes(w.dispatch + w.combine)));
    });
    return figure;
  }

  paddingChart(found) {
    const ratio = (w) => (w.needed ? w.sent / w.needed : 1), most = Math.max(1, ...Object.values(found.wires).map(ratio));
    const label = Object.entries(found.wires).map(([k, w]) => `${NAMES[k]} ${ratio(w).toFixed(2)}`).join(", ");
    const [figure, picture] = this.chart("Rows sent per row needed", label, 226);
    Object.entries(found.wires).forEach(([scheme, w], n) => {
      const y = 34 + n * 48, width = (236 * ratio(w)) / most;
      picture.append(svg("text", { x: 8, y }, NAMES[scheme]), svg("rect", { x: 8, y: y + 6, width, height: 15, rx: 2, class: "bar" }), svg("text", { x: 14 + width, y: y + 18 }, ratio(w).toFixed(2)));
    });
    picture.append(svg("line", { x1: 8 + 236 / most, x2: 8 + 236 / most, y1: 20, y2: 212, class: "now" }), svg("text", { x: 8 + 236 / most, y: 224, "text-anchor": "middle", class: "soft" }, "ideal"));
    return figure;
  }
}

if (!customElements.get("moe-limits")) customElements.define("moe-limits", Limits);
