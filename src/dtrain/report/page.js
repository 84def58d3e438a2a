"use strict";
// Draw the charts with plotly.js: over the chosen axis, on a log scale, smoothed, in the colors of the theme.
const charts = JSON.parse(document.getElementById("charts").textContent);
const asked = { axis: "steps", log: false, smooth: 0 };

function palette() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
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

function traces(chart, axis, color) {
  const colored = JSON.parse(JSON.stringify(chart.data), (key, value) => /color$/.test(key) ? color(value) || value : value);
  const shown = colored.filter((trace) => !trace.over || axis in trace.over);
  return shown.flatMap(({ over, ...trace }) => {
    if (!over) return [trace];
    trace.x = over[axis];
    if (!chart.smooth || !asked.smooth || trace.yaxis) return [trace];
    const raw = { ...trace, opacity: 0.25, showlegend: false, hoverinfo: "skip" };
    return [raw, { ...trace, y: smoothed(trace.y, asked.smooth) }];
  });
}

// Steps and tokens are whole numbers, so a short axis has a tick at each.
function wholeTicks(chart, axis) {
  const values = chart.data.flatMap((trace) => (trace.over && trace.over[axis]) || []);
  return axis !== "time" && Math.max(...values) - Math.min(...values) < 5 ? { dtick: 1 } : {};
}

function draw(figure, chart) {
  const color = palette(), lines = chart.axes !== undefined;
  const axis = lines ? (chart.axes.includes(asked.axis) ? asked.axis : chart.axes[0]) : null;
  const line = { gridcolor: color("grid"), zerolinecolor: color("grid"), linecolor: color("quiet"), automargin: true,
    exponentformat: "power", minexponent: 7, separatethousands: true };
  const layout = {
    height: 320, margin: { l: 56, r: 16, t: 32, b: 48 }, hovermode: lines ? "x unified" : "closest", uirevision: axis + asked.log,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: color("ink"), family: "system-ui, sans-serif" },
    hoverlabel: { bgcolor: color("paper"), font: { color: color("ink") } }, legend: { orientation: "h", traceorder: "normal", yref: "container", y: 0, yanchor: "bottom", maxheight: 24 * chart.data.length + 8 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("quiet"), activecolor: color("accent") },
    ...chart.layout,
  };
  // On a phone, the legend has one entry a row.
  if (figure.clientWidth < 400 && chart.data.length > 4) layout.height += 18 * chart.data.length;
  const title = lines ? { title: { text: axis === "time" ? chart.timeTitle : axis }, ...wholeTicks(chart, axis) } : {};
  layout.xaxis = { ...line, ...title, ...layout.xaxis };
  layout.yaxis = { ...line, ...layout.yaxis };
  const positive = chart.data.every((trace) => trace.yaxis || trace.y.every((value) => value === null || value > 0));
  if (lines && asked.log && positive && !chart.data.some((trace) => trace.stackgroup)) layout.yaxis.type = "log";
  if (lines) layout.yaxis2 = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
  layout.showlegend = chart.data.length > 1;
  const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
  return Plotly.react(figure.querySelector(".plot"), traces(chart, axis, color), layout, config);
}

function drawAll() {
  for (const [id, chart] of Object.entries(charts)) draw(document.getElementById(id), chart);
}

const controls = document.getElementById("controls");
controls.addEventListener("input", () => {
  asked.axis = controls.querySelector("[name=axis]:checked").value;
  asked.log = controls.querySelector("#log").checked;
  asked.smooth = Number(controls.querySelector("#smooth").value) / 100;
  drawAll();
});
controls.addEventListener("submit", (event) => event.preventDefault());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
