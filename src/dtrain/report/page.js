"use strict";
// Draw the charts as SVG: over the chosen axis, on a log scale, smoothed. Colors are variables of page.css, so themes need no redraw.
const charts = JSON.parse(document.getElementById("charts").textContent);
const asked = { axis: "steps", log: false, smooth: 0 };
const RIGHT = 22, TOP = 10, BOTTOM = 40, ROW = 30, HEIGHT = 270;

function add(parent, tag, attributes = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });
function format(value) {
  const size = Math.abs(value);
  if (value === 0 || (size >= 1e-4 && size < 1e7)) return plain.format(value);
  return Number(value.toPrecision(5)).toExponential().replace("e+", "e");
}

// Round numbers between two values; on a log scale of more than two powers of ten, powers of ten.
function ticks(low, high, { log = false, whole = false, count = 5 }) {
  if (log && high / low >= 100) {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    const stride = Math.ceil((last - first + 1) / count);
    return Array.from({ length: Math.floor((last - first) / stride) + 1 }, (_, index) => 10 ** (first + index * stride));
  }
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const size = Math.max(whole ? 1 : 0, power * [1, 2, 5, 10].find((factor) => factor * power >= 0.999 * rough));
  const found = [];
  for (let number = Math.ceil(low / size - 1e-6); number * size <= high + 1e-6 * size; number++) found.push(number * size || 0);
  return found;
}

// A bias-corrected exponential moving average. A value that is not finite (null) stays a gap.
function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  return low <= high ? [low, high] : [0, 1];
}

// The path of a line with gaps at null. A point between two gaps is a dot.
function linePath(xs, ys, px, py) {
  let path = "", isOpen = false;
  xs.forEach((x, index) => {
    const y = ys[index];
    if (y !== null) path += `${isOpen ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}${isOpen ? "" : "h0"}`;
    isOpen = y !== null;
  });
  return path;
}

// The outline of a stacked area: its upper edge from left to right, its lower edge back.
function areaPath(edges, lower, upper, px, py) {
  const step = (y, index) => [[edges[index], y], [edges[index + 1], y]];
  const outline = [...upper.flatMap(step), ...lower.flatMap(step).reverse()];
  return `M${outline.map(([x, y]) => `${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("L")}Z`;
}

function filled(svg, tag, cause, attributes) {
  const shape = add(svg, tag, { ...attributes, style: `fill:var(--${cause})` });
  add(svg, tag, { ...attributes, style: `fill:url(#pattern-${cause})`, "pointer-events": "none" });
  return shape;
}

function drawBars(svg, chart, shown, width) {
  const left = 12 + 7 * Math.max(...chart.rows.map((row) => row.length));
  const totals = chart.rows.map((_, row) => shown.reduce((sum, trace) => sum + trace.x[row], 0));
  const high = Math.max(...totals) || 1, bottom = TOP + ROW * chart.rows.length;
  const px = (x) => left + (x / high) * (width - left - RIGHT);
  for (const tick of ticks(0, high, { count: width / 110 })) {
    add(svg, "path", { class: "grid", d: `M${px(tick)} ${TOP}V${bottom}` });
    add(svg, "text", { class: "xtick", x: px(tick), y: bottom + 16 }, format(tick));
  }
  add(svg, "text", { class: "xtitle", x: (left + width) / 2, y: bottom + 34 }, chart.unit);
  chart.rows.forEach((row, index) => {
    let sum = 0;
    const y = TOP + ROW * index + 4;
    add(svg, "text", { class: "ytick", x: left - 8, y: y + 15 }, row);
    for (const trace of shown) {
      const bar = filled(svg, "rect", trace.color, { x: px(sum), y, width: px(sum + trace.x[index]) - px(sum), height: ROW - 8 });
      bar.setAttribute("class", "bar");
      add(bar, "title", {}, `${row}, ${trace.name}: ${format(trace.x[index])} ${chart.unit}`);
      sum += trace.x[index];
    }
  });
}

function drawLines(figure, svg, chart, shown, width, height) {
  const axis = chart.axes.includes(asked.axis) ? asked.axis : chart.axes[0];
  const lines = shown.filter((trace) => trace.y && trace.over && axis in trace.over), areas = shown.filter((trace) => trace.kind === "area");
  const others = shown.filter((trace) => !trace.y && axis in trace.over);
  const known = lines.concat(others.filter((trace) => trace.kind === "edge")).map((trace) => trace.over[axis]);
  const all = areas.length ? [chart.edges] : known;
  // A zoom holds for one axis.
  const zoom = chart.zoom && chart.zoom.axis === axis ? chart.zoom.range : null;
  let [left, right] = zoom || extent(all.flat());
  if (left === right) [left, right] = [left - 0.5, right + 0.5];
  const inView = (trace) => trace.y.filter((_, index) => trace.over[axis][index] >= left && trace.over[axis][index] <= right);
  let [low, high] = areas.length ? [0, 100] : extent(lines.flatMap(inView));
  const log = asked.log && !areas.length && low > 0;
  if (chart.zero && !log) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (log) [low, high] = low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  else if (!areas.length) {
    const room = high > low ? 0.04 * (high - low) : 0.1 * Math.abs(high) || 1;
    [low, high] = [chart.zero && low === 0 ? 0 : low - room, high + room];
  }
  const labels = ticks(low, high, { log }), start = 26 + 7 * Math.max(...labels.map((tick) => format(tick).length));
  const bottom = height - BOTTOM, scale = log ? Math.log10 : (value) => value;
  const px = (x) => start + 5 + ((x - left) / (right - left)) * (width - start - RIGHT - 10);
  const py = (y) => bottom - ((scale(y) - scale(low)) / (scale(high) - scale(low))) * (bottom - TOP);
  for (const tick of labels) {
    add(svg, "path", { class: "grid", d: `M${start} ${py(tick)}H${width - RIGHT}` });
    add(svg, "text", { class: "ytick", x: start - 6, y: py(tick) + 4 }, format(tick));
  }
  for (const tick of ticks(left, right, { whole: axis !== "time", count: (width - start) / 85 })) {
    add(svg, "path", { class: "grid", d: `M${px(tick)} ${TOP}V${bottom}` });
    add(svg, "text", { class: "xtick", x: px(tick), y: bottom + 16 }, format(tick));
  }
  add(svg, "text", { class: "xtitle", x: (start + width) / 2, y: bottom + 34 }, axis === "time" ? chart.timeTitle : axis);
  if (chart.unit) add(svg, "text", { class: "xtitle", transform: `translate(12 ${(TOP + bottom) / 2}) rotate(-90)` }, chart.unit);
  const clip = add(add(svg, "defs"), "clipPath", { id: `clip-${figure.id}` });
  add(clip, "rect", { x: start, y: 0, width: width - start - RIGHT, height: bottom + 3 });
  const inner = add(svg, "g", { "clip-path": `url(#clip-${figure.id})` });
  let lower = areas.length ? areas[0].y.map(() => 0) : [];
  for (const trace of areas) {
    const upper = trace.y.map((value, index) => value + lower[index]);
    filled(inner, "path", trace.color, { class: "area", d: areaPath(chart.edges, lower, upper, px, py) });
    lower = upper;
  }
  for (const trace of lines) {
    const xs = trace.over[axis], style = `stroke:var(--${trace.color})`, dots = trace.kind === "points" || xs.length <= 40;
    const isSmooth = chart.smooth && asked.smooth > 0;
    const path = { style, "stroke-dasharray": trace.dash };
    if (trace.kind === "line") add(inner, "path", { ...path, class: isSmooth ? "line raw" : "line", d: linePath(xs, trace.y, px, py) });
    if (isSmooth) add(inner, "path", { ...path, class: "line", d: linePath(xs, smoothed(trace.y, asked.smooth), px, py) });
    if (dots) xs.forEach((x, index) => trace.y[index] !== null && add(inner, "circle", { cx: px(x), cy: py(trace.y[index]), r: 3, style: `fill:var(--${trace.color})` }));
  }
  for (const trace of others) {
    const style = `stroke:var(--${trace.color});fill:var(--${trace.color})`;
    for (const x of trace.over[axis]) {
      if (trace.kind === "rule") add(inner, "path", { class: "rule", style, d: `M${px(x)} ${TOP}V${bottom}` });
      else add(inner, "text", { class: "edge", style, x: px(x), y: trace.symbol === "▲" ? TOP + 10 : bottom - 2 }, trace.symbol);
    }
  }
  return { axis, lines, areas, others, xs: [...new Set(all.flat())].sort((a, b) => a - b), px, start, left, right, bottom, width };
}

function nearest(xs, x) {
  return xs.reduce((best, other, index) => (Math.abs(other - x) < Math.abs(xs[best] - x) ? index : best), 0);
}

// The values at the point of the axis that is nearest to the pointer.
function describe(chart, view, x) {
  const { axis, lines, areas, others, px } = view, close = (other) => Math.abs(px(other) - px(x)) < 6;
  const rows = [`${axis === "time" ? chart.timeTitle : axis} ${format(x)}`];
  for (const trace of lines) {
    const index = nearest(trace.over[axis], x);
    if (close(trace.over[axis][index]) && trace.y[index] !== null) rows.push(`${trace.name}: ${format(trace.y[index])} ${chart.unit}`);
  }
  const slice = areas.length ? Math.max(0, Math.min(areas[0].y.length, chart.edges.filter((edge) => edge <= x).length) - 1) : 0;
  for (const trace of areas) if (trace.y[slice] >= 0.05) rows.push(`${trace.name}: ${trace.y[slice].toFixed(1)} %`);
  for (const trace of others) {
    trace.over[axis].forEach((other, index) => { if (close(other)) rows.push(trace.texts ? trace.texts[index] : trace.name); });
  }
  return rows;
}

// Show values at the pointer. A drag with a mouse zooms, and a double click shows all again.
function listen(figure, svg, chart, view) {
  const { start, left, right, bottom, width, xs, px, axis } = view, tip = figure.querySelector(".tip");
  const cursor = add(svg, "path", { class: "cursor" }), drag = add(svg, "rect", { class: "drag", y: TOP, height: bottom - TOP, width: 0 });
  const at = (event) => Math.max(start, Math.min(width - RIGHT, event.clientX - svg.getBoundingClientRect().left));
  const value = (place) => left + ((place - start - 5) / (width - start - RIGHT - 10)) * (right - left);
  let from = null;
  const hide = () => { tip.hidden = true; cursor.setAttribute("d", ""); };
  svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") { from = at(event); svg.setPointerCapture(event.pointerId); } });
  svg.addEventListener("pointermove", (event) => {
    const place = at(event);
    if (from !== null) { drag.setAttribute("x", Math.min(from, place)); drag.setAttribute("width", Math.abs(place - from)); }
    const x = view.areas.length ? value(place) : xs[nearest(xs, value(place))];
    if (x === undefined || x < left || x > right) return hide();
    cursor.setAttribute("d", `M${px(x)} ${TOP}V${bottom}`);
    tip.replaceChildren(...describe(chart, view, x).map((row) => Object.assign(document.createElement("div"), { textContent: row })));
    tip.hidden = false;
    tip.style.left = `${Math.max(0, Math.min(px(x) + 12, width - tip.offsetWidth))}px`;
  });
  svg.addEventListener("pointerup", (event) => {
    const place = at(event), begin = from;
    from = null;
    if (begin !== null && Math.abs(place - begin) > 6) { chart.zoom = { axis, range: [begin, place].map(value).sort((a, b) => a - b) }; draw(figure, chart); }
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("dblclick", () => { delete chart.zoom; draw(figure, chart); });
}

function makeLegend(figure, chart) {
  const entries = chart.data.map((trace) => {
    const button = document.createElement("button"), swatch = add(button, "svg", { width: 22, height: 12, "aria-hidden": "true" });
    if (trace.kind === "area" || trace.kind === "bar") filled(swatch, "rect", trace.color, { width: 22, height: 12 });
    else if (trace.kind === "edge") add(swatch, "text", { x: 6, y: 11, style: `fill:var(--${trace.color})` }, trace.symbol);
    else if (trace.kind === "points") add(swatch, "circle", { cx: 11, cy: 6, r: 3, style: `fill:var(--${trace.color})` });
    else add(swatch, "path", { class: trace.kind, d: "M0 6H22", style: `stroke:var(--${trace.color})`, "stroke-dasharray": trace.dash || "" });
    button.append(trace.name);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      trace.isHidden = !trace.isHidden;
      button.setAttribute("aria-pressed", String(!trace.isHidden));
      draw(figure, chart);
    });
    return button;
  });
  if (entries.length > 1) figure.querySelector(".legend").append(...entries);
}

function draw(figure, chart) {
  const plot = figure.querySelector(".plot"), width = plot.clientWidth || 600;
  const height = chart.rows ? TOP + ROW * chart.rows.length + BOTTOM : HEIGHT;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), shown = chart.data.filter((trace) => !trace.isHidden);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.replaceChildren(svg);
  if (chart.rows) drawBars(svg, chart, shown, width);
  else listen(figure, svg, chart, drawLines(figure, svg, chart, shown, width, height));
}

let drawnWidth = 0;
function drawAll() {
  drawnWidth = document.body.clientWidth;
  for (const [id, chart] of Object.entries(charts)) draw(document.getElementById(id), chart);
}

const controls = document.getElementById("controls");
controls?.addEventListener("input", () => {
  asked.axis = (controls.querySelector("[name=axis]:checked") ?? { value: "steps" }).value;
  asked.log = controls.querySelector("#log").checked;
  asked.smooth = Number(controls.querySelector("#smooth").value) / 100;
  drawAll();
});
controls?.addEventListener("submit", (event) => event.preventDefault());
for (const [id, chart] of Object.entries(charts)) makeLegend(document.getElementById(id), chart);
drawAll();
new ResizeObserver(() => { if (document.body.clientWidth !== drawnWidth) drawAll(); }).observe(document.body);
