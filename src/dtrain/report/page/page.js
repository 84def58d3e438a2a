"use strict";
// Draws lines again as the reader asks: over another axis, on a log scale, smoothed, without some of them; and reads values at
// a crosshair. The page has all charts without it. Axes are as in scales.py.
const SVG = "http://www.w3.org/2000/svg", SPAN = 10000, STYLES = 8, GAP = "\u202f", MOST = 12;
const KINDS = { steps: "number", tokens: "number", time: "seconds" };
const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
const BINARY = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const asked = { axis: "steps", log: false, smooth: 0 };

function roundUp(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 2.5, 5].find((step) => step >= rough / power - 1e-9) ?? 10);
}

function stepOf(span, kind, count) {
  const rough = span / count;
  if (rough <= 0) return 0;
  if (kind === "seconds" && rough > 0.5) return CLOCK.find((step) => step >= rough) ?? 86400 * roundUp(rough / 86400);
  if (kind === "bytes" && rough >= 1) {
    const scale = BINARY.find(([size]) => rough >= size)[0];
    return scale * ([1, 2, 4, 8, 16, 32, 64, 128, 256, 512].find((step) => step >= rough / scale) ?? 1024);
  }
  return roundUp(rough);
}

function ticks(low, high, kind, count = 7) {
  const step = stepOf(high - low, kind, count);
  if (!(step > 0) || !Number.isFinite(step)) return [low];
  const first = Math.ceil(low / step - 1e-9), last = Math.min(Math.floor(high / step + 1e-9), first + MOST), found = [];
  for (let number = first; number <= last; number++) found.push(number * step);
  return found;
}

function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), every = Math.max(1, Math.ceil((last - first) / 6));
  const parts = high <= 10 * low ? [1, 1.5, 2, 3, 4, 5, 7] : high <= 100 * low ? [1, 2, 5] : [1];
  let found = [];
  for (let power = first; power <= last; power += every) {
    for (const part of parts) found.push(part * 10 ** power);
  }
  found = found.filter((tick) => low * (1 - 1e-9) <= tick && tick <= high * (1 + 1e-9));
  return found.length >= 2 ? found : ticks(low, high, "number", 4);
}

const digits = (number, many) => String(Number(number.toPrecision(many)));

function prefixed(number) {
  const [scale, unit] = PREFIXES.find(([size]) => Math.abs(number) >= size) ?? PREFIXES[PREFIXES.length - 1];
  return number ? Number((number / scale).toFixed(9)) + unit : "0";
}

function scientific(number) {
  if (number === 0) return "0";
  const [mantissa, power] = number.toExponential(3).split("e");
  return `${Number(mantissa)}e${Number(power)}`;
}

function tickLabels(found, kind) {
  if (kind === "seconds") return found.map(duration);
  if (kind === "percent") return found.map((tick) => `${digits(tick * 100, 6)}${GAP}%`);
  const largest = Math.max(0, ...found.map(Math.abs));
  if (kind === "number" && largest > 0 && (largest < 1e-3 || largest >= 1e15)) return found.map(scientific);
  if (kind === "number") return found.map(largest >= 1e4 ? prefixed : (tick) => String(Number(tick.toFixed(9))));
  const [scale, unit] = BINARY.find(([size]) => largest >= size) ?? BINARY[BINARY.length - 1];
  return found.map((tick) => (tick ? `${Number((tick / scale).toFixed(9))}${GAP}${unit}` : "0"));
}

function value(number, kind) {
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "NaN" : number > 0 ? "+inf" : "-inf";
  if (kind === "seconds") return duration(number);
  if (kind === "percent") return `${(number * 100).toFixed(1)}${GAP}%`;
  const size = Math.abs(number);
  if (kind === "number") {
    if (Number.isInteger(number) && size < 1e5) return String(number);
    if (size < 1e-3 || size >= 1e15) return scientific(number);
  }
  const units = kind === "bytes" ? BINARY : size >= 1e5 ? PREFIXES : PREFIXES.slice(-1);
  const [scale, unit] = units.find(([least]) => size >= least) ?? units[units.length - 1];
  const text = String(Number((number / scale).toFixed(size ? Math.max(0, 3 - Math.floor(Math.log10(size / scale))) : 0)));
  return kind === "bytes" ? `${text}${GAP}${unit}` : text + unit;
}

function duration(seconds) {
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds === 0) return "0";
  if (seconds < 0.9995) return seconds >= 1e-3 ? `${digits(seconds * 1e3, 3)}${GAP}ms` : `${digits(seconds * 1e6, 3)}${GAP}\u00b5s`;
  if (seconds < 59.95) return `${digits(seconds, 3)}${GAP}s`;
  for (const [large, name, small, below] of [[60, "m", 1, "s"], [3600, "h", 60, "m"], [86400, "d", 3600, "h"]]) {
    const whole = Math.floor(seconds / small + 0.5);
    if (name === "d" || whole * small < (name === "m" ? 3600 : 86400)) {
      const per = large / small, many = Math.floor(whole / per), rest = whole % per;
      return `${many}${GAP}${name}` + (rest ? ` ${String(rest).padStart(2, "0")}${GAP}${below}` : "");
    }
  }
}

function make(name, attributes = {}, ...inside) {
  const element = document.createElementNS(SVG, name);
  for (const [key, text] of Object.entries(attributes)) element.setAttribute(key, text);
  element.append(...inside);
  return element;
}

function bounds(numbers) {
  let low = Infinity, high = -Infinity;
  for (const number of numbers) {
    if (number < low) low = number;
    if (number > high) high = number;
  }
  if (low > high) return [0, 1];
  if (low < high) return [low, high];
  const room = Math.abs(low) * 0.5 || 0.5;
  return [low - room, high + room];
}

// Of a point the mean of those before it, weighted by how near they are; what is no finite number is passed over.
function smoothed(numbers, weight) {
  let mean = 0, total = 0;
  return numbers.map((number) => {
    if (!Number.isFinite(number)) return number;
    mean = weight * mean + (1 - weight) * number;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

class Lines {
  constructor(figure, told) {
    Object.assign(this, told);
    this.figure = figure;
    this.svg = figure.querySelector(".area");
    this.first = told.axis;
    this.hidden = new Set();
    for (const line of this.lines) line.y = line.y.map((number) => (typeof number === "number" ? number : Number(number.replace("inf", "Infinity"))));
    this.buttons();
  }

  buttons() {
    if (this.lines.length < 2) return;
    for (const key of this.figure.querySelectorAll(".series")) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "series";
      button.setAttribute("aria-pressed", "true");
      button.append(...key.childNodes);
      key.replaceWith(button);
      const line = Number(key.dataset.line);
      button.addEventListener("click", () => {
        const shown = this.hidden.delete(line);
        if (!shown) this.hidden.add(line);
        button.setAttribute("aria-pressed", String(shown));
        this.draw();
      });
    }
  }

  shown() {
    return this.lines.map((line, number) => ({ ...line, number })).filter((line) => !this.hidden.has(line.number) && this.axis in line.over);
  }

  draw() {
    this.axis = this.lines.some((line) => asked.axis in line.over) ? asked.axis : this.first;
    const lines = this.shown(), finite = lines.flatMap((line) => line.y).filter(Number.isFinite);
    this.log = asked.log && this.figure.closest("#metrics, #rate") !== null && finite.length > 0 && finite.every((number) => number > 0);
    this.across = bounds(lines.flatMap((line) => line.over[this.axis]));
    const [low, high] = bounds(finite), room = this.log ? 1 : (high - low) * 0.05;
    if (this.log) this.up = [low * (low / high) ** 0.05, high * (high / low) ** 0.05];
    else this.up = [this.zero && low >= 0 ? 0 : low - room, high + room];
    for (const line of lines) line.drawn = this.smooth && asked.smooth ? smoothed(line.y, asked.smooth) : line.y;
    this.visible = lines;
    this.axes();
    this.paths(lines);
    this.signs(lines);
    this.svg.querySelector(".cross")?.remove();
  }

  x(number) { return (number - this.across[0]) / (this.across[1] - this.across[0]); }

  y(number) {
    const [low, high] = this.up;
    return this.log ? Math.log(high / number) / Math.log(high / low) : (high - number) / (high - low);
  }

  axes() {
    const found = this.log ? logTicks(...this.up) : ticks(...this.up, this.kind);
    const labels = this.log && this.kind === "number" ? found.map((tick) => value(tick, "number")) : tickLabels(found, this.kind);
    this.svg.querySelector(".grid").replaceChildren(...found.flatMap((tick, number) => {
      const y = percent(this.y(tick));
      return [make("line", { x2: "100%", y1: y, y2: y }), make("text", { dx: -8, dy: 4, y }, labels[number])];
    }));
    const below = ticks(...this.across, KINDS[this.axis], 8), texts = tickLabels(below, KINDS[this.axis]);
    this.svg.querySelector(".across").replaceChildren(
      make("line", { x2: "100%", y1: "100%", y2: "100%" }),
      ...below.map((tick, number) => make("svg", { class: number % 2 ? "tick odd" : "tick", x: percent(this.x(tick)), y: "100%" },
        make("path", { d: "M0 0V5" }), make("text", { y: 19 }, texts[number]))),
      make("text", { class: "axis", x: "100%", y: "100%", dy: 36 }, this.axis),
    );
  }

  path(line, numbers) {
    const one = this.dots || numbers.filter(Number.isFinite).length === 1;
    let path = "", before = Infinity;
    numbers.forEach((number, index) => {
      const there = Number.isFinite(number), at = line.over[this.axis][index];
      if (there) {
        const point = `${Math.round(this.x(at) * SPAN)} ${Math.round(this.y(number) * SPAN)}`;
        path += one ? `M${point}h1` : (before <= at ? "L" : "M") + point;
      }
      before = there ? at : Infinity;
    });
    return path;
  }

  paths(lines) {
    const drawn = [];
    for (const line of lines) {
      const style = `line s${line.number % STYLES}${this.dots ? " dots" : ""}`;
      if (line.drawn !== line.y) drawn.push(make("path", { class: `${style} raw`, d: this.path(line, line.y) }));
      drawn.push(make("path", { class: style, d: this.path(line, line.drawn) }));
    }
    this.svg.querySelector(".lines").replaceChildren(...drawn);
  }

  signs(lines) {
    const marks = lines.flatMap((line) => line.y.map((number, index) => [number, line.over[this.axis][index]]))
      .filter(([number]) => !Number.isFinite(number)).map(([number, at]) => {
        const up = number === Infinity, sign = Number.isNaN(number) ? "\u2715" : up ? "\u25b2" : "\u25bc";
        return make("text", { class: "mark", x: percent(this.x(at)), y: up ? "0%" : "100%", dy: up ? 10 : -2 }, sign);
      });
    this.svg.querySelector(".marks").replaceChildren(...marks);
    const rules = this.rules.filter((rule) => this.axis in rule.at && within(this.x(rule.at[this.axis]))).map((rule) => {
      const x = percent(this.x(rule.at[this.axis]));
      return make("g", { class: rule.bad ? "bad" : "restart" }, make("title", {}, rule.text),
        make("line", { x1: x, x2: x, y1: 0, y2: "100%" }), make("text", { x, y: 0, dy: -5 }, rule.bad ? "\u2715" : "\u21ba"));
    });
    this.svg.querySelector(".rules").replaceChildren(...rules);
  }

  places() {
    return this.visible.length ? this.visible[0].over[this.axis] : [];
  }

  read(index) {
    const at = this.places()[index], read = [[this.axis, value(at, KINDS[this.axis])]], dots = [];
    for (const line of this.visible) {
      const near = nearest(line.over[this.axis], at), number = line.y[near];
      const also = line.drawn !== line.y && Number.isFinite(number) ? ` (smoothed ${value(line.drawn[near], this.kind)})` : "";
      read.push([line.name, value(number, this.kind) + also]);
      if (Number.isFinite(number)) dots.push([this.x(line.over[this.axis][near]), this.y(line.drawn[near]), `s${line.number % STYLES}`]);
    }
    return { at: this.x(at), read, dots };
  }
}

class Columns {
  constructor(figure, told) {
    Object.assign(this, told);
    this.figure = figure;
    this.svg = figure.querySelector(".area");
    this.across = bounds(this.columns.flatMap(([start, end]) => [start, end]));
  }

  x(number) { return (number - this.across[0]) / (this.across[1] - this.across[0]); }

  places() { return this.columns.map(([start, end]) => (start + end) / 2); }

  read(index) {
    const [start, end, causes] = this.columns[index], read = [["time", `${value(start, "seconds")} to ${value(end, "seconds")}`]];
    for (const [name, spent] of Object.entries(causes)) if (spent / (end - start) >= 0.0005) read.push([name, value(spent / (end - start), "percent")]);
    return { at: this.x((start + end) / 2), read, dots: [] };
  }
}

const percent = (share) => `${(share * 100).toFixed(2)}%`;
const within = (share) => share >= 0 && share <= 1;

function nearest(places, at) {
  let best = 0;
  for (let index = 1; index < places.length; index++) if (Math.abs(places[index] - at) < Math.abs(places[best] - at)) best = index;
  return best;
}

// By pointer and by arrow keys; what is read is said aloud by screen readers when keys are used.
function crosshair(chart) {
  const plot = chart.figure.querySelector(".plot"), readout = document.createElement("p");
  readout.className = "readout";
  plot.after(readout); // below, so that it does not move what is pointed at
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", `${chart.figure.querySelector("h3").textContent}: arrow keys read values`);
  let index = -1;
  const hide = () => {
    index = -1;
    chart.svg.querySelector(".cross")?.remove();
    readout.replaceChildren();
  };
  const show = (next, aloud) => {
    const places = chart.places();
    if (!places.length) return hide();
    index = Math.max(0, Math.min(places.length - 1, next));
    readout.setAttribute("aria-live", aloud ? "polite" : "off");
    const { at, read, dots } = chart.read(index), x = percent(at);
    chart.svg.querySelector(".cross")?.remove();
    chart.svg.append(make("g", { class: "cross" }, make("line", { x1: x, x2: x, y1: 0, y2: "100%" }),
      ...dots.filter(([across]) => within(across)).map(([across, up, style]) =>
        make("circle", { cx: percent(across), cy: percent(up), r: 4, class: style }))));
    readout.replaceChildren(...read.flatMap(([name, text]) => {
      const item = document.createElement("span"), number = document.createElement("b");
      number.textContent = text;
      item.append(`${name} `, number);
      return [item, " "];
    }));
  };
  plot.addEventListener("pointermove", (event) => {
    const box = chart.svg.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    show(nearest(chart.places(), chart.across[0] + share * (chart.across[1] - chart.across[0])), false);
  });
  plot.addEventListener("pointerleave", () => { if (document.activeElement !== plot) hide(); });
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const last = chart.places().length - 1, far = Math.max(1, Math.round(last / 10));
    const next = { ArrowRight: index + 1, ArrowLeft: index < 0 ? last : index - 1, PageDown: index + far, PageUp: index - far, Home: 0, End: last }[event.key];
    if (event.key === "Escape") hide();
    if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    show(next, true);
  });
}

function start() {
  const charts = Object.entries(JSON.parse(document.getElementById("numbers").textContent)).map(([key, told]) => {
    const figure = document.getElementById(key);
    return told.lines ? new Lines(figure, told) : new Columns(figure, told);
  });
  const lines = charts.filter((chart) => chart instanceof Lines), controls = document.getElementById("controls");
  const draw = () => {
    for (const chart of lines) chart.draw();
  };
  charts.forEach(crosshair);
  for (const axis of controls.elements.axis) {
    axis.disabled = !lines.some((chart) => chart.lines.some((line) => axis.value in line.over));
    axis.parentElement.hidden = axis.disabled;
    axis.addEventListener("change", () => { asked.axis = axis.value; draw(); });
  }
  controls.elements.log.addEventListener("change", (event) => { asked.log = event.target.checked; draw(); });
  const smooth = controls.elements.smooth;
  smooth.closest("label").hidden = !lines.some((chart) => chart.smooth);
  smooth.addEventListener("input", () => {
    asked.smooth = Number(smooth.value) / 100;
    document.getElementById("smoothed").value = asked.smooth ? asked.smooth.toFixed(2) : "off";
    draw();
  });
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.hidden = lines.length === 0;
  draw();
}

start();
