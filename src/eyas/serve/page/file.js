// The page that `eyas generate --view` writes: one prompt, its answer, and every cycle of it.

import { Answer } from "./answer.js";
import { el } from "./dom.js";
import { count } from "./explain.js";
import { Inspector } from "./inspector.js";
import { introduction, tokenKeys } from "./legend.js";

/** The text of the answer is shorter than that of its tokens where a stop string ended it; without a tokenizer there is none. */
function showAnswer(answer, { text, cycles }) {
  let rest = text ?? cycles.flatMap((cycle) => cycle.tokens.map((token) => token.text)).join("");
  for (const cycle of cycles) {
    const length = cycle.tokens.reduce((sum, token) => sum + token.text.length, 0);
    answer.add(rest.slice(0, length), cycle);
    rest = rest.slice(length);
  }
  answer.end();
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const inspector = new Inspector(document.getElementById("panel"), introduction());
  const answer = new Answer((answer, at) => inspector.show(answer, at));
  showAnswer(answer, data);
  const cycles = data.cycles.filter((cycle) => !cycle.prefill).length;
  const tokens = data.cycles.reduce((sum, cycle) => sum + cycle.tokens.length, 0);
  const figures = [count(tokens, "token"), count(cycles, "cycle"), `tau ${data.tau.toFixed(2)}`, `${data.seconds.toFixed(2)} s`];
  document.getElementById("model").textContent = [data.target, data.method].join(" \u00b7 ");
  document.getElementById("talk").append(
    ...(data.system ? [el("div", { class: "turn user" }, el("h2", {}, "System"), el("div", { class: "text" }, data.system))] : []),
    el("div", { class: "turn user" }, el("h2", {}, "Prompt"), el("div", { class: "text" }, data.prompt)),
    el("div", { class: "turn" }, el("h2", {}, "Answer"), answer.element, el("p", { class: "quiet figures" }, figures.join(" \u00b7 ")), tokenKeys()),
  );
}

start();
