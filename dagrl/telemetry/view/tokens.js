// One conversation, its tokens coloured by what the run knows of them.

const RED = "220,38,38", BLUE = "37,99,235", VIOLET = "124,58,237";
const CLIP = 0.2; // log-ratios are shown up to the usual clipping range

// Each mode gives a token's colour, and what its scale means.
const MODES = {
  logprob: { title: "log-probability", ends: ["certain (0)", "unlikely (-5 nats)"], color: (t) => tint(RED, -t.logprob / 5) },
  ratio: { title: "ratio trainer / engine", ends: ["below 0.82", "above 1.22"], color: (t) => twoSided(t.train, t.logprob), both: true },
  kl: { title: "KL of trainer and engine", ends: ["1e-6", "1 nat"], color: (t) => t.kl === null ? "" : tint(RED, (Math.log10(Math.max(t.kl, 1e-9)) + 6) / 6) },
  reference: { title: "ratio trainer / reference", ends: ["below 0.82", "above 1.22"], color: (t) => twoSided(t.train, t.reference), both: true },
  entropy: { title: "entropy", ends: ["0", "3 nats"], color: (t) => t.entropy === null ? "" : tint(VIOLET, t.entropy / 3) },
  version: { title: "policy version", ends: ["", ""], color: (t) => versionColor(t.version) },
};

function tint(rgb, share) {
  const alpha = Math.max(0, Math.min(1, share)) * 0.75;
  return alpha < 0.01 ? "" : `rgba(${rgb},${alpha.toFixed(3)})`;
}

function twoSided(left, right) {
  if (left === null || right === null) return "";
  const difference = left - right;
  return tint(difference < 0 ? RED : BLUE, Math.abs(difference) / CLIP);
}

function versionColor(version) {
  return `hsla(${(version * 47) % 360},65%,55%,0.38)`;
}

function tokensOf(sample) {
  return sample.tokens.map((id, at) => {
    const [logprob, sampled] = [sample.logprobs[at], sample.sampled[at]];
    const of = (column) => (sampled && column ? column[at] : null);
    const train = of(sample.train_logprobs);
    const difference = train === null ? null : train - logprob;
    return { id, at, sampled, logprob, train, text: sample.token_texts[at], version: sample.versions[at],
      reference: of(sample.reference_logprobs), entropy: of(sample.entropy),
      kl: difference === null ? null : Math.expm1(difference) - difference };
  });
}

function describe(token) {
  const lines = [`token ${token.id} ${JSON.stringify(token.text)}`];
  if (!token.sampled) return [...lines, "from the environment"].join("\n");
  lines.push(`log-probability ${shown(token.logprob)} (${shown(100 * Math.exp(token.logprob), 3)} %)`);
  if (token.train !== null) lines.push(`trainer's ${shown(token.train)}, ratio ${Math.exp(token.train - token.logprob).toFixed(4)}, KL ${shown(token.kl, 2)}`);
  if (token.reference !== null) lines.push(`reference's ${shown(token.reference)}`);
  if (token.entropy !== null) lines.push(`entropy ${shown(token.entropy)}`);
  lines.push(`policy version ${token.version}`);
  return lines.join("\n");
}

function scaleOf(mode, tokens) {
  const { title, ends, both } = MODES[mode];
  if (mode === "version") {
    const versions = [...new Set(tokens.filter((t) => t.sampled).map((t) => t.version))].sort((a, b) => a - b);
    return h("div", { class: "legend" }, h("span", {}, `${title}:`), versions.map((one) => legendItem(String(one), versionColor(one), false, true)));
  }
  const rgb = mode === "entropy" ? VIOLET : RED;
  const colors = both ? `rgba(${RED},.75), transparent, rgba(${BLUE},.75)` : `transparent, rgba(${rgb},.75)`;
  return h("div", { class: "scale" }, h("span", {}, `${title}:`), h("span", {}, ends[0]), h("i", { style: `background:linear-gradient(90deg, ${colors})` }), h("span", {}, ends[1]));
}

function conversation(sample, mode, run) {
  const tokens = tokensOf(sample);
  const parts = Object.entries(sample.reward_parts || {});
  const split = sample.split === "validation" ? [["split", "validation"]] : sample.dropped ? [["dropped", sample.dropped.replaceAll("_", " ")]] : [];
  const facts = [["step", sample.step], ...split, ...(sample.task ? [["task", sample.task]] : []), ["reward", shown(sample.reward)], ["advantage", shown(sample.advantage)],
    ["tokens", tokens.length], ["ended by", sample.finish_reason], ["policy versions", versionsText(tokens)]];
  if (parts.length > 1) facts.push(...parts.map(([name, value]) => [`reward: ${name}`, shown(value)]));
  if (sample.reference) facts.push(["expected", sample.reference.length > 60 ? `…${sample.reference.slice(-60)}` : sample.reference]);
  const more = sample.conversations || [];
  const title = (one, at) => `Conversation ${at + 2} of ${more.length + 1}${one.trained ? "" : ", not trained on"}`;
  return h("section", { class: "card conversation" },
    h("h2", {}, sample.source || "Sample", h("span", {}, `group ${sample.group}, sample ${sample.place}`)),
    sample.failure ? h("p", { class: "failure" }, sample.failure) : null,
    h("div", { class: "facts" }, facts.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, String(value))))),
    scaleOf(mode, [sample, ...more].flatMap(tokensOf)),
    turns(sample, mode, run),
    more.map((one, at) => h("details", { open: "" }, h("summary", {}, title(one, at)), turns(one, mode, run))));
}

function turns(sequence, mode, run) {
  const tokens = tokensOf(sequence);
  const src = (name) => EXPORTED ? EXPORTED.runs[run].media[name] : `api/medium?${new URLSearchParams({ run, name })}`;
  const images = (sequence.media || []).map((name) => h("img", { src: src(name), alt: name }));
  return [images.length ? h("div", { class: "images" }, images) : null, turn("prompt", "prompt", [sequence.prompt]), ...sequence.turns.map((one) => turn(one.role, `${one.role}, ${one.end - one.start} tokens${one.reward === null ? "" : `, reward ${shown(one.reward)}`}`,
    tokens.slice(one.start, one.end).map((token) => tokenSpan(token, mode))))];
}

function versionsText(tokens) {
  const made = tokens.filter((t) => t.sampled).map((t) => t.version);
  const [first, last] = [Math.min(...made), Math.max(...made)];
  return !made.length ? "–" : first === last ? first : `${first} to ${last}`;
}

function turn(role, title, children) {
  return h("div", { class: `turn ${role}` }, h("span", {}, title), h("pre", {}, children));
}

function tokenSpan(token, mode) {
  const color = token.sampled ? MODES[mode].color(token) : "";
  const text = token.text.replaceAll("\n", "↵\n");
  return h("span", { class: "token", style: color ? `background:${color}` : null,
    onpointermove: (event) => tip(event, describe(token)), onpointerleave: () => tip(null) }, text);
}
