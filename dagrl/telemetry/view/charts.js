// Line charts and stacked areas as SVG, with the values under the pointer.

const COLORS = ["var(--a)", "var(--b)"];
const STACK = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#edc948", "#9c755f", "#ff9da7", "#8a8f98"];
const WIDTH = 400, HEIGHT = 170, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;

function h(tag, properties = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "g", "rect"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function shown(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}

function tickStep(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * (1 - 1e-9));
}

function ticks(low, high, count) {
  const step = tickStep(low, high, count);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-6); at <= high / step + 1e-6; at += 1) found.push(Number((at * step).toPrecision(12)));
  return found;
}

function scales(xs, ys) {
  let [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  if (left === right) right = left + 1;
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const step = tickStep(low, high, 4); // the ends are ticks
  [low, high] = [Math.floor(low / step + 1e-6) * step, Math.ceil(high / step - 1e-6) * step];
  const x = (value) => LEFT + ((value - left) / (right - left)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  return { x, y, left, right, low, high };
}

function frame(scale, axis) {
  const parts = [];
  for (const at of ticks(scale.low, scale.high, 4)) {
    parts.push(h("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: scale.y(at), y2: scale.y(at) }));
    parts.push(h("text", { x: LEFT - 6, y: scale.y(at) + 4, "text-anchor": "end" }, shown(at, 6)));
  }
  for (const at of ticks(scale.left, scale.right, 6).filter((one) => axis !== "step" || Number.isInteger(one))) {
    parts.push(h("text", { x: scale.x(at), y: HEIGHT - 4, "text-anchor": "middle" }, shown(at, 3)));
  }
  return parts;
}

// series: [{label, color, points: [[x, y], ...], dashed}]
function lineChart(title, series, axis) {
  const drawn = series.filter((one) => one.points.length);
  if (!drawn.length) return null;
  const scale = scales(drawn.flatMap((one) => one.points.map((p) => p[0])), drawn.flatMap((one) => one.points.map((p) => p[1])));
  const svg = h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title }, frame(scale, axis));
  for (const one of drawn) {
    const path = one.points.map(([x, y], at) => `${at ? "L" : "M"}${scale.x(x).toFixed(1)} ${scale.y(y).toFixed(1)}`).join("");
    svg.append(h("path", { d: path, fill: "none", stroke: one.color, "stroke-width": 1.8, "stroke-linejoin": "round",
      "stroke-dasharray": one.dashed ? "5 3" : null }));
    if (one.dashed || one.points.length === 1) {
      svg.append(...one.points.map(([x, y]) => h("circle", { cx: scale.x(x), cy: scale.y(y), r: 2.5, fill: one.color })));
    }
  }
  follow(svg, scale, drawn, axis);
  const last = (one) => shown(one.points.at(-1)[1]);
  const legend = drawn.length > 1 ? h("div", { class: "legend" }, drawn.map((one) => legendItem(`${one.label} ${last(one)}`, one.color, one.dashed))) : null;
  const value = legend ? null : h("span", {}, last(drawn[0]));
  return h("section", { class: "card chart", "data-title": title }, h("h2", {}, title, value), svg, legend);
}

function legendItem(label, color, dashed, square) {
  const mark = h("i", { class: dashed ? "dashed" : square ? "square" : null, style: `background:${color};color:${color}` });
  return h("span", {}, mark, label);
}

// layers: [{label, points: [[x, y], ...]}] with the same x in each
function stackChart(title, layers, axis) {
  if (!layers.length || !layers[0].points.length) return null;
  const sums = layers[0].points.map(() => 0);
  const bands = layers.map((layer, number) => {
    const below = [...sums];
    layer.points.forEach(([, y], at) => { sums[at] += y; });
    return { label: layer.label, color: STACK[number % STACK.length], points: layer.points, below, above: [...sums] };
  });
  const xs = layers[0].points.map(([x]) => x);
  const scale = scales(xs, [0, ...sums]);
  const svg = h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title }, frame(scale, axis));
  for (const band of bands) {
    const there = xs.map((x, at) => `${scale.x(x).toFixed(1)} ${scale.y(band.above[at]).toFixed(1)}`);
    const back = xs.map((x, at) => `${scale.x(x).toFixed(1)} ${scale.y(band.below[at]).toFixed(1)}`).reverse();
    svg.append(h("path", { d: `M${[...there, ...back].join("L")}Z`, fill: band.color, "fill-opacity": 0.85 }));
  }
  follow(svg, scale, [...bands].reverse(), axis);
  const legend = h("div", { class: "legend" }, bands.map((band) => legendItem(band.label, band.color, false, true)));
  return h("section", { class: "card chart", "data-title": title }, h("h2", {}, title, h("span", {}, `${shown(sums.at(-1))} s`)), svg, legend);
}

function follow(svg, scale, series, axis) {
  const cursor = h("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = scale.left + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (scale.right - scale.left);
    const near = series.map((one) => [one, one.points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best)]);
    const x = near.reduce((best, [, p]) => Math.abs(p[0] - at) < Math.abs(best - at) ? p[0] : best, near[0][1][0]);
    cursor.setAttribute("x1", scale.x(x));
    cursor.setAttribute("x2", scale.x(x));
    cursor.setAttribute("visibility", "visible");
    const lines = near.filter(([, p]) => p[0] === x).map(([one, p]) => `${one.label}: ${shown(p[1])}`);
    tip(event, [`${axis} ${shown(x)}`, ...lines].join("\n"));
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); tip(null); });
}

function tip(event, text) {
  document.querySelector(".tip")?.remove();
  if (!event) return;
  const box = h("div", { class: "tip" }, text);
  document.body.append(box);
  const left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
  const top = event.clientY + 18 + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : event.clientY + 18;
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}
