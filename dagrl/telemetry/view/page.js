// The page: what it shows is in the address (#tab=samples&step=3), so links and the back button work.

const DEFAULTS = { tab: "curves", x: "step", show: "train", sort: "kl", color: "logprob" };
const PERIOD_MS = 3000;
const CHARTS = [
  ["Reward", ["reward/mean", "validation/reward"]], ["Loss", ["loss", "validation/loss"]], ["KL to the reference", ["policy/kl"]],
  ["Preference accuracy", ["preference/accuracy", "validation/preference/accuracy"]],
  ["Entropy", ["policy/entropy"]], ["Trainer and engine: largest difference in nats", ["max_logprob_difference"]],
  ["Clipped tokens", ["policy/clip_ratio"]], ["Completion tokens", ["completion_tokens"]], ["Truncated completions", ["truncated_share"]],
  ["Age of samples in policy versions", ["staleness/policy_age_mean", "staleness/policy_age_max"]], ["Gradient norm", ["grad_norm"]],
  ["Learning rate", ["lr"]], ["Tokens per second", ["perf/tokens_per_sec"]], ["Seconds per step", ["timing_s/total", "timing_s/exposed_generation"]],
];
const GROUPS = [["Reward by task", "reward/tasks/"], ["Parts of the reward", "reward/parts/"]];
const SPANS = ["timing_s/total", "timing_s/exposed_generation", "timing_s/update", "timing_s/update_pause"];

let ABOUT = [], RUNS = [], LINES = [], NEXT = [];

async function load(what, query = {}) {
  if (EXPORTED) return exported(what, query);
  const answer = await fetch(`api/${what}?${new URLSearchParams(query)}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function exported(what, query) {
  if (what === "runs") return EXPORTED.runs.map((run) => run.about);
  const run = EXPORTED.runs[query.run];
  if (what === "samples") return query.step === undefined ? run.outliers : run.samples[query.step];
  return what === "sample" ? run.rows[query.step][query.row] : run[what];
}

function readState() {
  return { ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
}

function go(change) {
  const state = { ...readState(), ...change };
  const kept = Object.entries(state).filter(([key, value]) => value !== null && value !== undefined && value !== DEFAULTS[key]);
  location.hash = new URLSearchParams(kept).toString();
}

async function readMetrics() {
  let changed = false;
  for (const run of RUNS) {
    const found = await load("metrics", { run, after: NEXT[run] });
    if (found.after === 0) LINES[run] = [];
    changed ||= found.lines.length > 0;
    LINES[run].push(...found.lines);
    NEXT[run] = found.next;
  }
  return changed;
}

function stages() {
  return [...new Set(LINES.flat().map((line) => line.stage))];
}

// The lines of the chosen stage: losses of SFT and of GRPO are different things.
function linesOf(run, state) {
  const stage = state.stage || stages().at(-1);
  return LINES[run].filter((line) => stage === "all" || line.stage === stage);
}

function place(run, line, x) {
  return x === "step" ? line.step : (line.time - LINES[run][0].time) / 60;
}

function points(run, name, state) {
  return linesOf(run, state).filter((line) => typeof line[name] === "number").map((line) => [place(run, line, state.x), line[name]]);
}

function series(names, state) {
  return RUNS.flatMap((run) => names.map((name, number) => ({ color: COLORS[run], dashed: number > 0, points: points(run, name, state),
    label: RUNS.length === 1 ? name : names.length === 1 ? ABOUT[run].name : `${ABOUT[run].name} ${name}` })));
}

function curvesPage(state) {
  const names = [...new Set(LINES.flat().flatMap(Object.keys))].filter((name) => !["step", "stage", "time"].includes(name)).sort();
  const more = (state.more || "").split(",").filter((name) => names.includes(name));
  const cards = CHARTS.map(([title, metrics]) => lineChart(title, series(metrics, state), state.x));
  const times = RUNS.map((run) => timesChart(run, state));
  cards.splice(1, 0, ...times);
  for (const run of RUNS) for (const [title, prefix] of GROUPS) cards.splice(1, 0, groupChart(title, prefix, run, names, state));
  cards.push(...more.map((name) => lineChart(name, series([name], state), state.x)));
  const bar = h("div", { class: "bar" },
    choice("by", "x", state.x, [["step", "step"], ["minute", "minutes"]]),
    stages().length > 1 ? choice("stage", "stage", state.stage || stages().at(-1), [...stages(), "all"].map((one) => [one, one])) : null,
    h("label", {}, "add", h("select", { id: "more", onchange: (event) => go({ more: [...more, event.target.value].join(",") }) },
      option("", "another metric…", true), names.map((name) => option(name, name, false)))),
    more.length ? h("button", { onclick: () => go({ more: null }) }, "remove added") : null);
  const found = cards.filter(Boolean);
  return [bar, found.length ? h("div", { class: "cards" }, found) : h("p", { class: "empty" }, "No step has been recorded yet.")];
}

// One line for each metric with the prefix, such as the parts of the reward.
function groupChart(title, prefix, run, names, state) {
  const members = names.filter((name) => name.startsWith(prefix));
  if (members.length < 2) return null;
  const lines = members.map((name, number) => ({ label: name.slice(prefix.length), color: STACK[number % STACK.length], points: points(run, name, state) }));
  return lineChart(RUNS.length > 1 ? `${title}, ${ABOUT[run].name}` : title, lines, state.x);
}

function timesChart(run, state) {
  const lines = linesOf(run, state).filter((line) => line["timing_s/total"]);
  const names = [...new Set(lines.flatMap(Object.keys))].filter((name) => name.startsWith("timing_s/") && !SPANS.includes(name));
  const sum = (name) => lines.reduce((total, line) => total + (line[name] || 0), 0);
  const layers = names.sort((a, b) => sum(b) - sum(a)).map((name) => ({ label: name.slice("timing_s/".length),
    points: lines.map((line) => [place(run, line, state.x), line[name] || 0]) }));
  const rest = (line) => Math.max(0, line["timing_s/total"] - names.reduce((total, name) => total + (line[name] || 0), 0));
  layers.push({ label: "other", points: lines.map((line) => [place(run, line, state.x), rest(line)]) });
  return stackChart(RUNS.length > 1 ? `Time per phase, ${ABOUT[run].name}` : "Time per phase", layers, state.x);
}

function drawHeader(state) {
  document.getElementById("runs").replaceChildren(...RUNS.map((run) => h("div", { class: `run run-${run}`, title: ABOUT[run].directory },
    h("i", { class: "dot" }), h("b", {}, ABOUT[run].name), h("small", {}, [ABOUT[run].algorithm, ABOUT[run].model].filter(Boolean).join(", ")))));
  document.getElementById("tabs").replaceChildren(...[["curves", "Curves"], ["samples", "Samples"]].map(([key, title]) =>
    h("button", { role: "tab", "aria-selected": String(state.tab === key), onclick: () => go({ tab: key }) }, title)));
  document.getElementById("status").textContent = RUNS.map((run) => {
    const last = LINES[run].at(-1);
    return last ? `step ${last.step} of ${ABOUT[run].total_steps}` : "no step yet";
  }).join(" · ") + (EXPORTED ? " · exported" : "");
  document.title = `${ABOUT.map((one) => one.name).join(", ")} · dagrl`;
}

async function draw() {
  const state = readState(), hash = location.hash;
  tip(null);
  const parts = state.tab === "samples" ? await samplesPage(state) : curvesPage(state);
  if (hash !== location.hash) return; // the reader went on while this was read
  drawHeader(state);
  keepScroll(() => document.getElementById("main").replaceChildren(...parts));
  document.body.dataset.ready = state.tab;
}

function keepScroll(change) {
  const places = [...document.querySelectorAll(".scroll")].map((box) => box.scrollTop);
  change();
  document.querySelectorAll(".scroll").forEach((box, number) => { box.scrollTop = places[number] ?? 0; });
}

async function update() {
  try {
    const changed = await readMetrics();
    // A page of samples is drawn again only if nobody is reading a step of it.
    if (changed && (readState().tab === "curves" || !readState().step)) await draw();
    else if (changed) drawHeader(readState());
  } catch (error) {
    document.getElementById("status").textContent = `not connected: ${error.message}`;
  }
}

async function start() {
  ABOUT = await load("runs");
  RUNS = ABOUT.map((_, run) => run);
  LINES = RUNS.map(() => []);
  NEXT = RUNS.map(() => 0);
  await readMetrics();
  addEventListener("hashchange", draw);
  await draw();
  if (!EXPORTED) setInterval(update, PERIOD_MS);
}

start().catch((error) => { document.getElementById("main").replaceChildren(h("p", { class: "empty" }, `Cannot read the run: ${error.message}`)); });
