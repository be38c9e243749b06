// The samples of a step, or the outliers of the run, and the conversation of the chosen one. One panel per run.

const SORTS = {
  kl: ["KL outliers first", (a, b) => (b.kl ?? -1) - (a.kl ?? -1)],
  best: ["highest reward first", (a, b) => b.reward - a.reward],
  worst: ["lowest reward first", (a, b) => a.reward - b.reward],
  long: ["longest first", (a, b) => b.tokens - a.tokens],
  group: ["by prompt", (a, b) => a.group - b.group || a.place - b.place],
};

const SHOWS = {
  train: ["trained on", (line) => line.split === "train" && !line.dropped],
  validation: ["validation", (line) => line.split === "validation"],
  dropped: ["dropped", (line) => Boolean(line.dropped)],
  all: ["all", () => true],
};
const WITHOUT_REWARD = ["failed", "no_reward"];

async function samplesPage(state) {
  const steps = await Promise.all(RUNS.map((run) => load("steps", { run })));
  const known = [...new Set(steps.flat().map((one) => one.step))].sort((a, b) => a - b);
  if (!known.length) return [h("p", { class: "empty" }, "This run has no rollouts: SFT makes none, and logger.rollouts_enabled=false keeps none.")];
  const outliers = state.step === "outliers";
  const step = outliers ? null : known.includes(Number(state.step)) ? Number(state.step) : known.at(-1);
  const panels = await Promise.all(RUNS.map((run) => panel(run, step, state, steps[run])));
  return [samplesBar(state, known, step), h("div", { class: `columns ${RUNS.length > 1 ? "two" : "one"}` }, panels)];
}

function samplesBar(state, known, step) {
  const at = known.indexOf(step);
  const move = (by) => go({ step: known[at + by], row0: null, row1: null });
  const stepChoice = h("select", { id: "step", onchange: (event) => go({ step: event.target.value, row0: null, row1: null }) },
    option("outliers", "KL outliers of the run", step === null), [...known].reverse().map((one) => option(one, `step ${one}`, one === step)));
  return h("div", { class: "bar" },
    h("button", { title: "step before", disabled: at <= 0 ? "" : null, onclick: () => move(-1) }, "‹"), stepChoice,
    h("button", { title: "next step", disabled: at < 0 || at === known.length - 1 ? "" : null, onclick: () => move(1) }, "›"),
    choice("show", "show", state.show, Object.entries(SHOWS).map(([key, [title]]) => [key, title])),
    choice("order", "sort", state.sort, Object.entries(SORTS).map(([key, [title]]) => [key, title])),
    choice("colour", "color", state.color, Object.entries(MODES).map(([key, mode]) => [key, mode.title])),
    h("label", {}, "search", h("input", { id: "search", type: "search", value: state.search || "", placeholder: "prompt or completion",
      onchange: (event) => go({ search: event.target.value || null }) })));
}

function option(value, text, selected) {
  return h("option", { value, selected: selected ? "" : null }, text);
}

function choice(label, key, value, options) {
  return h("label", {}, label, h("select", { id: key, onchange: (event) => go({ [key]: event.target.value }) },
    options.map(([name, text]) => option(name, text, name === value))));
}

async function panel(run, step, state, steps) {
  const box = h("div", { class: `panel run-${run}` });
  if (step !== null && !steps.some((one) => one.step === step)) {
    box.append(h("section", { class: "card" }, h("p", { class: "empty" }, `${ABOUT[run].name} has no rollouts of step ${step}`)));
    return box;
  }
  const found = await load("samples", step === null ? { run } : { run, step });
  const kept = found.filter(SHOWS[state.show][1]);
  const lines = (kept.length ? kept : found).filter((line) => matches(line, state.search)).sort(SORTS[state.sort][1]);
  const chosen = chosenLine(lines, state[`row${run}`], run, state);
  box.append(linesTable(run, lines, chosen, step));
  if (chosen) box.append(conversation(await load("sample", { run, step: chosen.step, row: chosen.row }), state.color, run));
  return box;
}

function matches(line, search) {
  return !search || `${line.prompt}\n${line.completion}`.toLowerCase().includes(search.toLowerCase());
}

function lineKey(line) {
  return `${line.step}:${line.row}`;
}

function chosenLine(lines, key, run, state) {
  return lines.find((line) => lineKey(line) === key) || samePrompt(lines, run, state) || lines[0];
}

// The second run shows the prompt that was chosen in the first, if it has it.
function samePrompt(lines, run, state) {
  return run === 0 || !state.source ? null : lines.find((line) => line.source === state.source);
}

function linesTable(run, lines, chosen, step) {
  const rewards = lines.filter(hasReward).map((line) => line.reward);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const tasks = lines.some((line) => line.task);
  const same = Object.fromEntries([...new Set(lines.map((line) => line.task))].map((task) =>
    [task, sharedStart(lines.filter((line) => line.task === task).map((line) => line.prompt))]));
  const heads = [step === null ? "step" : null, tasks ? "task" : null, "reward", "advantage", "KL", "tokens"].filter(Boolean);
  const title = step === null ? "KL outliers" : `Step ${step}`;
  return h("section", { class: "card samples" },
    h("h2", {}, RUNS.length > 1 ? `${ABOUT[run].name}: ${title}` : title, h("span", {}, `${lines.length} samples, mean reward ${shown(mean)}`)),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", {}, head)), h("th", { class: "text" }, "prompt and completion"))),
      h("tbody", {}, lines.map((line) => tableLine(run, line, line === chosen, step, tasks, same[line.task]))))));
}

// How many characters all texts begin with, up to a space, such as a system prompt's; 0 if they are equal.
function sharedStart(texts) {
  const [first, ...rest] = new Set(texts);
  let count = 0;
  while (rest.length && rest.every((text) => count < first.length && text[count] === first[count])) count += 1;
  return rest.length ? first.slice(0, count).search(/\S*$/) : 0;
}

function tableLine(run, line, chosen, step, tasks, same) {
  const sign = line.advantage > 0 ? "up" : line.advantage < 0 ? "down" : null;
  const select = () => go({ [`row${run}`]: lineKey(line), source: run === 0 ? line.source : undefined });
  return h("tr", { class: chosen ? "line chosen" : "line", tabindex: 0, "data-row": line.row, onclick: select,
    onkeydown: (event) => { if (event.key === "Enter") select(); } },
    step === null ? h("td", {}, String(line.step)) : null,
    tasks ? h("td", {}, line.task) : null,
    h("td", { title: rewardText(line), class: line.failure ? "down" : null }, hasReward(line) ? shown(line.reward, 3) : line.failure ? "failed" : "none"),
    h("td", { class: sign }, shown(line.advantage, 3)),
    h("td", {}, shown(line.kl, 2)), h("td", {}, String(line.tokens)),
    h("td", { class: "text", title: line.completion }, mark(line), h("span", { class: "dim" }, `${same ? "…" : ""}${oneLine(line.prompt.slice(same), 24)} `),
      line.failure ? h("span", { class: "down" }, oneLine(line.failure, 120)) : oneLine(line.completion, 120)));
}

function hasReward(line) {
  return line.valid || (line.dropped && !WITHOUT_REWARD.includes(line.dropped));
}

function rewardText(line) {
  return line.failure || Object.entries(line.reward_parts || {}).map(([name, value]) => `${name} ${shown(value)}`).join("\n");
}

function mark(line) {
  const text = line.split === "validation" ? "validation" : line.dropped;
  return text ? h("span", { class: "mark" }, `${text.replaceAll("_", " ")} `) : null;
}

function oneLine(text, most) {
  const joined = text.replaceAll(/\s+/g, " ").trim();
  return joined.length > most ? `${joined.slice(0, most)}…` : joined;
}
